"""The oldest Python that a sandbox may have."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fencepost.toolhost import compiled_path, source, source_path

from tests.unit.toolhost.driver import Disk, Toolhost
from tests.unit.toolhost.test_files import tree

Start = Callable[..., Toolhost]


def old_pythons() -> list[str]:
    found = [shutil.which("python3.8"), shutil.which("python3.9")]
    homes = sorted(Path.home().glob(".pyenv/versions/3.8.*/bin/python"))
    return [path for path in [*found, *map(str, homes)] if path and works(path)]


def works(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def test_the_source_can_be_piped_and_stands_alone():
    assert source() == source_path().read_bytes()
    assert b"import fencepost" not in source()
    assert b"from fencepost" not in source()
    assert compiled_path().exists()


@pytest.mark.skipif(not old_pythons(), reason="no Python 3.8 here")
def test_python_3_8_does_all_that_a_newer_one_does(start: Start, disk: Disk):
    host = start(python=old_pythons()[-1])
    assert host.hello()["python"].startswith("3.")
    host.mark()
    assert host.write("s1.1", "d/a", "1\n")["outcome"] == "ok"
    assert host.write("s2.1", "d/a", "2\n")["outcome"] == "ok"
    patch = "--- a/d/a\n+++ b/d/a\n@@ -1 +1 @@\n-2\n+3\n"
    assert host.apply("s3.1", "apply_patch", {"patch": patch})["outcome"] == "ok"
    assert host.apply("s4.1", "run_command", {"shell": "cat d/a"})["result"]["stdout"] == "3\n"
    assert host.good("search", {"pattern": "3"})["matches"][0]["path"] == "d/a"
    assert host.good("list_dir", {"path": ".", "recursive": True})["cut"] is False
    assert host.apply("s5.1", "delete_path", {"path": "d", "recursive": True})["outcome"] == "ok"
    for step in ("s5", "s3", "s2", "s1"):
        assert host.undo(f"{step}.u", of=f"{step}.1")["verdict"] == "applied"
    assert tree(disk) == {}
