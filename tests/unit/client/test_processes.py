"""Children that do not outlive the process that started them, by the kernel and by a watchdog."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PARENT = """
import pathlib, signal, sys, time
# A test run in the background of a script starts with it ignored, and no shell could trap it.
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
from fencepost.client.processes import Child
place = pathlib.Path(sys.argv[1])
line = "trap 'touch asked; exit' QUIT; echo $$ > pid; while :; do sleep 0.02; done"
child = Child.start(
    "shell", ["sh", "-c", line], log=place / "log", cwd=place, death_signal=int(sys.argv[2])
)
assert (child._watchdog is not None) == (len(sys.argv) > 3)
(place / "ready").touch()
time.sleep(600)
"""
WAIT_S = 30.0


def wait_for(path: Path) -> bool:
    until = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGKILL])
def test_a_child_of_a_killed_parent_ends_by_its_death_signal(
    tmp_path: Path, number: signal.Signals, portable: bool
) -> None:
    env = {**os.environ, "FENCEPOST_PORTABLE": "1" if portable else ""}
    argv = [sys.executable, "-c", PARENT, str(tmp_path), str(int(number))]
    parent = subprocess.Popen([*argv, "watchdog"] if portable else argv, env=env)
    try:
        assert wait_for(tmp_path / "ready")
        assert wait_for(tmp_path / "pid")
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        assert child.is_running()
    finally:
        parent.kill()
        parent.wait()
    psutil.wait_procs([child], timeout=WAIT_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert (tmp_path / "asked").exists() == (number == signal.SIGQUIT)
