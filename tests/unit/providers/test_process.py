"""The `process` provider: the provider contract, its disk layout, and its walls."""

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from fencepost.core.facts import Ref
from fencepost.core.steps import SandboxSpec, digest_of
from fencepost.providers import bubblewrap, processes
from fencepost.providers.process import ProcessProvider
from fencepost.providers.protocol import Absent, CreateAmbiguous, Created, CreateRefused, Unknown

from tests.unit.providers.provider_contract import (
    LABELS,
    SPEC,
    ProviderContract,
    Talk,
    made,
    wait_for,
)

needs_bwrap = pytest.mark.skipif(
    bubblewrap.probe() is None, reason="bubblewrap is not there, or not allowed to work here"
)


class Announcing:
    async def announce(self, provider: ProcessProvider, ref: Ref) -> None:
        (provider._root / ref.native_id / "going").write_text("120\n")


class TestIsolatedProcessProvider(Announcing, ProviderContract):
    @pytest.fixture
    def provider(self, tmp_path: Path) -> ProcessProvider:
        return ProcessProvider(tmp_path / "sandboxes")


class TestPlainProcessProvider(Announcing, ProviderContract):
    @pytest.fixture
    def provider(self, tmp_path: Path) -> ProcessProvider:
        return ProcessProvider(tmp_path / "sandboxes", isolate=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sandboxes"


@pytest.fixture(params=["bubblewrap", "none"])
def provider(request, root: Path) -> ProcessProvider:
    if request.param == "bubblewrap" and bubblewrap.probe() is None:
        pytest.skip("bubblewrap is not there, or not allowed to work here")
    return ProcessProvider(root, isolate=request.param == "bubblewrap")


async def opened(provider: ProcessProvider, spec: SandboxSpec = SPEC) -> Talk:
    talk = Talk(await provider.channel(await made(provider), spec))
    await talk.ask({"k": "mark", "id": "m", "epoch": 1, "session": "s", "nonce": "n"})
    return talk


async def ran(talk: Talk, args: dict, no: int = 1) -> dict:
    body = json.dumps(args).encode()
    fence = {
        "sandbox": "sbx",
        "epoch": 1,
        "session": "s",
        "attempt": f"s{no}.1",
        "no": no,
        "direction": "apply",
    }
    head = {
        "k": "apply",
        "fence": fence,
        "step": f"s{no}",
        "tool": "run_command",
        "digest": digest_of(body),
        "effect": "workspace",
    }
    _, receipt = await talk.ask(head, body)
    return json.loads(receipt)


async def shell(talk: Talk, line: str, no: int = 1, **more: object) -> dict:
    receipt = await ran(talk, {"shell": line, **more}, no)
    assert receipt["verdict"] == "applied", receipt
    return receipt["result"]


async def read_only(talk: Talk, line: str) -> dict:
    head, body = await talk.ask(
        {"k": "read", "id": "r", "tool": "run_command"}, json.dumps({"shell": line}).encode()
    )
    return {"ok": head["ok"], **json.loads(body)}


# -- names, disks, authorities --------------------------------------------------------------------


async def test_two_gateways_on_one_root_share_authority_and_sandboxes(root: Path) -> None:
    left, right = ProcessProvider(root), ProcessProvider(root)
    assert left.traits.authority == right.traits.authority
    ref = await made(left)
    assert (await right.observe(ref)).state == "present"
    assert await made(right) == ref


async def test_two_roots_are_two_authorities(tmp_path: Path) -> None:
    left, right = ProcessProvider(tmp_path / "a"), ProcessProvider(tmp_path / "b")
    assert left.traits.authority != right.traits.authority
    assert (await right.observe(await made(left))).state == "unknown"


async def test_deployments_on_one_root_do_not_see_each_other(root: Path) -> None:
    one, two = ProcessProvider(root, deployment="one"), ProcessProvider(root, deployment="two")
    await made(one)
    assert (await two.list()).items == ()
    assert isinstance(await two.find("acq-1"), Absent)
    assert len((await one.list()).items) == 1


async def test_a_create_leaves_nothing_half_made(root: Path) -> None:
    provider = ProcessProvider(root)
    ref = await made(provider)
    home = root / ref.native_id
    assert sorted(os.listdir(home)) == ["instance", "labels.json", "state", "workspace"]
    assert os.listdir(root / ".new") == []
    assert (home / "instance").read_text().strip() == ref.instance


async def test_a_create_that_cannot_write_is_refused_and_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = ProcessProvider(root)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(provider, "_prepare", full)
    answer = await provider.create("acq-1", SPEC, LABELS)
    assert isinstance(answer, CreateRefused)
    assert "No space left" in answer.reason
    assert (await provider.list()).items == ()


async def test_a_root_that_went_away_proves_no_absence(root: Path) -> None:
    provider = ProcessProvider(root)
    ref = await made(provider)
    root.rename(root.with_name("elsewhere"))
    root.mkdir()  # as an unmounted disk leaves its mount point
    assert (await provider.observe(ref)).state == "unknown"
    assert isinstance(await provider.find("acq-1"), Unknown)
    assert not (await provider.list()).complete
    assert (await provider.stop(ref, ref.instance)).answer == "unreachable"
    assert isinstance(await provider.create("acq-2", SPEC, LABELS), CreateAmbiguous)


async def test_another_root_in_the_same_place_proves_no_absence(root: Path) -> None:
    provider = ProcessProvider(root)
    ref = await made(provider)
    root.rename(root.with_name("elsewhere"))
    await made(ProcessProvider(root))
    assert (await provider.observe(ref)).state == "unknown"
    assert not (await provider.list()).complete
    shutil.rmtree(root)
    root.with_name("elsewhere").rename(root)
    assert (await provider.observe(ref)).state == "present"


async def test_a_root_made_anew_is_another_authority(root: Path) -> None:
    ref = await made(ProcessProvider(root))
    shutil.rmtree(root)
    again = ProcessProvider(root)
    assert again.traits.authority != ref.authority
    assert (await again.observe(ref)).state == "unknown"


@needs_bwrap
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_a_stop_needs_no_room_that_the_sandbox_itself_takes(
    provider: ProcessProvider, root: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    ref = await made(provider)
    big = root / ref.native_id / "workspace" / "big"
    big.write_text("all that the disk has")
    settle = provider._settle

    def full(native: str) -> None:
        if big.exists():
            raise OSError(error, os.strerror(error))
        settle(native)

    monkeypatch.setattr(provider, "_settle", full)
    answer = await provider.stop(ref, ref.instance)
    if error == errno.EIO:
        assert answer.answer == "unreachable", "the control: a broken disk is emptied by nobody"
        assert big.exists()
        assert (await provider.observe(ref)).state == "present"
        return
    assert answer.answer == "accepted", answer
    assert (await provider.observe(ref)).state == "gone"
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateRefused)


def test_a_gateway_starts_on_a_disk_that_is_full(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ProcessProvider(root)

    def full(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert ProcessProvider(root).traits.authority == first.traits.authority
    with pytest.raises(OSError, match="No space left"):
        ProcessProvider(tmp_path / "another")


async def test_an_unreadable_instance_proves_nothing(root: Path) -> None:
    provider = ProcessProvider(root)
    ref = await made(provider)
    (root / ref.native_id / "instance").write_text("")
    assert (await provider.observe(ref)).state == "unknown"
    assert not (await provider.list()).complete


async def test_after_a_reboot_the_former_sandboxes_are_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ProcessProvider(root)
    ref = await made(before)
    monkeypatch.setattr("fencepost.providers.process._boot_id", lambda: "another boot")
    after = ProcessProvider(root)
    assert after.traits.authority == before.traits.authority
    assert (await after.observe(ref)).state == "gone"
    assert (await after.list()).items == ()
    fresh = await after.create("acq-1", SPEC, LABELS)
    assert isinstance(fresh, Created)
    assert fresh.ref.instance != ref.instance


async def test_a_former_boots_folder_that_stays_is_no_sandbox(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await made(ProcessProvider(root))
    monkeypatch.setattr("fencepost.providers.process._boot_id", lambda: "another boot")
    monkeypatch.setattr(ProcessProvider, "_retire_former_boots", lambda _self: None)
    after = ProcessProvider(root)
    assert (root / ref.native_id).exists()
    assert (await after.observe(ref)).state == "gone"
    assert (await after.list()).items == ()


async def test_s182_a_folder_removed_behind_our_back_is_gone(root: Path) -> None:
    provider = ProcessProvider(root)
    ref = await made(provider)
    shutil.rmtree(root / ref.native_id)
    assert (await provider.observe(ref)).state == "gone"
    assert (await provider.stop(ref, ref.instance)).answer == "not_found"


async def test_s182_the_same_name_with_another_instance_is_gone_for_the_former(
    root: Path,
) -> None:
    provider = ProcessProvider(root)
    ref = await made(provider)
    shutil.rmtree(root / ref.native_id)
    again = await made(provider)
    assert again.native_id == ref.native_id
    seen = await provider.observe(ref)
    assert (seen.state, seen.instance) == ("gone", again.instance)


async def test_s168_what_cannot_be_killed_is_terminating_and_not_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = ProcessProvider(root)
    ref = await made(provider)
    with monkeypatch.context() as patched:
        patched.setattr(processes, "kill_all", lambda *_: False)
        assert (await provider.stop(ref, ref.instance)).answer == "accepted"
        assert (await provider.observe(ref)).state == "terminating"
        assert (await provider.stop(ref, ref.instance)).answer == "accepted"
        assert (await provider.observe(ref)).state == "terminating"
        assert [item.state for item in (await provider.list()).items] == ["terminating"]
    assert (await provider.stop(ref, ref.instance)).answer == "accepted"
    assert (await provider.observe(ref)).state == "gone"


async def test_a_create_settled_while_it_is_made_takes_its_result_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = ProcessProvider(root)
    prepare = provider._prepare

    def prepare_and_settle(fresh: Path, labels: dict[str, str]) -> None:
        prepare(fresh, labels)
        provider._settle(provider._native_id("acq-1"))

    monkeypatch.setattr(provider, "_prepare", prepare_and_settle)
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateRefused)
    assert (await provider.list()).items == ()
    monkeypatch.setattr(provider, "_prepare", prepare)
    assert isinstance(await provider.create("acq-2", SPEC, LABELS), Created)


async def test_folders_that_a_tool_made_unwritable_are_removed(root: Path) -> None:
    provider = ProcessProvider(root)
    ref = await made(provider)
    inner = root / ref.native_id / "workspace" / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "f").write_text("x")
    inner.chmod(0o500)
    inner.parent.chmod(0o500)
    await provider.stop(ref, ref.instance)
    assert (await provider.observe(ref)).state == "gone"


# -- processes ------------------------------------------------------------------------------------


async def test_a_stop_ends_a_running_command_and_what_it_left_behind(
    provider: ProcessProvider,
) -> None:
    talk = await opened(provider)
    ref = await made(provider)
    # In the background, in a session of its own, and without the environment that marks it.
    line = "sleep 300 & setsid sleep 301 & env -i /bin/sleep 302 & sleep 303"
    talk.channel.write(_apply_frame({"shell": line}))

    async def running() -> bool:
        return len(_sleeping(ref.instance)) >= 4

    assert await wait_for(running), processes.find(processes.INSTANCE, ref.instance)
    pids = processes.find(processes.INSTANCE, ref.instance)
    await provider.stop(ref, ref.instance)
    assert [pid for pid, start in pids.items() if processes.started_at(pid) == start] == []
    assert (await provider.observe(ref)).state == "gone"
    await talk.channel.end()


def _sleeping(instance: str) -> list[int]:
    found = []
    for pid in processes.find(processes.INSTANCE, instance):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == "sleep":
                found.append(pid)
        except OSError:
            continue
    return found


def _apply_frame(args: dict) -> bytes:
    body = json.dumps(args).encode()
    fence = {
        "sandbox": "sbx",
        "epoch": 1,
        "session": "s",
        "attempt": "long.1",
        "no": 99,
        "direction": "apply",
    }
    head = {
        "k": "apply",
        "fence": fence,
        "step": "long",
        "tool": "run_command",
        "digest": digest_of(body),
        "effect": "workspace",
        "n": len(body),
    }
    return json.dumps(head).encode() + b"\n" + body


async def test_a_toolhost_that_is_killed_ends_its_channel(provider: ProcessProvider) -> None:
    talk = await opened(provider)
    os.kill(talk.channel.pid, signal.SIGKILL)

    async def ended() -> bool:
        return talk.ended is not None

    assert await wait_for(ended)
    await talk.channel.end()
    assert processes.started_at(talk.channel.pid) is None
    assert talk.channel.last_words() == "signal 9"


async def test_a_toolhost_that_cannot_read_its_stream_says_so(provider: ProcessProvider) -> None:
    talk = await opened(provider)
    talk.channel.write(b"no head\n")

    async def ended() -> bool:
        return talk.ended is not None

    assert await wait_for(ended)
    await talk.channel.end()
    # Ended by its own word, or by us when we saw its stream end first.
    said = talk.channel.last_words()
    assert said.startswith(("exit 2", "signal 9")), said
    assert "cannot be trusted" in said


async def test_ending_a_channel_ends_its_tools_and_leaves_the_sandbox(
    provider: ProcessProvider,
) -> None:
    talk = await opened(provider)
    ref = await made(provider)
    talk.channel.write(_apply_frame({"shell": "sleep 300"}))

    async def running() -> bool:
        return len(_sleeping(ref.instance)) == 1

    assert await wait_for(running)
    await talk.channel.end(grace_s=0)
    assert processes.find(processes.INSTANCE, ref.instance) == {}
    assert (await provider.observe(ref)).state == "present"


async def test_a_large_write_arrives_whole(provider: ProcessProvider) -> None:
    talk = await opened(provider)
    content = os.urandom(4 << 20)
    digest = digest_of(content)
    for at in range(0, len(content), 1 << 18):
        part = content[at : at + (1 << 18)]
        last = at + len(part) == len(content)
        head = {"k": "blob", "digest": digest, "size": len(content), "last": last, "n": len(part)}
        talk.channel.write(json.dumps(head).encode() + b"\n" + part)
    await talk.channel.drain()
    args = {"path": "big", "content_ref": {"$blob": digest, "size": len(content)}}
    body = json.dumps(args).encode()
    head = json.loads(_apply_frame({}).split(b"\n")[0])
    head |= {"tool": "write_file", "digest": digest_of(body)}
    _, receipt = await talk.ask(head, body)
    assert json.loads(receipt)["verdict"] == "applied", receipt
    ref = await made(provider)
    assert (provider._root / ref.native_id / "workspace" / "big").read_bytes() == content
    await talk.channel.end()


def test_a_process_id_that_was_given_to_another_one_is_left_alone() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        start = processes.started_at(pid)
        assert start is not None
        processes._kill(pid, start - 1)
        time.sleep(0.2)  # a signal that was sent would have arrived
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        processes._kill(pid, start)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# -- walls ----------------------------------------------------------------------------------------


def test_without_bubblewrap_no_isolation_is_claimed(root: Path) -> None:
    plain = ProcessProvider(root, isolate=False).traits.capabilities
    assert (plain.isolation, plain.readonly_commands) == ("none", False)


@needs_bwrap
class TestWalls:
    @pytest.fixture
    async def talk(self, root: Path):
        self.provider = ProcessProvider(root)
        self.ref = await made(self.provider)
        talk = await opened(self.provider)
        yield talk
        await talk.channel.end()

    def test_it_is_claimed(self, root: Path) -> None:
        walled = ProcessProvider(root).traits.capabilities
        assert (walled.isolation, walled.readonly_commands) == ("bubblewrap", True)

    async def test_the_workspace_is_writable_and_shared_with_file_tools(self, talk: Talk) -> None:
        result = await shell(talk, "pwd && echo hi > made && mkdir -p d && id -u")
        assert result["exit_code"] == 0, result
        assert result["stdout"].split() == ["/workspace", "1000"]
        made_file = self.provider._root / self.ref.native_id / "workspace" / "made"
        assert made_file.read_text() == "hi\n"
        inner = await shell(talk, "pwd", 2, cwd="d")
        assert inner["stdout"].strip() == "/workspace/d", inner

    @pytest.mark.parametrize("path", ["/usr/x", "/etc/x", "/x", "/bin/x", "/dev/x"])
    async def test_nothing_else_is_writable(self, talk: Talk, path: str) -> None:
        result = await shell(talk, f"echo x > {path}")
        assert result["exit_code"] != 0
        assert not Path(path).exists()

    async def test_journal_and_marker_cannot_be_seen(self, talk: Talk) -> None:
        home = self.provider._root / self.ref.native_id
        assert (home / "state" / "marker.json").exists()
        result = await shell(talk, f"cat {home}/state/marker.json {home}/instance; ls {home}")
        assert "nonce" not in result["stdout"]
        assert result["exit_code"] != 0 or "state" not in result["stdout"]

    async def test_other_sandboxes_and_the_host_cannot_be_seen(self, talk: Talk) -> None:
        outside = self.provider._root / "secret"
        outside.write_text("secret")
        home = Path.home()
        result = await shell(talk, f"cat {outside}; ls -A {home} /home /etc/shadow; ls /proc")
        assert "secret" not in result["stdout"].split()
        # Only its own processes: bwrap's, the shell and ls.
        numbers = [word for word in result["stdout"].split() if word.isdigit()]
        assert len(numbers) <= 4, numbers

    async def test_there_is_no_network_unless_asked_for(self, talk: Talk) -> None:
        line = "cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '"
        assert (await shell(talk, line))["stdout"].split() == ["lo"]
        asked = SandboxSpec(network=True, memory_mb=1024)
        ref = await self.provider.create("acq-net", asked, LABELS)
        assert isinstance(ref, Created)
        other = Talk(await self.provider.channel(ref.ref, asked))
        await other.ask({"k": "mark", "id": "m", "epoch": 1, "session": "s", "nonce": "n"})
        devices = (await shell(other, line))["stdout"].split()
        host = [
            part.split(":")[0].strip()
            for part in Path("/proc/net/dev").read_text().splitlines()[2:]
        ]
        assert devices == host
        await other.channel.end()

    async def test_the_environment_is_ours_alone(
        self, talk: Talk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        result = await shell(talk, "env", env={"GIVEN": "yes"})
        names = {line.split("=")[0] for line in result["stdout"].splitlines()}
        allowed = {"PATH", "LANG", "HOME", "TMPDIR", "PWD", "SHLVL", "OLDPWD", "_", "GIVEN"}
        assert {n for n in names if not n.startswith("FENCEPOST_")} <= allowed, names
        assert "GIVEN" in names
        assert "HOME=/workspace" in result["stdout"]

    async def test_no_privilege_and_no_new_namespace(self, talk: Talk) -> None:
        line = "grep CapEff /proc/self/status; unshare -U true && echo nested"
        result = await shell(talk, line)
        assert "CapEff:\t0000000000000000" in result["stdout"]
        if "--disable-userns" in bubblewrap.probe().user:
            assert "nested" not in result["stdout"]

    async def test_memory_is_limited(self, talk: Talk) -> None:
        # One buffer of that size, which dd takes from the heap.
        line = "dd if=/dev/zero of=/dev/null count=1 bs={}M"
        assert (await shell(talk, line.format(2 * SPEC.memory_mb)))["exit_code"] != 0
        assert (await shell(talk, line.format(SPEC.memory_mb // 8), 2))["exit_code"] == 0

    async def test_scratch_folders_are_memory_and_limited(self, talk: Talk) -> None:
        if not bubblewrap.probe().is_sized:
            pytest.skip("this bubblewrap cannot bound a scratch folder")
        line = "df -m /tmp /dev/shm | awk 'NR > 1 { print $2 }'"
        sizes = (await shell(talk, line))["stdout"].split()
        assert sizes == [str(SPEC.memory_mb)] * 2
        assert (await shell(talk, "echo x > /tmp/x && echo x > /dev/shm/x", 2))["exit_code"] == 0

    async def test_the_limit_on_processes_is_set_inside(self, talk: Talk) -> None:
        result = await shell(talk, "awk '/Max processes/ { print $3 }' /proc/self/limits")
        assert result["stdout"].strip() == str(SPEC.processes)

    async def test_time_is_limited_and_nothing_is_left(self, talk: Talk) -> None:
        result = await shell(talk, "sleep 300 & sleep 300", timeout_ms=300)
        assert result["timed_out"]
        assert _sleeping(self.ref.instance) == []

    async def test_s213_a_read_only_command_cannot_write(self, talk: Talk) -> None:
        await shell(talk, "echo one > kept")
        result = await read_only(talk, "cat kept; echo two > kept; echo x > new; echo $?")
        assert "one" in result["stdout"]
        assert "Read-only file system" in result["stderr"]
        workspace = self.provider._root / self.ref.native_id / "workspace"
        assert (workspace / "kept").read_text() == "one\n"
        assert not (workspace / "new").exists()
        # The same, fenced, writes.
        await shell(talk, "echo two > kept", 2)
        assert (workspace / "kept").read_text() == "two\n"


async def test_s213_without_a_read_only_view_no_command_is_read_only(root: Path) -> None:
    plain = ProcessProvider(root, isolate=False)
    talk = await opened(plain)
    result = await read_only(talk, "echo x > new")
    assert (result["ok"], result["reason"]) == (False, "unsupported")
    ref = await made(plain)
    assert os.listdir(root / ref.native_id / "workspace") == []
    await talk.channel.end()
