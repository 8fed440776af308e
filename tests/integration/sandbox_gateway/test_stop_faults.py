"""
What a provider's HTTP answers to a stop lead to, through the whole pipeline.

Real nats-server, planner and tracker processes; the gateway session runs in the test's loop with a
provider that asks a server of ours. All cancels run at the same time, each on a sandbox of its
own; when one is answered, its fault ends and its release must settle by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import pytest_asyncio
import structlog
from fencepost.client.client import Client
from fencepost.client.stack import Stack
from fencepost.client.verify import verify
from fencepost.core.sandbox import entries as e
from fencepost.providers.process import ProcessProvider
from fencepost.runtime import access
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.dags import Verdict
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import GatewayMetrics
from fencepost.sandbox_gateway.blobs import NatsBlobs
from fencepost.sandbox_gateway.session import GatewaySession, Options

from tests.integration.sandbox_gateway.control import wait_for
from tests.integration.sandbox_gateway.http_provider import Fault, HttpProvider, Reply, StubServer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BOUND_S: Final = 5.0
LATE_S: Final = 2.0
"""How much later than its bound a busy machine may let an answer be seen."""
SETTLED_S: Final = 45.0
RETRY_AFTER_S: Final = 5
AT_ONCE: Final = 4

OURS: Final = {"id": "$id", "instance": "$instance"}
STILL: Final = {**OURS, "state": "present"}


class Case(NamedTuple):
    """`reason` "": confirmed, `evidence` then being why; else unconfirmed, and what was said."""

    fault: Fault
    reason: str
    evidence: str


def says(status: int, *, observe: bool = False, retry_after_s: int = 0) -> Fault:
    """A status to every stop, and to every observation too where the way in itself is barred."""
    reply = Reply(status, headers={"retry-after": str(retry_after_s)} if retry_after_s else {})
    return Fault(stop=reply, observe=reply if observe else "truth")


CASES: Final = {
    "control": Case(Fault(), "", "observed_gone"),
    "404_gone": Case(Fault(stop=Reply(404), ends=True), "", "observed_gone"),
    "410_gone": Case(Fault(stop=Reply(410), observe=Reply(410), ends=True), "", "observed_gone"),
    "404_alive": Case(says(404), "stop_accepted", "not_found: HTTP 404"),
    "410_alive": Case(says(410), "stop_accepted", "not_found: HTTP 410"),
    "401": Case(says(401, observe=True), "stop_refused", "refused: HTTP 401"),
    "403": Case(says(403, observe=True), "stop_refused", "refused: HTTP 403"),
    "409": Case(says(409), "stop_refused", "refused: HTTP 409"),
    "429": Case(says(429, retry_after_s=RETRY_AFTER_S), "stop_refused", "refused: HTTP 429"),
    "500": Case(says(500, observe=True), "stop_unreachable", "unreachable: HTTP 500"),
    "hang": Case(
        Fault(stop="hang", observe="hang"), "stop_unreachable", "timeout: no answer within 1.5 s"
    ),
    "reset": Case(
        Fault(stop="reset", observe="reset"), "stop_unreachable", "unreachable: ReadError"
    ),
    "unconfigured": Case(Fault(address=False), "stop_unsupported", "unconfigured: no address"),
    "wrong_id": Case(
        Fault(stop=Reply(200, {"id": "another", "instance": "$instance"})),
        "stop_unreachable",
        "unreachable: HTTP 200 about another",
    ),
    "wrong_instance": Case(
        Fault(stop=Reply(200, {"id": "$id", "instance": "i-another"})),
        "stop_refused",
        "refused_other_instance: HTTP 200",
    ),
    "unknown_id": Case(
        Fault(stop=Reply(200, {}), observe=Reply(200, {})),
        "stop_unreachable",
        "unreachable: HTTP 200 about nothing",
    ),
    "terminating": Case(
        Fault(stop=Reply(200, OURS), observe=Reply(200, {**OURS, "state": "terminating"})),
        "stop_accepted",
        "accepted: HTTP 200",
    ),
    "queued": Case(
        Fault(stop=Reply(202, OURS), observe=Reply(200, STILL)),
        "stop_accepted",
        "accepted: HTTP 202",
    ),
}


class Outcome(NamedTuple):
    """
    What became of one case.

    `asked_then`: stop requests when the cancel was answered; `asked_at`: all of them, at last;
    `words`: what the ledger has of them. `told`: the verdicts that were made public, in order.
    """

    sandbox: str
    verdict: Verdict
    took_s: float
    asked_then: int
    asked_at: list[float]
    words: list[str]
    told: list[Verdict]
    left: str


class World:
    def __init__(self, client: Client, provider: HttpProvider, server: StubServer) -> None:
        self.client = client
        self.provider = provider
        self.server = server
        self.outcomes: dict[str, Outcome | BaseException] = {}
        self.warned: list[Any] = []
        self._room = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        with structlog.testing.capture_logs() as logs:
            held = await asyncio.gather(*(self.held(f"dag-{name}") for name in CASES))
            found = await asyncio.gather(
                *(
                    self._case(f"dag-{name}", sandbox, case.fault)
                    for (name, case), sandbox in zip(CASES.items(), held, strict=True)
                ),
                return_exceptions=True,
            )
        self.outcomes = dict(zip(CASES, found, strict=True))
        self.warned = [line for line in logs if line["event"] == "stop_not_accepted"]

    async def held(self, dag: str) -> str:
        async with self._room:
            await self.client.open_dag(dag)
            return (await self.client.acquire(dag, "box")).sandbox

    async def _case(self, dag: str, sandbox: str, fault: Fault) -> Outcome:
        ref = self.provider.refs[sandbox]
        asked = self.server.stops[ref.native_id]
        self.server.faults[ref.native_id] = fault
        loop = asyncio.get_running_loop()
        began = loop.time()
        verdict = await self.client.cancel_dag(dag, bound_s=BOUND_S)
        took_s = loop.time() - began
        asked_then = len(asked)
        del self.server.faults[ref.native_id]
        told = await self.settled(dag)
        return Outcome(
            sandbox=sandbox,
            verdict=verdict,
            took_s=took_s,
            asked_then=asked_then,
            asked_at=asked,
            words=await self.words(sandbox),
            told=told,
            left=(await self.provider._runtime.observe(ref)).state,
        )

    async def settled(self, dag: str) -> list[Verdict]:
        """The verdicts that were made public, up to the first that is final."""
        told: list[Verdict] = []
        async with asyncio.timeout(SETTLED_S):
            async with contextlib.aclosing(
                self.client.releases(dag, from_start=True)  # type: ignore[type-var]
            ) as releases:
                async for verdict in releases:
                    told.append(verdict)
                    if verdict.released != "unconfirmed":
                        break
        return told

    async def words(self, sandbox: str) -> list[str]:
        return [
            entry.answer
            async for recorded in self.client.history(sandbox)
            for entry in recorded.entries
            if isinstance(entry, e.StopAnsweredEntry) and entry.sandbox == sandbox
        ]

    def outcome(self, name: str) -> Outcome:
        found = self.outcomes[name]
        if isinstance(found, BaseException):
            raise found
        return found


@contextlib.asynccontextmanager
async def gateway(stack: Stack, provider: HttpProvider) -> AsyncIterator[None]:
    user = access.read(str(stack.credentials["gateway"]))
    link = await Link.connect(stack.nats.url, name="gateway", access=user)
    session = GatewaySession(
        link,
        providers={provider.traits.name: provider},
        options=Options(
            shards=stack.shards,
            master=(stack.data / "receipt.key").read_text().strip().encode(),
            gone_within_ms=300,
        ),
        clock=SystemClock(),
        metrics=GatewayMetrics(),
        blob_store=NatsBlobs(link),
    )
    stopping = asyncio.Event()
    running = asyncio.create_task(session.run(stopping))
    try:
        await wait_for(lambda: session.is_open or running.done(), "a lease")
        yield
    finally:
        stopping.set()
        await running
        await link.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-test-"))
    folder.chmod(0o755)
    stack = await Stack.start(folder, gateways=0, trackers=1, others=False, postgres=False)
    try:
        runtime = ProcessProvider(stack.sandbox_root, isolate=False)
        server = StubServer(runtime)
        await server.start()
        provider = HttpProvider(runtime, server)
        async with contextlib.AsyncExitStack() as opened:
            opened.push_async_callback(server.close)
            opened.push_async_callback(provider.close)
            await opened.enter_async_context(gateway(stack, provider))
            client = await opened.enter_async_context(
                await Client.connect(stack.nats.url, wait_s=10)
            )
            found = World(client, provider, server)
            await found.run()
            yield found
    finally:
        await stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", CASES)
async def test_s026_s027_s028_s029_s030_s049_s167_s168_s186_what_the_cancel_says(
    world: World, name: str
) -> None:
    case, outcome = CASES[name], world.outcome(name)
    verdict = outcome.verdict
    assert (verdict.dag, verdict.reason, verdict.evidence) == (
        f"dag-{name}",
        case.reason,
        case.evidence,
    )
    assert verdict.released == ("unconfirmed" if case.reason else "confirmed")
    assert verdict.outstanding == (1 if case.reason else 0)
    # Answered by the shard, and not by a client that waited in vain.
    assert verdict.cancel in {one.cancel for one in outcome.told}
    assert outcome.took_s < BOUND_S + LATE_S


@pytest.mark.parametrize("name", CASES)
async def test_s026_s027_s028_exactly_the_stops_that_are_owed(world: World, name: str) -> None:
    case, outcome = CASES[name], world.outcome(name)
    if not case.reason:
        assert (outcome.asked_then, len(outcome.asked_at)) == (1, 1)
    elif name == "unconfigured":
        assert (outcome.asked_then, len(outcome.asked_at)) == (0, 1)
    else:
        # One at once, repeats after 2 and 4 s more; when the fault is over, one more.
        assert outcome.asked_then in (1, 2, 3)
        assert len(outcome.asked_at) == outcome.asked_then + 1
    # The ledger has each answer that is another than the one before.
    if not case.reason:
        assert outcome.words == ["not_found" if case.fault.ends else "accepted"]
    elif name == "terminating":
        assert outcome.words == ["accepted"]
    else:
        assert outcome.words == [case.evidence.partition(":")[0], "accepted"]


@pytest.mark.parametrize("name", CASES)
async def test_s168_s186_when_the_fault_ends_it_is_confirmed_with_an_event(
    world: World, name: str
) -> None:
    case, outcome = CASES[name], world.outcome(name)
    last = outcome.told[-1]
    assert (last.released, last.evidence, last.outstanding) == ("confirmed", "observed_gone", 0)
    assert outcome.left == "gone"
    if case.reason:
        assert last.cancel == "", "a late one answers no cancel"
        assert {one.released for one in outcome.told[:-1]} == {"unconfirmed"}


async def test_a_provider_that_asks_for_time_is_not_asked_before(world: World) -> None:
    asked = world.outcome("429").asked_at
    assert asked[1] - asked[0] >= RETRY_AFTER_S
    control = world.outcome("409").asked_at
    assert control[1] - control[0] < RETRY_AFTER_S


async def test_s030_a_stop_that_was_not_accepted_is_a_warning_that_names_the_sandbox(
    world: World,
) -> None:
    warned = {(line["sandbox"], line["answer"]) for line in world.warned}
    assert (world.outcome("unconfigured").sandbox, "unconfigured") in warned
    assert world.outcome("control").sandbox not in {sandbox for sandbox, _ in warned}


async def test_s064_what_is_shared_is_not_asked_to_stop(world: World) -> None:
    client = world.client
    sandbox = await world.held("first")
    await client.open_dag("second")
    await client.adopt("second", "theirs", sandbox)
    asked = world.server.stops[world.provider.refs[sandbox].native_id]
    verdict = await client.cancel_dag("first", bound_s=30)
    assert (verdict.released, verdict.reason) == ("unconfirmed", "shared")
    assert asked == []
    verdict = await client.cancel_dag("second", bound_s=30)
    assert (verdict.released, verdict.evidence) == ("confirmed", "observed_gone")
    assert (await world.settled("first"))[-1].released == "confirmed"
    assert len(asked) == 1


async def test_the_ledger_of_all_this_is_sound(world: World) -> None:
    assert (await verify(world.client)).is_clean
