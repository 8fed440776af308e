"""The `docker` provider on a real engine: its contract, its walls, and an engine that ends."""

import asyncio
import contextlib
import json
import secrets
import subprocess
from collections.abc import AsyncIterator

import pytest
from fencepost.core.facts import Ref
from fencepost.core.steps import SandboxSpec, digest_of
from fencepost.providers.docker import DockerProvider
from fencepost.providers.protocol import ChannelRefusedError, Created

from tests.engine import NATS, PYTHON, Engine
from tests.unit.providers.docker_contract import DockerContract
from tests.unit.providers.provider_contract import LABELS, SPEC, Talk, made, wait_for

pytestmark = [pytest.mark.docker, pytest.mark.budget(150)]

OLD = """\
FROM python:3.11-slim
ENTRYPOINT []
ENV PATH=/old:/usr/local/bin:/usr/bin:/bin
USER 0
RUN mkdir /old && printf '#!/bin/sh\\necho too old 3.7\\nexit 83\\n' > /old/python3 && chmod 755 /old/python3
"""


KILL_TOOLHOST = """\
import os
for name in os.listdir("/proc"):
    if not name.isdigit() or int(name) == os.getpid():
        continue
    if b"--tool-uid" in open("/proc/" + name + "/cmdline", "rb").read():
        os.kill(int(name), 9)
"""


@contextlib.asynccontextmanager
async def providing(engine: Engine) -> AsyncIterator[DockerProvider]:
    """Of a deployment of its own, whose containers and volumes are taken away at the end."""
    deployment = f"test-{secrets.token_hex(4)}"
    provider = await DockerProvider.open(engine.host, deployment=deployment, image=PYTHON)
    yield provider
    await provider.close()
    await asyncio.to_thread(clear, engine, deployment)


@pytest.fixture
async def provider(engine: Engine) -> AsyncIterator[DockerProvider]:
    async with providing(engine) as provider:
        yield provider


@pytest.fixture
async def another(engine: Engine, provider: DockerProvider) -> AsyncIterator[DockerProvider]:
    provider = await DockerProvider.open(engine.host, deployment=provider._deployment, image=PYTHON)
    yield provider
    await provider.close()


def clear(engine: Engine, deployment: str) -> None:
    label = f"label=fencepost.deployment={deployment}"
    if left := engine.docker("ps", "-aq", "--filter", label).split():
        engine.docker("rm", "-fv", *left)
    settled = f"label=fencepost.settled_in={deployment}"
    volumes = engine.docker("volume", "ls", "-q", "--filter", settled).split()
    engine.docker("volume", "rm", "-f", f"fencepost-witness-{deployment}", *volumes)


class _Behind:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def _docker(self, *words: str) -> None:
        await asyncio.to_thread(self._engine.docker, *words)

    async def kill(self, ref: Ref) -> None:
        await self._docker("kill", ref.native_id)

    async def start(self, ref: Ref) -> None:
        await self._docker("start", ref.native_id)

    async def restart(self, ref: Ref) -> None:
        await self._docker("restart", "-t", "0", ref.native_id)

    async def tell_to_end(self, ref: Ref) -> None:
        await self._docker("kill", "--signal", "TERM", ref.native_id)

    async def remove(self, ref: Ref) -> None:
        await self._docker("rm", "-fv", ref.native_id)


@pytest.fixture
def behind(engine: Engine) -> _Behind:
    return _Behind(engine)


class TestOnARealEngine(DockerContract):
    # An engine's processes may be on another machine; the same is tried from inside below.
    test_what_a_killed_toolhost_left_ends_with_its_channel_and_no_others = None

    without_python = "fencepost-test/without-python"
    with_old_python = "fencepost-test/with-old-python"

    @pytest.fixture
    async def provider(self, engine: Engine) -> AsyncIterator[DockerProvider]:
        async with providing(engine) as provider:
            yield provider


@pytest.fixture(scope="module", autouse=True)
def images(engine: Engine) -> None:
    build(engine, TestOnARealEngine.without_python, f"FROM {NATS}\nENTRYPOINT []\n")
    build(engine, TestOnARealEngine.with_old_python, OLD)


def build(engine: Engine, name: str, text: str) -> None:
    done = subprocess.run(
        ["docker", "build", "-q", "-t", name, "-"],
        input=text,
        env={**engine.environment, "DOCKER_BUILDKIT": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


# -- what a tool is behind -------------------------------------------------------------------------


async def talking(provider: DockerProvider, spec: SandboxSpec = SPEC) -> Talk:
    answer = await provider.create("acq-1", spec, LABELS)
    assert isinstance(answer, Created), answer
    talk = Talk(await provider.channel(answer.ref, spec))
    await talk.ask({"k": "mark", "id": "m", "epoch": 1, "session": "s", "nonce": "n"})
    return talk


async def ran(talk: Talk, tool: str, args: dict, no: int = 1) -> dict:
    body = json.dumps(args).encode()
    attempt = {"sandbox": "sbx", "epoch": 1, "session": "s", "attempt": f"s{no}.1", "no": no}
    head = {"k": "apply", "fence": {**attempt, "direction": "apply"}, "step": f"s{no}"}
    head |= {"tool": tool, "digest": digest_of(body), "effect": "workspace"}
    _, receipt = await talk.ask(head, body)
    found = json.loads(receipt)
    assert found["verdict"] == "applied", found
    return found["result"] or {}


async def shell(talk: Talk, line: str, no: int = 1, **more: object) -> dict:
    return await ran(talk, "run_command", {"shell": line, **more}, no)


async def test_a_tool_is_another_user_without_privilege(provider: DockerProvider) -> None:
    talk = await talking(provider)
    line = (
        "id -u; grep -E 'CapEff|NoNewPrivs' /proc/self/status; ls /sandbox/state;"
        " cat /sandbox/state/marker.json; kill -9 1; touch /x; touch /tmp/ok && echo scratch;"
        " tail -n +3 /proc/net/dev | cut -d: -f1"
    )
    said = await shell(talk, line)
    words = said["stdout"].split()
    assert words == ["1000", "CapEff:", "0" * 16, "NoNewPrivs:", "1", "scratch", "lo"]
    assert said["stderr"].count("denied") == 2
    assert "not permitted" in said["stderr"]
    assert "Read-only file system" in said["stderr"]
    await talk.channel.end()


async def test_tools_and_file_tools_own_one_workspace(provider: DockerProvider) -> None:
    talk = await talking(provider)
    await ran(talk, "write_file", {"path": "d/a.txt", "content": "one\n"})
    assert (await shell(talk, "echo two >> d/a.txt && mv d e && cat e/a.txt", 2))["exit_code"] == 0
    await shell(talk, "mkdir f && echo mine > f/b.txt && chmod 600 f/b.txt", 3)
    await ran(talk, "write_file", {"path": "f/b.txt", "content": "ours\n"}, 4)
    await ran(talk, "delete_path", {"path": "e", "recursive": True}, 5)
    said = await shell(talk, "ls; cat f/b.txt; stat -c %u f/b.txt", 6)
    assert said["stdout"].split() == ["f", "ours", "1000"]
    await talk.channel.end()


async def test_what_a_killed_toolhost_leaves_is_ended_with_its_channel_and_no_others(
    provider: DockerProvider, engine: Engine
) -> None:
    talk = await talking(provider)
    ref = (await provider.list()).items[0].ref
    # As another session's: only the name of its channel tells it apart.
    others = ["exec", "-d", "-u", "1000", "-e", "FENCEPOST_CHANNEL=another", ref.native_id]
    engine.docker(*others, "sleep", "601")
    body = json.dumps({"shell": "(setsid sh -c 'sleep 600' &); sleep 600"}).encode()
    fence = {"sandbox": "sbx", "epoch": 1, "session": "s", "attempt": "s1.1", "no": 1}
    head = {"k": "apply", "fence": {**fence, "direction": "apply"}, "step": "s1", "n": len(body)}
    head |= {"tool": "run_command", "digest": digest_of(body), "effect": "workspace"}
    talk.channel.write(json.dumps(head).encode() + b"\n" + body)

    def sleeping() -> int:
        return engine.docker("top", ref.native_id).count("sleep 600")

    async def both_run() -> bool:
        return await asyncio.to_thread(sleeping) >= 2

    assert await wait_for(both_run)
    # The toolhost as the kernel may end it: what left its session has nobody to end it.
    engine.docker("exec", ref.native_id, "python3", "-c", KILL_TOOLHOST)
    await talk.channel.end()

    async def none_is_left() -> bool:
        return await asyncio.to_thread(sleeping) == 0

    assert await wait_for(none_is_left)
    assert engine.docker("top", ref.native_id).count("sleep 601") == 1
    again = Talk(await provider.channel(ref, SPEC))
    await again.ask({"k": "mark", "id": "m", "epoch": 2, "session": "s2", "nonce": "n2"})
    assert await asyncio.to_thread(sleeping) == 0
    await again.channel.end()


async def test_memory_and_processes_are_limited(provider: DockerProvider) -> None:
    spec = SandboxSpec(memory_mb=128, processes=24)
    talk = await talking(provider, spec)
    assert (await shell(talk, "dd if=/dev/zero of=/dev/null count=1 bs=512M"))["exit_code"] != 0
    assert (await shell(talk, "dd if=/dev/zero of=/dev/null count=1 bs=16M", 2))["exit_code"] == 0
    line = "for i in $(seq 200); do sleep 20 & done; jobs -p | wc -l"
    said = await shell(talk, line, 3, timeout_ms=8_000)
    assert said["exit_code"] != 0 or int(said["stdout"] or 0) < 60, said
    # The toolhost is not hit by what its tools do to the container's limits.
    assert (await shell(talk, "echo alive", 4))["stdout"] == "alive\n"
    await talk.channel.end()


async def test_a_network_is_there_only_where_it_was_asked_for(provider: DockerProvider) -> None:
    talk = await talking(provider, SandboxSpec(memory_mb=128, network=True))
    said = await shell(talk, "tail -n +3 /proc/net/dev | cut -d: -f1")
    assert {"lo", "eth0"} <= set(said["stdout"].split())
    await talk.channel.end()


# -- what happens behind our back ------------------------------------------------------------------


async def test_a_container_that_ran_out_of_memory_is_over(
    provider: DockerProvider, engine: Engine
) -> None:
    ref = await made(provider)
    # The container's own program is what the kernel takes here, as it may when all is small.
    hog = "import os; os.kill(1, 0); b = bytearray(3 << 30)"
    engine.docker("update", "--memory", "48m", "--memory-swap", "48m", ref.native_id)
    engine.docker("exec", ref.native_id, "python3", "-c", hog, check=False)
    state = json.loads(engine.docker("inspect", ref.native_id))[0]["State"]
    # Only the hog was killed: the sandbox lives, and its processes are its own affair.
    assert state["Running"], state
    assert (await provider.observe(ref)).state == "present"
    engine.docker("kill", "--signal", "KILL", ref.native_id)
    assert (await provider.observe(ref)).state == "terminating"


async def test_a_restart_policy_set_behind_our_back_makes_no_second_life(
    provider: DockerProvider, engine: Engine
) -> None:
    ref = await made(provider)
    engine.docker("update", "--restart", "always", ref.native_id)
    engine.docker("exec", ref.native_id, "kill", "-TERM", "1")

    async def over() -> bool:
        return (await provider.observe(ref)).state == "terminating"

    assert await wait_for(over)
    with pytest.raises(ChannelRefusedError) as refusal:
        await provider.channel(ref, SPEC)
    assert refusal.value.observed == "terminating"

    async def stopped() -> bool:
        # Between two of its short lives it may be met running: then it is another instance.
        said = await provider.stop(ref, ref.instance)
        return said.answer in ("accepted", "not_found")

    assert await wait_for(stopped)
    assert (await provider.observe(ref)).state == "gone"


async def test_a_restarted_engine_ends_its_sandboxes_and_loses_no_absence(
    provider: DockerProvider, engine: Engine
) -> None:
    if not engine.is_own:
        pytest.skip("this engine was not started by the tests, so it is not theirs to restart")
    ref = await made(provider)
    talk = Talk(await provider.channel(ref, SPEC))
    await talk.ask({"k": "hello", "id": "1"})
    removed = await made(provider, "acq-2")
    await provider.stop(removed, removed.instance)
    await asyncio.to_thread(engine.script, "stop-daemon")
    assert (await provider.observe(ref)).state == "unknown"
    assert (await provider.observe(removed)).state == "unknown"
    await asyncio.to_thread(engine.script, "start")
    assert (await provider.observe(ref)).state == "terminating"
    assert (await provider.observe(removed)).state == "gone"
    with contextlib.suppress(AssertionError):
        await talk.channel.end()
    assert talk.ended is not None
    assert (await provider.stop(ref, ref.instance)).answer == "accepted"
    assert (await provider.observe(ref)).state == "gone"
