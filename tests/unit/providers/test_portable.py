"""The `process` provider without what only Linux has, as on macOS: processes are found by `ps`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from fencepost.providers import processes
from fencepost.providers.process import ProcessProvider

from tests.unit.providers import test_process as process
from tests.unit.providers.provider_contract import SPEC, ProviderContract, made, wait_for


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sandboxes"


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processes.PORTABLE, "1")


@pytest.fixture
def provider(root: Path, portable: None) -> ProcessProvider:
    assert processes.is_portable()
    return ProcessProvider(root, isolate=False)


class TestPortableProcessProvider(process.Announcing, ProviderContract):
    @pytest.fixture
    def provider(self, root: Path, portable: None) -> ProcessProvider:
        return ProcessProvider(root, isolate=False)


class TestByPs:
    test_stop = staticmethod(process.test_a_stop_ends_a_running_command_and_what_it_left_behind)
    test_killed = staticmethod(process.test_a_toolhost_that_is_killed_ends_its_channel)
    test_channel = staticmethod(process.test_ending_a_channel_ends_its_tools_and_leaves_the_sandbox)

    @pytest.mark.usefixtures("portable")
    def test_identity(self) -> None:
        process.test_a_process_id_that_was_given_to_another_one_is_left_alone()


class TestHiddenEnvironments:
    """macOS does not show the environment of Apple's programs; here it shows that of none."""

    @pytest.fixture(autouse=True)
    def hidden(self, portable: None, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = processes._ps

        def ps(*flags: str, columns: tuple[str, ...]) -> list[bytes]:
            return asked(*(flag.replace("axwwe", "axww") for flag in flags), columns=columns)

        monkeypatch.setattr(processes, "_ps", ps)

    test_stop = staticmethod(process.test_a_stop_ends_a_running_command_and_what_it_left_behind)

    async def test_what_a_stopped_toolhost_runs_ends_with_its_channel(
        self, provider: ProcessProvider
    ) -> None:
        talk = await process.opened(provider)
        ref = await made(provider)
        # In another session below the shell, below it, and without a parent in its group.
        line = "(setsid sleep 300; true) & (sleep 302 &); sleep 301"
        talk.channel.write(process._apply_frame({"shell": line}))

        async def running() -> bool:
            return len(process._sleeping(ref.instance)) == 3

        assert await wait_for(running)
        left = processes.find(processes.INSTANCE, ref.instance)
        os.kill(talk.channel.pid, signal.SIGSTOP)  # it ends nothing itself any more
        await talk.channel.end(grace_s=0)
        assert [pid for pid, start in left.items() if processes.started_at(pid) == start] == []


@pytest.mark.usefixtures("portable")
def test_where_processes_cannot_be_listed_nothing_is_said_to_be_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert processes.kill_all(processes.INSTANCE, "i-nobody") is True
    monkeypatch.setattr(processes, "_ps", lambda *_, **__: [])
    assert processes.kill_all(processes.INSTANCE, "i-nobody") is False


@pytest.mark.usefixtures("portable")
def test_a_boot_that_nothing_tells_makes_the_disk_durable_instead(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.providers.process._said", lambda _argv: "")
    unknown = ProcessProvider(root, isolate=False)
    assert unknown.traits.capabilities.power_loss_is_new_instance is False
    assert "--sync" in unknown._command(root / "x", "i", "c", SPEC)
    monkeypatch.setattr("fencepost.providers.process._said", lambda _argv: "6F-A0")
    known = ProcessProvider(root, isolate=False)
    assert known.traits.capabilities.power_loss_is_new_instance is True
    assert "--sync" not in known._command(root / "x", "i", "c", SPEC)


def test_our_own_python_runs_the_compiled_toolhost_and_another_one_its_source(
    root: Path,
) -> None:
    ours = ProcessProvider(root)._command(root / "x", "i", "c", SPEC)
    assert ours[3].endswith(".pyc")
    assert Path(ours[0]).samefile(getattr(sys, "_base_executable", sys.executable))
    other = ProcessProvider(root, python="/usr/bin/another")._command(root / "x", "i", "c", SPEC)
    assert other[3].endswith("toolhost.py")
