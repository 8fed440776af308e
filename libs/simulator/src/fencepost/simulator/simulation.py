"""
One run: the world put together, a safety phase with faults, a liveness phase without.

The machine is the live one. Everything around it is simulated, and everything that a fault can do
to what passes between two processes is in this file.
"""

from __future__ import annotations

import traceback
from typing import Any, Final

import msgspec
from fencepost.core import facts, ids
from fencepost.core.errors import FencepostError
from fencepost.core.machine import Effect
from fencepost.core.sandbox.inputs import ReceiptReceived
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.simulator import chaos, checkers
from fencepost.simulator.auditor import Auditor
from fencepost.simulator.disks import Outside
from fencepost.simulator.gateway import LEASE_MS, Gateway
from fencepost.simulator.ledger import SimulatedLog
from fencepost.simulator.options import Options
from fencepost.simulator.owner import Locks, Planner
from fencepost.simulator.provider import Provider
from fencepost.simulator.workload import Workload
from fencepost.simulator.world import START_MS, World

EVENTS_MAX: Final = 400_000
LIVENESS_LOOK_MS: Final = 500
GATEWAY_SILENT_MS: Final = 1_200

_encode = msgspec.json.Encoder().encode

# What the deciding code may raise when it is wrong. Anything else is the simulator's own fault.
_BUGS: Final = (
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    FencepostError,
    msgspec.MsgspecError,
)


class Simulation:
    """The world of one seed. `run` it once."""

    def __init__(self, seed: int, options: Options, *, tracing: bool = False) -> None:
        self.options = options
        self.world = World(seed, options, tracing=tracing)
        self.machine = SandboxMachine(lease_ms=LEASE_MS, gateway_silent_ms=GATEWAY_SILENT_MS)
        self.outside = Outside()
        self.auditor = Auditor(self.world, self.outside)
        self.provider = Provider(self.world, self.outside, self.auditor)
        self.auditor.provider = self.provider
        self.log = SimulatedLog(self.world, options.shards, self.auditor.appended)
        self.checkers = self._checkers()
        locks = Locks()
        self.planners = [
            Planner(
                self.world,
                f"p{n}",
                self.log,
                locks=locks,
                machine=self.machine,
                perform=self._perform,
                observer=self.auditor,
            )
            for n in range(options.planners)
        ]
        self.gateways = [
            Gateway(
                self.world,
                f"gw{n}",
                self.provider,
                put_fact=self._put_fact,
                say=self._say,
                say_all=self._say_all,
            )
            for n in range(options.gateways)
        ]
        self.workload = Workload(self.world, self._publish)
        self.chaos = chaos.Chaos(self.world, self.planners, self.gateways, self.provider, self.log)
        self.settled_ms = 0

    def _checkers(self) -> list[checkers.Checker]:
        made: list[checkers.Checker] = []
        for kind in checkers.ALL:
            if kind is checkers.LedgerUnbroken:
                made.append(
                    checkers.LedgerUnbroken(self.auditor, self.machine, self.options.shards)
                )
            else:
                made.append(kind(self.auditor))
        return made

    # --- what passes between processes --------------------------------------------------------

    def _shard(self, sandbox: str) -> int:
        return ids.shard_of(sandbox, self.options.shards)

    def _publish(self, kind: str, sandbox: str, id_: str, body: bytes) -> None:
        shard = self._shard(sandbox)
        self.log.commands[shard].append(f"fp.v1.cmd.{kind}.{sandbox}.{id_}", body)
        self.world.tell("command", kind, sandbox, id_)
        self._poke(shard)

    def _poke(self, shard: int) -> None:
        for planner in self.planners:
            planner.after(self.world.between(0, 3), planner.poke, shard)

    def _put_fact(self, gateway: Gateway, fact: facts.Fact, answered: Any) -> None:
        world = self.world
        delayed = world.hit("fact_delayed")
        delay_ms = world.between(200, 5_000) if delayed else world.between(0, 5)
        world.after(delay_ms, self._fact_arrived, gateway, gateway.life, fact, answered)
        if world.hit("fact_repeated"):
            world.after(world.between(0, 8_000), self._fact_stored, fact)

    def _fact_arrived(self, gateway: Gateway, life: int, fact: facts.Fact, answered: Any) -> None:
        self._fact_stored(fact)
        self.world.answer(1, gateway, life, answered, ())

    def _fact_stored(self, fact: facts.Fact) -> None:
        shard = self._shard(fact.sandbox)
        stream = self.log.facts[shard]
        if self.world.hit("fact_poisoned"):
            stream.append(f"fp.v1.fact.{fact.sandbox}", b'{"kind":"nonsense"}')
        stream.append(f"fp.v1.fact.{fact.sandbox}", _encode(fact))
        if self.world.trace is not None:
            self.world.tell("fact", type(fact).__name__, fact.sandbox, _words(fact))
        self._poke(shard)

    def _say_all(self, value: Any) -> None:
        for planner in self.planners:
            for shard in range(self.options.shards):
                planner.after(self.world.between(1, 10), planner.deliver, shard, value)

    def _say(self, sandbox: str, value: Any) -> None:
        if not isinstance(value, ReceiptReceived):
            self._deliver(sandbox, value, self.world.between(1, 10))
            return
        world = self.world
        if world.hit("receipt_lost"):
            return
        delayed = world.hit("receipt_delayed")
        delay_ms = world.between(100, 8_000) if delayed else world.between(0, 5)
        if world.hit("receipt_repeated"):
            self._deliver(sandbox, value, delay_ms + world.between(0, 5_000))
        if world.hit("receipt_empty"):
            value = msgspec.structs.replace(value, receipt=None, problem="an empty body")
        elif world.hit("receipt_corrupted"):
            value = self._corrupted(value)
        self._deliver(sandbox, value, delay_ms)

    def _corrupted(self, value: ReceiptReceived) -> ReceiptReceived:
        """What a wire or a stranger can make of a receipt: its stamp no longer holds."""
        receipt = value.receipt
        assert receipt is not None
        lot = self.world.between(0, 3)
        view = self.auditor.sandboxes.get(value.sandbox)
        if lot == 0:
            receipt = msgspec.structs.replace(receipt, verdict="applied", outcome="ok")
        elif lot == 1:
            receipt = msgspec.structs.replace(receipt, epoch=receipt.epoch + 1)
        elif lot == 2 and view is not None:
            # The best guess of a stranger: everything as the ledger wants it, nothing applied.
            step = view.steps.get(receipt.step)
            marker = msgspec.structs.replace(
                receipt.after, epoch=view.epoch, session=view.session, nonce=view.nonce
            )
            receipt = msgspec.structs.replace(
                receipt,
                verdict="applied",
                outcome="ok",
                epoch=view.epoch,
                session=view.session,
                nonce=view.nonce,
                after=marker,
                no=step.no if step is not None else receipt.no,
            )
        else:
            receipt = msgspec.structs.replace(receipt, digest="sha256:0")
        return msgspec.structs.replace(value, receipt=receipt, mac_ok=False)

    def _deliver(self, sandbox: str, value: Any, delay_ms: int) -> None:
        shard = self._shard(sandbox)
        for planner in self.planners:
            planner.after(delay_ms, planner.deliver, shard, value)

    def _perform(self, effect: Effect) -> None:
        """Sends an order to the gateway session that it names; to nobody when it is over."""
        world = self.world
        if world.hit("dispatch_lost"):
            return
        delayed = world.hit("dispatch_delayed")
        delay_ms = world.between(100, 8_000) if delayed else world.between(0, 5)
        self._send_order(effect, delay_ms)
        if world.hit("dispatch_repeated"):
            self._send_order(effect, delay_ms + world.between(0, 5_000))

    def _send_order(self, effect: Effect, delay_ms: int) -> None:
        for gateway in self.gateways:
            if gateway.session == effect.target:
                gateway.after(delay_ms, self._order_arrived, gateway, effect)

    def _order_arrived(self, gateway: Gateway, effect: Effect) -> None:
        if gateway.session == effect.target and not gateway.is_cut_off:
            gateway.take(effect.order)

    # --- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs both phases, or up to the first violation."""
        for planner in self.planners:
            planner.start()
        for gateway in self.gateways:
            gateway.start()
        self.workload.start()
        self.chaos.start()
        self._advance_to(START_MS + self.options.safety_ms, until_done=True)
        if self.world.violations:
            return
        self.world.faults_on = False
        self.world.tell("phase", "faults stop")
        self.chaos.stop()
        self._settle()

    def _advance_to(self, at_ms: int, *, until_done: bool = False) -> None:
        world = self.world
        world.after(max(at_ms - world.now_ms, 0), _nothing)
        while world.now_ms < at_ms or (until_done and not self.workload.done):
            if not self._step() or world.violations:
                return

    def _step(self) -> bool:
        world = self.world
        try:
            return world.step()
        except _BUGS as error:
            world.violate("I10", f"{type(error).__name__}: {error} (raised by the machine)")
            world.tell("raised", *traceback.format_exc().splitlines()[-7:])
            return False

    def _settle(self) -> None:
        """Every step ends; then the indeterminate are resolved and all sandboxes released."""
        world = self.world
        began_ms = world.now_ms
        for stage in ("steps", "resolved", "released"):
            if stage == "resolved":
                for view in self.auditor.sandboxes.values():
                    for name, step in view.steps.items():
                        if step.state == "indeterminate":
                            self.workload.resolve(view.name, name)
            if stage == "released":
                self.workload.release_all()
            limit_ms = world.now_ms + self.options.settle_ms
            while waiting := self._waiting(stage):
                if world.now_ms >= limit_ms or world.events > EVENTS_MAX:
                    self._judge(waiting)
                    return
                self._advance_to(world.now_ms + LIVENESS_LOOK_MS)
                if world.violations:
                    return
        self.settled_ms = world.now_ms - began_ms
        self._judge([])
        for checker in self.checkers:
            if isinstance(checker, checkers.LedgerUnbroken):
                checker.finish()

    def _judge(self, waiting: list[str]) -> None:
        parked = [
            f"{view.name}/{name}"
            for view in self.auditor.sandboxes.values()
            for name, step in view.steps.items()
            if step.state == "pending" and view.session and not view.releasing
        ]
        for checker in self.checkers:
            if isinstance(checker, checkers.AllSettles):
                checker.judge(waiting)
            elif isinstance(checker, checkers.NothingBlocks):
                checker.judge(parked if waiting else [])

    def _waiting(self, stage: str) -> list[str]:
        """What a stage still waits for, in words."""
        waiting: list[str] = []
        if self.workload.unsent:
            waiting.append(f"{self.workload.unsent} commands are not sent yet")
        for shard in range(self.options.shards):
            for name, stream in (
                ("commands", self.log.commands[shard]),
                ("facts", self.log.facts[shard]),
            ):
                taken = self._position(shard, name)
                if stage != "released" and name == "commands" and taken < len(stream.messages):
                    waiting.append(f"shard {shard} took {taken} of {len(stream.messages)} {name}")
        for sent in self.workload.sent:
            state = self.state_of(sent.sandbox, sent.step)
            if state in ("pending", "fenced") or (stage != "steps" and state == "indeterminate"):
                waiting.append(f"step {sent.sandbox}/{sent.step} is {state}")
        if stage == "released":
            for name in self.workload.sandboxes:
                view = self.auditor.sandboxes.get(name)
                if view is None or not view.gone:
                    waiting.append(f"sandbox {name} is not gone")
            waiting += [
                f"instance {instance.name} still runs"
                for instance in self.provider.instances.values()
                if instance.state != "gone"
            ]
        return waiting

    def _position(self, shard: int, name: str) -> int:
        """How far the ledger says that a stream was taken."""
        for checker in self.checkers:
            if isinstance(checker, checkers.LedgerUnbroken):
                return checker.recorded(shard, name)
        return 0

    def state_of(self, sandbox: str, step: str) -> str:
        view = self.auditor.sandboxes.get(sandbox)
        known = view.steps.get(step) if view is not None else None
        return "refused" if known is None else known.state


def _nothing() -> None:
    """Gives the heap an item at a time that must be reached."""


def _words(fact: facts.Fact) -> str:
    words = []
    for name in ("create_id", "session", "epoch", "journal_seq", "reason", "observed", "answer"):
        value = getattr(fact, name, None)
        if value not in (None, ""):
            words.append(f"{name}={value}")
    marker = getattr(fact, "marker", None)
    if marker is not None:
        words.append(f"marker={marker.epoch}/{marker.session}")
    return " ".join(words)
