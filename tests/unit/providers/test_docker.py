"""The `docker` provider on the fake engine: the contract, and an engine in trouble."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fencepost.core.errors import RetryLaterError
from fencepost.core.facts import Ref
from fencepost.core.steps import SandboxSpec
from fencepost.providers.docker import DockerProvider, container
from fencepost.providers.protocol import (
    Absent,
    ChannelRefusedError,
    CreateAmbiguous,
    Created,
    CreateRefused,
    Unknown,
)

from tests.unit.providers import fake_engine
from tests.unit.providers.docker_contract import DockerContract
from tests.unit.providers.fake_engine import Answer, FakeEngine
from tests.unit.providers.provider_contract import LABELS, SPEC, Talk, made, other, wait_for


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[FakeEngine]:
    async with fake_engine.running(tmp_path) as started:
        yield started


async def opened(engine: FakeEngine, **options: str) -> DockerProvider:
    return await DockerProvider.open(engine.url, **{"image": "with-python", **options})


@pytest.fixture
async def provider(engine: FakeEngine) -> AsyncIterator[DockerProvider]:
    provider = await opened(engine)
    yield provider
    await provider.close()


@pytest.fixture
async def another(engine: FakeEngine) -> AsyncIterator[DockerProvider]:
    provider = await opened(engine)
    yield provider
    await provider.close()


class _Behind:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def kill(self, ref: Ref) -> None:
        await self._engine.kill(self._engine.containers[ref.native_id])

    async def start(self, ref: Ref) -> None:
        await self._engine.start_container(self._engine.containers[ref.native_id])

    async def restart(self, ref: Ref) -> None:
        await self._engine.restart(self._engine.containers[ref.native_id])

    async def tell_to_end(self, ref: Ref) -> None:
        self._engine.signal(self._engine.containers[ref.native_id])

    async def remove(self, ref: Ref) -> None:
        await self._engine.remove(self._engine.containers[ref.native_id])


class TestOnTheFakeEngine(DockerContract):
    @pytest.fixture
    async def provider(self, engine: FakeEngine) -> AsyncIterator[DockerProvider]:
        provider = await opened(engine)
        yield provider
        await provider.close()

    @pytest.fixture
    def behind(self, engine: FakeEngine) -> _Behind:
        return _Behind(engine)


# -- an engine in trouble --------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403, 409, 429, 500, 503])
async def test_an_engine_that_does_not_say_404_says_nothing_about_an_absence(
    engine: FakeEngine, provider: DockerProvider, status: int
) -> None:
    ref = await made(provider)
    await engine.remove(engine.only())
    engine.fail = lambda method, path: Answer(status, "no") if path.endswith("/json") else None
    assert (await provider.observe(ref)).state == "unknown"
    assert isinstance(await provider.find("acq-1"), Unknown)
    assert not (await provider.list()).complete
    with pytest.raises(ChannelRefusedError) as refusal:
        await provider.channel(ref, SPEC)
    assert (refusal.value.observed, refusal.value.ended) == ("unknown", False)
    assert (await provider.stop(ref, ref.instance)).answer in ("unreachable", "refused")
    engine.fail = lambda method, path: None
    assert (await provider.observe(ref)).state == "gone"


async def test_an_engine_that_is_away_leaves_everything_unknown(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    ref = await made(provider)
    await engine.stop()
    assert (await provider.observe(ref)).state == "unknown"
    assert (await provider.stop(ref, ref.instance)).answer == "unreachable"
    assert isinstance(await provider.find("acq-2"), Unknown)
    assert isinstance(await provider.create("acq-2", SPEC, LABELS), CreateAmbiguous)
    assert not await provider.settle("acq-2")
    assert not (await provider.list()).complete
    (engine.folder / "engine.sock").unlink(missing_ok=True)
    await engine.start()
    assert (await provider.observe(ref)).state == "present"


async def test_an_engine_on_other_data_proves_no_absence(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    ref = await made(provider)
    (witness,) = engine.volumes
    kept = engine.volumes[witness], dict(engine.containers)
    # The same socket, an empty engine: a disk that was not mounted, or another machine.
    engine.volumes, engine.containers = {}, {}
    seen = await provider.observe(ref)
    assert seen.state == "unknown"
    assert f"volume {witness} with the label" in seen.detail
    assert isinstance(await provider.find("acq-1"), Unknown)
    fresh = await opened(engine)
    assert fresh.traits.authority != provider.traits.authority
    assert (await fresh.observe(ref)).state == "unknown"
    await fresh.close()
    engine.volumes[witness], engine.containers = kept
    assert (await provider.observe(ref)).state == "present"
    await engine.remove(engine.only())
    assert (await provider.observe(ref)).state == "gone"


async def test_an_id_that_no_engine_gave_is_unknown_and_not_gone(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    ref = await made(provider)
    assert (await provider.observe(other(ref, native_id="a-name"))).state == "unknown"
    assert (await provider.observe(other(ref, native_id="0" * 64))).state == "gone"


async def test_a_create_whose_answer_is_lost_is_settled_by_the_next_one(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    engine.lose_answer = lambda method, path: path == "/containers/create"
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateAmbiguous)
    # Made, and never started: neither a sandbox nor an absence.
    assert isinstance(await provider.find("acq-1"), Unknown)
    assert (await provider.list()).items == ()
    engine.lose_answer = lambda method, path: False
    answer = await provider.create("acq-1", SPEC, LABELS)
    assert isinstance(answer, Created)
    assert answer.ref.native_id == engine.only().id


async def test_a_name_that_is_taken_before_its_container_is_there_is_waited_for(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    conflicts = [Answer(409, "in use"), Answer(409, "in use")]

    def taken(method: str, path: str) -> Answer | None:
        return conflicts.pop() if path == "/containers/create" and conflicts else None

    engine.fail = taken
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), Created)
    assert conflicts == []


async def test_a_start_whose_answer_is_lost_is_found(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    engine.lose_answer = lambda method, path: path.endswith("/start")
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateAmbiguous)
    found = await provider.find("acq-1")
    assert isinstance(found, Created)
    engine.lose_answer = lambda method, path: False
    assert (await made(provider)) == found.ref
    assert engine.only().starts == 1


async def test_what_was_made_and_not_started_ends_with_its_create_id(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    engine.lose_answer = lambda method, path: path == "/containers/create"
    await provider.create("acq-1", SPEC, LABELS)
    engine.lose_answer = lambda method, path: False
    assert await provider.settle("acq-1")
    assert engine.containers == {}
    assert isinstance(await provider.find("acq-1"), Absent)
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateRefused)


async def test_a_create_id_that_ends_while_it_is_made_makes_nothing(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    def end(method: str, path: str) -> None:
        if path == "/containers/create":
            name = container.name_of("local", "acq-1") + "-settled"
            engine.volumes[name] = {"Name": name, "Labels": {}, "CreatedAt": "2026-01-01T00:00:00Z"}

    engine.before = end
    answer = await provider.create("acq-1", SPEC, LABELS)
    assert answer == CreateRefused(reason="settled")
    assert engine.containers == {}
    # Control: another create id is made at the same time.
    assert isinstance(await provider.create("acq-2", SPEC, LABELS), Created)


async def test_marks_of_ended_create_ids_are_forgotten_after_a_day(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    for number, hour in ((1, "01T00"), (2, "02T12")):
        await provider.settle(f"acq-{number}")
        name = container.name_of("local", f"acq-{number}") + "-settled"
        engine.volumes[name]["CreatedAt"] = f"2026-01-{hour}:00:00Z"
    (witness,) = (name for name in engine.volumes if not name.endswith("-settled"))
    provider._settled = 256
    await provider.settle("acq-2")
    assert witness in engine.volumes, "though this engine lists it, whatever label is asked for"
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), Created)
    assert isinstance(await provider.create("acq-2", SPEC, LABELS), CreateRefused)


async def test_a_stop_lost_on_its_way_back_was_a_stop(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    ref = await made(provider)
    engine.lose_answer = lambda method, path: method == "DELETE"
    assert (await provider.stop(ref, ref.instance)).answer == "unreachable"
    engine.lose_answer = lambda method, path: False
    assert (await provider.stop(ref, ref.instance)).answer == "not_found"
    assert (await provider.observe(ref)).state == "gone"


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (401, "refused"),
        (403, "refused"),
        (405, "unsupported"),
        (429, "refused"),
        (500, "unreachable"),
    ],
)
async def test_what_a_refused_removal_answers(
    engine: FakeEngine, provider: DockerProvider, status: int, answer: str
) -> None:
    ref = await made(provider)
    engine.fail = lambda method, path: Answer(status, "no") if method == "DELETE" else None
    assert (await provider.stop(ref, ref.instance)).answer == answer
    assert (await provider.observe(ref)).state == "present"


async def test_a_container_that_runs_again_is_not_stopped_for_its_former_instance(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    ref = await made(provider)
    item = engine.only()
    (item.home / ".started").unlink()  # somebody defeats what keeps it from running twice
    (item.home / "workspace").rmdir()
    await engine.restart(item)
    answer = await provider.stop(ref, ref.instance)
    assert (answer.answer, answer.instance != ref.instance) == ("refused_other_instance", True)
    assert (await provider.observe(ref)).state == "terminating"
    (listed,) = (await provider.list()).items
    assert (await provider.stop(listed.ref, listed.ref.instance)).answer == "accepted"
    assert (await provider.observe(ref)).state == "gone"


@pytest.mark.parametrize("status", ["restarting", "removing", "dead"])
async def test_a_container_between_states_is_on_its_way_out(
    engine: FakeEngine, provider: DockerProvider, status: str
) -> None:
    ref = await made(provider)
    engine.only().status = status
    assert (await provider.observe(ref)).state == "terminating"
    engine.only().status = "paused"  # alive, and silent: its lease decides
    assert (await provider.observe(ref)).state == "present"


async def test_a_list_of_many_comes_in_pages(
    engine: FakeEngine, provider: DockerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.providers.docker.provider._PAGE", 2)
    refs = {(await made(provider, f"acq-{number}")).native_id for number in range(5)}
    seen, token, complete = [], "", []
    for _ in range(3):
        page = await provider.list(token)
        seen += [item.ref.native_id for item in page.items]
        token = page.next_token
        complete.append(page.complete)
    assert (set(seen), len(seen), token) == (refs, 5, "")
    assert complete == [False, False, True]


async def test_deployments_on_one_engine_do_not_see_each_other(engine: FakeEngine) -> None:
    one, two = await opened(engine, deployment="one"), await opened(engine, deployment="two")
    first, second = await made(one), await made(two)
    assert first.native_id != second.native_id
    assert [item.ref for item in (await one.list()).items] == [first]
    assert (await one.stop(other(second, authority=first.authority), second.instance)).answer == (
        "refused"
    )
    assert (await two.observe(second)).state == "present"
    await one.close()
    await two.close()


async def test_labels_that_an_image_brings_are_not_ours(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    await made(provider)
    engine.only().config["Labels"]["fencepost.dag"] = "another"
    engine.only().config["Labels"]["fencepost.sandbox"] = "another"
    (item,) = (await provider.list()).items
    assert (item.labels["dag"], "sandbox" in item.labels) == ("d1", False)


async def test_the_walls_that_are_asked_for(engine: FakeEngine, provider: DockerProvider) -> None:
    await made(provider)
    host = engine.only().config["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["RestartPolicy"] == {"Name": "no"}
    assert host["Memory"] == (SPEC.memory_mb + container.RESERVED_MB) << 20
    assert host["PidsLimit"] == SPEC.processes + container.RESERVED_PIDS
    await provider.create("acq-net", SandboxSpec(network=True, memory_mb=64), LABELS)
    asked = [item.config["HostConfig"]["NetworkMode"] for item in engine.containers.values()]
    assert asked == ["none", "bridge"]


async def test_a_toolhost_that_does_not_end_with_its_stream_is_killed(
    engine: FakeEngine, provider: DockerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.providers.docker.channel._ENDS_WITH_STREAM_S", 0.3)
    monkeypatch.setattr(
        container, "BOOT", "import time\nleft = %d\nprint('deaf', flush=True)\ntime.sleep(600)"
    )
    channel = await provider.channel(await made(provider), SPEC)
    channel.start(lambda _data: None, lambda _reason: None)
    (started,) = engine.only().execs
    await channel.end(grace_s=0.1)
    assert started.process is not None
    assert await started.process.wait() == -9
    assert "exit" in channel.last_words()


async def test_a_toolhosts_last_words_are_kept(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    talk = Talk(await provider.channel(await made(provider), SPEC))
    talk.channel.write(b"no head\n")
    for started in engine.only().execs:
        assert started.process is not None
        assert await started.process.wait() == 2
    await talk.channel.end()
    assert talk.channel.last_words().startswith("exit 2: toolhost: the stream cannot be trusted")


async def test_no_engine_is_said_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(RetryLaterError, match="no Docker engine answers at unix:///"):
        await DockerProvider.open(f"unix://{tmp_path}/none.sock")


def test_names_are_of_one_create_id_and_deployment() -> None:
    names = {container.name_of(*pair) for pair in (("a", "b-c"), ("a-b", "c"), ("a", "b/c"))}
    assert len(names) == 3
    assert all(len(name) <= 128 and json.dumps(name).isascii() for name in names)


async def test_a_refusal_says_nothing_of_what_an_earlier_create_made(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), Created)
    assert await provider.settle("acq-1")
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateAmbiguous)
    engine.containers.clear()
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateRefused), "the control"


# -- what is told of an end that is to come --------------------------------------------------------


async def test_a_signal_is_heard_that_came_while_the_engine_was_not_listened_to(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    one, two = await made(provider), await made(provider, "acq-2")
    assert list(await provider.notices([one, two])) == []

    async def told(*refs: Ref) -> bool:
        return [notice.ref for notice in await provider.notices([one, two])] == list(refs)

    async def heard() -> bool:
        return bool(engine.listeners)

    assert await wait_for(heard)
    engine.signal(engine.containers[one.native_id], 1)  # control: it asks nobody to end
    engine.signal(engine.containers[one.native_id])
    assert await wait_for(lambda: told(one))
    (listener,) = engine.listeners
    listener.put_nowait(None)

    async def ended() -> bool:
        return listener not in engine.listeners

    assert await wait_for(ended)
    engine.signal(engine.containers[two.native_id])
    assert await wait_for(lambda: told(one, two))


async def test_an_engine_that_tells_no_events_announces_nothing_and_is_asked_again(
    engine: FakeEngine, provider: DockerProvider
) -> None:
    ref = await made(provider)
    engine.fail = lambda method, path: Answer(500, "no") if path == "/events" else None
    engine.signal(engine.containers[ref.native_id])
    assert list(await provider.notices([ref])) == []

    async def refused() -> bool:
        return "GET /events" in engine.calls

    assert await wait_for(refused)
    engine.fail = lambda method, path: None

    async def heard() -> bool:
        return bool(engine.listeners)

    assert await wait_for(heard)
    engine.signal(engine.containers[ref.native_id])

    async def told() -> bool:
        return [notice.ref for notice in await provider.notices([ref])] == [ref]

    assert await wait_for(told)
