"""The gateway as its own process: started, stopped, paused, killed at its points."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fencepost.client.embedded import NatsServer
from fencepost.core import facts as f
from fencepost.core.sandbox.orders import AttachOrder, CreateOrder, MarkOrder
from fencepost.providers import processes

from tests.integration.sandbox_gateway.control import MASTER, SHARDS, SPEC, Control, Live, wait_for

pytestmark = pytest.mark.budget(80)


class Process:
    def __init__(self, nats: NatsServer, root: Path, log: Path) -> None:
        self._nats = nats
        self._root = root
        self._log = log
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FENCEPOST_")}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fencepost.sandbox_gateway"],
                env={
                    **inherited,
                    "FENCEPOST_NATS_URL": self._nats.url,
                    "FENCEPOST_SHARDS": str(SHARDS),
                    "FENCEPOST_RECEIPT_KEY": MASTER.decode(),
                    "FENCEPOST_SANDBOX_ROOT": str(self._root),
                    "FENCEPOST_HTTP_PORT": str(self.port),
                    "FENCEPOST_HEARTBEAT_MS": "200",
                    "FENCEPOST_LEASE_MS": "2000",
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        return process

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(timeout=30)


@pytest.fixture
def process(nats: NatsServer, control: Control, root: Path, tmp_path: Path) -> Iterator[Process]:
    started = Process(nats, root, tmp_path / "gateway.log")
    try:
        yield started
    finally:
        started.end()


async def session_of(control: Control, former: frozenset[str] = frozenset()) -> str:
    await wait_for(lambda: {seen.gateway for seen in control.seen} - former, "a session")
    return next(seen.gateway for seen in reversed(control.seen) if seen.gateway not in former)


async def test_it_serves_health_and_metrics_and_stops_on_sigterm(
    process: Process, control: Control
) -> None:
    running = process.start()
    live = await control.live(await session_of(control))
    assert (await live.run("s1")).verdict == "applied"
    assert process.get("/healthz")[0] == 200
    assert process.get("/readyz")[0] == 200
    status, text = process.get("/metrics")
    assert status == 200
    assert re.search(r'fencepost_receipts_total\{verdict="applied"\} 1', text)
    running.terminate()
    assert running.wait(timeout=30) == 0
    await control.fact(f.Lost, reason="gateway_closing")
    assert processes.find(processes.INSTANCE, live.ref.instance) == {}


async def test_a_wrong_setting_is_one_clear_line(process: Process, tmp_path: Path) -> None:
    running = process.start(FENCEPOST_DEPLOYMENT="two words")
    assert running.wait(timeout=30) != 0
    assert "FENCEPOST_DEPLOYMENT" in (tmp_path / "gateway.log").read_text()


async def test_s192_s224_paused_past_its_lease_it_does_nothing_of_what_was_queued(
    process: Process, control: Control, root: Path
) -> None:
    running = process.start()
    gateway = await session_of(control)
    live = await control.live(gateway)
    await live.run("s1")
    running.send_signal(signal.SIGSTOP)
    # Queued at the stopped process, all for the session that is over when it continues.
    control.order(
        gateway,
        live.call("late"),
        CreateOrder(sandbox="late", create_id="late", spec=SPEC, labels={}),
    )
    seen = len(control.seen)
    await asyncio.sleep(2.5)  # longer than its lease
    running.send_signal(signal.SIGCONT)
    other = await session_of(control, frozenset({gateway}))
    assert len(control.seen) > seen
    assert not (root / live.ref.native_id / "workspace" / "late.txt").exists()
    assert control.receipts(step="late") == []
    assert control.of(f.Assigned, sandbox="late") == []
    assert processes.find(processes.INSTANCE, live.ref.instance) == {}
    # The new session carries out what is ordered of it.
    found = await control.attach(other, live.ref)
    assert found.marker is not None
    assert found.marker.session == live.session
    assert await control.create(other, "late")


async def test_s192_the_old_toolhost_itself_refuses_what_reaches_it_late(
    process: Process, control: Control, root: Path
) -> None:
    """A frame that was already in the toolhost's pipe when its gateway was stopped."""
    running = process.start()
    gateway = await session_of(control)
    live = await control.live(gateway)
    toolhosts = processes.find(processes.INSTANCE, live.ref.instance)
    assert len(toolhosts) == 1
    (toolhost,) = toolhosts
    os.kill(toolhost, signal.SIGSTOP)
    try:
        control.order(gateway, live.call("late"))
        await wait_for(
            lambda: 'dispatches_total{direction="apply"} 1' in process.get("/metrics")[1]
        )
        running.send_signal(signal.SIGSTOP)
        other = process.start()
        two = await session_of(control, frozenset({gateway}))
        found = await control.attach(two, live.ref)
        await control.mark(two, found, epoch=2)
    finally:
        if processes.started_at(toolhost) is not None:
            os.kill(toolhost, signal.SIGCONT)
    newer = Live(control, two, live.ref, found, control.of(f.Marked)[-1])
    assert (await newer.run("s2")).verdict == "applied"
    running.send_signal(signal.SIGCONT)
    await wait_for(lambda: control.of(f.Lost) or len({s.gateway for s in control.seen}) > 2)
    assert not (root / live.ref.native_id / "workspace" / "late.txt").exists()
    assert [r for r in control.receipts(step="late") if r.verdict == "applied"] == []
    assert other.poll() is None


POINTS = [
    "gateway_before_create",
    "gateway_after_create",
    "gateway_before_assigned",
    "gateway_after_assigned",
    "gateway_before_found",
    "gateway_after_found",
    "gateway_before_marked",
    "gateway_after_marked",
    "gateway_order_received",
    "gateway_frames_sent",
    "gateway_receipt_received",
    "gateway_before_receipts",
    "gateway_after_receipts",
    "gateway_before_stop",
    "gateway_after_stop",
]


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_a_point_and_started_again_everything_ends_once(
    process: Process, control: Control, root: Path, tmp_path: Path, point: str
) -> None:
    """What a shard would do: the same orders again, to whichever session lives, until answered."""
    once = tmp_path / "once"
    arm = {"FENCEPOST_CRASH": point, "FENCEPOST_CRASH_ONCE": str(once)}
    former: set[str] = set()
    running = process.start(**arm)

    def turn() -> str:
        nonlocal running
        if running.poll() is not None:
            former.update(seen.gateway for seen in control.seen)
            running = process.start(**arm)
        live_ids = [seen.gateway for seen in control.seen if seen.gateway not in former]
        return live_ids[-1] if live_ids else ""

    async def until(done, order) -> None:
        for _ in range(300):
            if done():
                return
            gateway = turn()
            if gateway:
                order(gateway)
            await asyncio.sleep(0.1)
        raise AssertionError(f"{point}: never answered; facts {control.facts}")

    await until(
        lambda: control.of(f.Assigned),
        lambda gw: control.order(
            gw, CreateOrder(sandbox="sbx", create_id="sbx", spec=SPEC, labels={})
        ),
    )
    ref = control.of(f.Assigned)[-1].ref
    assert len({fact.ref.instance for fact in control.of(f.Assigned)}) == 1

    live: Live | None = None
    no = 0

    def attached() -> bool:
        return (
            any(fact.gateway not in former for fact in control.of(f.Marked))
            and running.poll() is None
        )

    def attach_and_mark(gw: str) -> None:
        found = [fact for fact in control.of(f.Found) if fact.gateway == gw]
        if not found:
            control.order(gw, AttachOrder(sandbox="sbx", ref=ref, spec=SPEC))
            return
        marker = found[-1].marker
        nonce = marker.nonce if marker is not None else found[-1].nonce_fresh
        control.order(gw, MarkOrder(sandbox="sbx", session=found[-1].session, epoch=1, nonce=nonce))

    calls: dict[str, object] = {}

    def dispatch(gw: str) -> None:
        nonlocal live, no
        marked = [fact for fact in control.of(f.Marked) if fact.gateway == gw]
        if not marked:
            attach_and_mark(gw)
            return
        session = marked[-1].session
        if session not in calls:
            no += 1
            found = next(x for x in control.of(f.Found) if x.session == session)
            live = Live(control, gw, ref, found, marked[-1])
            calls[session] = live.call("s1", "run_command", {"shell": "echo x >> log"}, ordinal=no)
        control.order(gw, calls[session])

    await until(attached, attach_and_mark)
    await until(
        lambda: [r for r in control.receipts(step="s1") if r.verdict != "running"], dispatch
    )
    verdicts = {r.verdict for r in control.receipts(step="s1")} - {"running"}
    log = root / ref.native_id / "workspace" / "log"
    written = log.read_text() if log.exists() else ""
    # At most once in all; exactly once where a receipt speaks of an effect.
    assert written in ("", "x\n")
    if verdicts & {"applied", "attested"}:
        assert written == "x\n"
    else:
        assert verdicts == {"indeterminate"}

    await until(lambda: control.of(f.Gone), lambda gw: control.stop(gw, ref))
    assert not (root / ref.native_id).exists()
    assert processes.find(processes.INSTANCE, ref.instance) == {}
    assert once.exists(), f"{point} was never reached"
