"""The `swerex` provider, against real SWE-ReX servers."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from aiohttp import web
from fencepost.core.errors import RefusedError
from fencepost.core.facts import Ref
from fencepost.providers.protocol import (
    Absent,
    ChannelRefusedError,
    CreateAmbiguous,
    Created,
    CreateRefused,
    Provider,
    Unknown,
)
from fencepost.providers.swerex.channel import PumpedChannel
from fencepost.providers.swerex.pool import load_pool
from fencepost.providers.swerex.provider import SwerexProvider
from fencepost.providers.swerex.server import Calls, Said, Server, Silence

from scripts.swerex_demo.servers import TOKEN, SwerexServer
from tests.unit.providers.provider_contract import (
    LABELS,
    SPEC,
    ProviderContract,
    Talk,
    made,
    other,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("swerex"), pytest.mark.budget(70)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SwerexServer]]:
    folder = tmp_path_factory.mktemp("swerex")
    made_ = [SwerexServer(folder, name) for name in ("left", "right")]
    try:
        for server in made_:
            asyncio.run(server.start())
        yield made_
    finally:
        for server in made_:
            server.kill()


def write_pool(folder: Path, servers: list[SwerexServer]) -> Path:
    folder.mkdir(exist_ok=True)
    for server in servers:
        (folder / f"{server.name}.json").write_text(json.dumps(server.entry()))
    return folder


def at(server: SwerexServer) -> str:
    """What refs call its place."""
    return Server(name=server.name, **server.entry()).place


async def empty(provider: SwerexProvider) -> None:
    """Leaves the servers to the next test as it found them."""
    page = await provider.list()
    for item in page.items:
        await provider.stop(item.ref, item.ref.instance)


@pytest.fixture
async def provider(tmp_path: Path, servers: list[SwerexServer]) -> AsyncIterator[SwerexProvider]:
    provider = SwerexProvider(write_pool(tmp_path / "pool", servers))
    yield provider
    await empty(provider)
    await provider.close()


class TestSwerexProvider(ProviderContract):
    async def announce(self, provider: SwerexProvider, ref: Ref) -> None:
        server = provider._server_of(ref)
        assert server is not None
        (provider._pool._folder / f"{server.name}.going").write_text("60")

    @pytest.fixture
    def provider(self, provider: SwerexProvider) -> Provider:
        return provider

    async def test_s167_a_stop_of_what_it_does_not_know_is_not_found(
        self, provider: Provider
    ) -> None:
        """A server that left the pool was asked nothing: that is no `not_found`."""
        ref = await made(provider)
        unknown = other(ref, native_id="never-in-the-pool")
        assert (await provider.stop(unknown, ref.instance)).answer == "unconfigured"
        assert (await provider.observe(unknown)).state == "unknown"
        assert (await provider.stop(ref, ref.instance)).answer == "accepted"


async def test_a_full_pool_refuses_and_makes_nothing(provider: SwerexProvider) -> None:
    refs = [await made(provider, "one"), await made(provider, "two")]
    answer = await provider.create("three", SPEC, LABELS)
    assert isinstance(answer, CreateRefused)
    assert isinstance(await provider.find("three"), Absent)
    await provider.stop(refs[0], refs[0].instance)
    assert isinstance(await provider.create("three", SPEC, LABELS), Created)


async def test_two_gateways_make_one_sandbox_of_a_create_id(
    provider: SwerexProvider, tmp_path: Path
) -> None:
    second = SwerexProvider(tmp_path / "pool")
    try:
        answers = await asyncio.gather(
            *(p.create("acq-1", SPEC, LABELS) for p in (provider, second) * 4)
        )
    finally:
        await second.close()
    assert len({answer.ref for answer in answers if isinstance(answer, Created)}) == 1
    assert len((await provider.list()).items) == 1


async def test_two_deployments_of_one_pool_do_not_list_each_other(
    provider: SwerexProvider, tmp_path: Path
) -> None:
    other_ = SwerexProvider(tmp_path / "pool", deployment="other")
    try:
        await made(provider)
        assert (await other_.list()).items == ()
        await made(other_)
        assert len((await provider.list()).items) == 1
    finally:
        await empty(other_)
        await other_.close()


async def test_a_replaced_server_is_told_from_the_first_by_its_claim_alone(
    provider: SwerexProvider, servers: list[SwerexServer]
) -> None:
    ref = await made(provider)
    server = next(server for server in servers if at(server) == ref.native_id)
    talk = Talk(await provider.channel(ref, SPEC))
    await talk.ask({"k": "hello", "id": "1"})
    before = await said(server)
    await server.replace()
    assert await said(server) == before, "SWE-ReX itself answers as the first one did"
    assert (await provider.observe(ref)).state == "gone"
    assert (await provider.stop(ref, ref.instance)).answer == "not_found"

    async def ended() -> bool:
        return talk.ended is not None

    assert await wait_for(ended, 60)
    await talk.channel.end()


async def said(server: SwerexServer) -> list[object]:
    headers = {"X-API-Key": TOKEN}
    async with aiohttp.ClientSession(headers=headers) as http:
        write = {"path": f"{server.base}/notes.txt", "content": "kept?"}
        async with http.post(f"{server.url}/write_file", json=write) as wrote:
            answer = [wrote.status, await wrote.json()]
        async with http.get(f"{server.url}/is_alive") as alive:
            return [*answer, alive.status, await alive.json()]


async def test_a_server_that_does_not_answer_proves_nothing(
    provider: SwerexProvider, servers: list[SwerexServer]
) -> None:
    ref = await made(provider)
    server = next(server for server in servers if at(server) == ref.native_id)
    server.kill()
    try:
        assert (await provider.observe(ref)).state == "unknown"
        assert isinstance(await provider.find("acq-1"), Unknown)
        assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateAmbiguous)
        assert (await provider.stop(ref, ref.instance)).answer == "unreachable"
        assert not (await provider.list()).complete
    finally:
        await server.start()
    assert (await provider.list()).complete


async def test_s027_a_refused_token_is_never_an_absence(
    provider: SwerexProvider, servers: list[SwerexServer], tmp_path: Path
) -> None:
    ref = await made(provider)
    for server in servers:
        entry = {**server.entry(), "token": "of somebody else"}
        (tmp_path / "pool" / f"{server.name}.json").write_text(json.dumps(entry))
    stranger = SwerexProvider(tmp_path / "pool")
    try:
        assert (await stranger.observe(ref)).state == "unknown"
        assert isinstance(await stranger.find("acq-1"), Unknown)
        assert (await stranger.stop(ref, ref.instance)).answer in ("refused", "unreachable")
        assert not (await stranger.list()).complete
    finally:
        await stranger.close()
    write_pool(tmp_path / "pool", servers)
    assert (await provider.observe(ref)).state == "present"


async def test_an_entry_that_leads_elsewhere_is_another_place(
    provider: SwerexProvider, servers: list[SwerexServer], tmp_path: Path
) -> None:
    """What the server at the new address does not hold says nothing of the former one's."""
    ref = await made(provider)
    here, elsewhere = sorted(servers, key=lambda server: at(server) != ref.native_id)
    (tmp_path / "pool" / f"{elsewhere.name}.json").unlink()
    path = tmp_path / "pool" / f"{here.name}.json"
    for edited in (
        {**here.entry(), "url": elsewhere.url},
        {**here.entry(), "base": "/var/tmp/elsewhere"},
    ):
        path.write_text(json.dumps(edited))
        assert (await provider.observe(ref)).state == "unknown"
        assert isinstance(await provider.find("acq-1"), Unknown)
        assert not (await provider.list()).complete
        assert (await provider.stop(ref, ref.instance)).answer == "unconfigured"
    path.write_text(json.dumps(here.entry()))
    assert (await provider.observe(ref)).state == "present", "the control"
    assert (await provider.list()).complete
    path.write_text('{"url":')
    assert (await provider.observe(ref)).state == "present", "while it is edited"
    assert isinstance(await provider.create("acq-2", SPEC, LABELS), CreateRefused)
    assert not (await provider.list()).complete
    path.write_text(json.dumps(here.entry()))


async def test_a_rotated_token_is_used_at_once(
    provider: SwerexProvider, servers: list[SwerexServer], tmp_path: Path
) -> None:
    ref = await made(provider)
    here = next(server for server in servers if at(server) == ref.native_id)
    path = tmp_path / "pool" / f"{here.name}.json"
    path.write_text(json.dumps({**here.entry(), "token": "former"}))
    assert (await provider.observe(ref)).state == "unknown"
    path.write_text(json.dumps(here.entry()))

    async def present() -> bool:
        # The server drops a connection on which it refused somebody: one look may find it so.
        return (await provider.observe(ref)).state == "present"

    assert await wait_for(present)


async def test_what_lives_without_its_folder_is_not_gone(
    provider: SwerexProvider, servers: list[SwerexServer]
) -> None:
    ref = await made(provider)
    talk = Talk(await provider.channel(ref, SPEC))
    await talk.ask({"k": "hello", "id": "1"})
    here = next(server for server in servers if at(server) == ref.native_id)
    headers = {"X-API-Key": TOKEN}
    ask = {"command": ["mv", f"{here.base}/claim", f"{here.base}/elsewhere"]}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{here.url}/execute", json=ask) as moved:
            assert (await moved.json())["exit_code"] == 0
    assert (await provider.observe(ref)).state == "unknown"
    assert (await provider.stop(ref, ref.instance)).answer == "not_found"
    assert (await provider.observe(ref)).state == "gone"
    await talk.channel.end()


async def test_a_create_that_is_still_on_its_way_makes_nothing_once_settled(
    provider: SwerexProvider, servers: list[SwerexServer], tmp_path: Path
) -> None:
    """Its gateway has died meanwhile, so nobody takes back what it would make."""
    slow = SwerexProvider(tmp_path / "pool")
    sent, go = asyncio.Event(), asyncio.Event()
    ask = slow._ask

    async def held(server: Server, verb: str, **body: object) -> Said | Silence:
        if verb == "claim":
            sent.set()
            await go.wait()
            answer = await ask(server, verb, **body)
            assert isinstance(answer, Said)
            assert answer.state == "settled"
            raise asyncio.CancelledError
        return await ask(server, verb, **body)

    slow._ask = held  # type: ignore[method-assign]
    creating = asyncio.create_task(slow.create("acq-1", SPEC, LABELS))
    try:
        await sent.wait()
        assert await provider.settle("acq-1")
        assert isinstance(await provider.find("acq-1"), Absent)
        go.set()
        await asyncio.gather(creating, return_exceptions=True)
        assert isinstance(await provider.find("acq-1"), Absent)
        assert (await provider.list()).items == ()
    finally:
        await slow.close()


@pytest.mark.parametrize(
    "answer",
    [
        "[" * 100_000,
        "null",
        "{}",
        '{"stdout": 1}',
        *(
            json.dumps({"stdout": json.dumps(said), "exit_code": 0})
            for said in (
                {"state": []},
                {"state": "claimed"},
                {"state": "claimed", "claim": {"instance": 1, "create_id": "a", "labels": {}}},
                {"state": "seen", "claim": None, "leaving": 1, "alive": False},
                {"state": "seen", "claim": {"instance": "i"}, "leaving": [], "alive": False},
                {"state": "seen", "claim": None, "leaving": []},
                {"state": "other"},
                {"state": "pumped", "taken": "x", "from": 0, "data": ""},
            )
        ),
    ],
)
async def test_garbage_proves_nothing_and_raises_nothing(tmp_path: Path, answer: str) -> None:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(text=answer, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    entry = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}", "token": "t"}
    (tmp_path / "garbage.json").write_text(json.dumps(entry))
    provider = SwerexProvider(tmp_path)
    place = next(iter(provider._pool.servers()))
    ref = Ref(
        authority=provider.traits.authority, provider="swerex", native_id=place, instance="i1"
    )
    try:
        assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateAmbiguous)
        assert isinstance(await provider.find("acq-1"), Unknown)
        assert (await provider.observe(ref)).state == "unknown"
        assert (await provider.stop(ref, "i1")).answer == "unreachable"
        assert not (await provider.list()).complete
        assert not await provider.settle("acq-1")
        with pytest.raises(ChannelRefusedError) as raised:
            await provider.channel(ref, SPEC)
        assert raised.value.observed == "unknown"
    finally:
        await provider.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    "counts", [{"taken": 9}, {"taken": -1}, {"from": 1}, {"from": -1}, {"data": "no base64!"}]
)
async def test_counts_that_do_not_fit_end_a_stream(counts: dict[str, object]) -> None:
    """Bytes that were lost, or are there twice, are never handed on."""
    right: dict[str, object] = {"taken": 0, "from": 0, "data": "aGk="}

    class Answers:
        async def agent(self, *_: object) -> Said:
            return Said("pumped", {**right, "ended": True, **counts})

    server = Server(name="x", url="http://127.0.0.1:1", token="t")
    for body, expected in ((counts, "the counts of the stream do not fit"), ({}, "end_of_stream")):
        counts = body
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        had: list[bytes] = []
        channel = PumpedChannel(cast("Calls", Answers()), server, instance="i", name="n")
        channel.start(had.append, ended.set_result)
        assert await ended == expected
        assert had == ([] if body else [b"hi"])


async def test_a_long_talk_is_carried_whole_both_ways(provider: SwerexProvider) -> None:
    ref = await made(provider)
    talk = Talk(await provider.channel(ref, SPEC))
    await talk.ask({"k": "mark", "id": "1", "epoch": 1, "session": "s1", "nonce": "n1"})
    text = "0123456789abcdef" * 16_384
    args = json.dumps({"path": "long.txt", "content": text}).encode()

    fence = {"sandbox": "sbx", "epoch": 1, "session": "s1", "attempt": "a.1", "no": 1}
    _, body = await talk.ask(
        {
            "k": "apply",
            "fence": {**fence, "direction": "apply"},
            "step": "a",
            "tool": "write_file",
            "digest": "sha256:" + hashlib.sha256(args).hexdigest(),
            "effect": "workspace",
        },
        args,
    )
    assert json.loads(body)["verdict"] == "applied", body
    read = json.dumps({"path": "long.txt", "limit": 1 << 20}).encode()
    _, body = await talk.ask({"k": "read", "id": "2", "tool": "read_file"}, read)
    assert json.loads(body)["content"] == text
    await talk.channel.end()


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "file"),
        ("[]", "file"),
        ('{"token": "t"}', "url"),
        ('{"url": "ftp://x", "token": "t"}', "url"),
        ('{"url": "http://127.0.0.1:1"}', "token"),
        ('{"url": "http://127.0.0.1:1", "token_file": "none"}', "token_file"),
        ('{"url": "http://127.0.0.1:1", "token": "t", "prot": 1}', "prot"),
        ('{"url": "http://127.0.0.1:1", "token": "a\\nb"}', "token"),
        ('{"url": "http://127.0.0.1:1", "token": "\u00e9"}', "token"),
        ('{"url": "http://127.0.0.1:2/", "token": "t"}', "url"),
    ],
)
def test_a_wrong_pool_entry_is_refused_by_name(tmp_path: Path, text: str, field: str) -> None:
    good = {"url": "http://127.0.0.1:2", "token": "t"}
    (tmp_path / "good.json").write_text(json.dumps(good))
    assert list(load_pool(tmp_path)) == ["good"]
    (tmp_path / "wrong.json").write_text(text)
    with pytest.raises(RefusedError, match=rf"wrong\.json: {field}: expected"):
        load_pool(tmp_path)


def test_a_token_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": "secret"}))
    assert "secret" not in repr(load_pool(tmp_path))


async def test_no_sandbox_is_begun_on_a_server_that_is_going(
    provider: SwerexProvider, servers: list[SwerexServer]
) -> None:
    pool = provider._pool._folder
    (pool / "left.going").write_text("")
    ref = await made(provider, "one")
    assert ref.native_id == at(servers[1])
    assert isinstance(await provider.create("two", SPEC, LABELS), CreateRefused)
    assert await made(provider, "one") == ref, "what is there stays"
    (pool / "left.going").unlink()
    assert (await made(provider, "two")).native_id == at(servers[0])
