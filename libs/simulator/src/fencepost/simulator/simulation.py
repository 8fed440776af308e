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
from fencepost.core.dag.machine import DagMachine
from fencepost.core.errors import FencepostError
from fencepost.core.machine import Effect
from fencepost.core.sandbox.inputs import ReceiptReceived
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.simulator import chaos, checkers
from fencepost.simulator.auditor import Auditor, SandboxView
from fencepost.simulator.dag_checkers import MessagesOnce
from fencepost.simulator.dag_views import SETTLED
from fencepost.simulator.disks import Outside
from fencepost.simulator.gateway import LEASE_MS, Gateway
from fencepost.simulator.ledger import SimulatedLog
from fencepost.simulator.mail import Post
from fencepost.simulator.options import Options
from fencepost.simulator.provider import DEPLOYMENT, Provider
from fencepost.simulator.replicas import Locks, Planner
from fencepost.simulator.sweeper import Sweeper
from fencepost.simulator.workload import Workload
from fencepost.simulator.workload_dags import DagWorkload
from fencepost.simulator.world import START_MS, World

ONCE: Final = ("claim", "unclaim")
EVENTS_MAX: Final = 400_000
LIVENESS_LOOK_MS: Final = 500
CALM_MS: Final = 6_000
LATE_MS: Final = 5_000
STAGES: Final = ("steps", "resolved", "dags", "released")
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
        has_dags = options.dags > 0
        lanes = ("commands", "facts", "messages") if has_dags else ("commands", "facts")
        self.log = SimulatedLog(self.world, options.shards, self.auditor.appended, inputs=lanes)
        self.dag_log: SimulatedLog | None = None
        self.dag_machine = DagMachine()
        post: Post | None = None
        if has_dags:
            lanes = ("commands", "messages")
            self.dag_log = SimulatedLog(
                self.world, options.shards, self.auditor.dag_appended, inputs=lanes
            )
            logs = {"sandbox": self.log, "dag": self.dag_log}
            post = Post(self.world, logs, self._poke_family)
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
                post=post,
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
        self.trackers = self._make_trackers(post)
        self.sweepers = self._make_sweepers()
        self.dags = DagWorkload(self.world, self.workload, self._publish_dag)
        if has_dags:
            self.auditor.happened = self.dags.happened
        self.chaos = chaos.Chaos(
            self.world,
            self.planners,
            self.gateways,
            self.provider,
            self.log,
            clients=self.workload,
            trackers=self.trackers,
            sweepers=self.sweepers,
            dag_log=self.dag_log,
        )
        self.auditor.on_entry.setdefault("recovery_stopped", []).append(self._recovery_stopped)
        self.auditor.on_entry.setdefault("refused", []).append(self._refused)
        self.settled_ms = 0
        self._recoveries = 0
        self._subjects: dict[str, None] = {}

    def _make_trackers(self, post: Post | None) -> list[Planner]:
        if self.dag_log is None:
            return []
        locks = Locks()
        return [
            Planner(
                self.world,
                f"t{n}",
                self.dag_log,
                locks=locks,
                machine=self.dag_machine,
                perform=self._perform,
                observer=self.auditor,
                post=post,
                kind="tracker",
            )
            for n in range(self.options.trackers)
        ]

    def _make_sweepers(self) -> list[Sweeper]:
        count = self.options.sweepers if self.options.dags else 0
        return [
            Sweeper(
                self.world,
                f"sw{n}",
                gateways=self.gateways,
                planners=self.planners,
                trackers=self.trackers,
                shards=self.options.shards,
                propose=self._fact_stored,
                observer=self.auditor,
            )
            for n in range(count)
        ]

    def _checkers(self) -> list[checkers.Checker]:
        made: list[checkers.Checker] = []
        for kind in checkers.ALL:
            if kind is checkers.LedgerUnbroken:
                made += [
                    checkers.LedgerUnbroken(self.auditor, machine, self.options.shards)
                    for machine in (self.machine, self.dag_machine)
                ]
            else:
                made.append(kind(self.auditor))
        return made

    # --- what passes between processes --------------------------------------------------------

    def _shard(self, sandbox: str) -> int:
        return ids.shard_of(sandbox, self.options.shards)

    def _publish(self, kind: str, sandbox: str, id_: str, body: bytes) -> None:
        shard = self._shard(sandbox)
        subject = f"fp.v1.cmd.{kind}.{sandbox}.{id_}"
        if kind in ONCE and not self._is_first(subject):
            return
        self.log.commands[shard].append(subject, body)
        self.world.tell("command", kind, sandbox, id_)
        self._poke(shard)

    def _publish_dag(self, dag: str, id_: str, body: bytes) -> None:
        assert self.dag_log is not None
        subject = f"fp.v1.cmd.dag.{dag}.{id_}"
        if not self._is_first(subject):
            return
        shard = self._shard(dag)
        self.dag_log.commands[shard].append(subject, body)
        if self.world.trace is not None:
            self.world.tell("command", "dag", dag, id_, body.decode())
        self._poke_family("dag", shard)

    def _is_first(self, subject: str) -> bool:
        """The stream of commands keeps one of each subject, and refuses another."""
        first = subject not in self._subjects
        self._subjects[subject] = None
        return first

    def _poke_family(self, family: str, shard: int) -> None:
        if family == "sandbox":
            self._poke(shard)
            return
        for tracker in self.trackers:
            tracker.after(self.world.between(0, 3), tracker.poke, shard)

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
        kind = fact.__struct_config__.tag
        stream.append(f"fp.v1.fact.{fact.sandbox}.{kind}", _encode(fact))
        if self.world.trace is not None:
            self.world.tell("fact", type(fact).__name__, fact.sandbox, _words(fact))
        self._poke(shard)

    def _say_all(self, value: Any) -> None:
        for planner in self.planners:
            if planner.is_cut(_gateway_of(value)):
                continue
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
            if not planner.is_cut(_gateway_of(value)):
                planner.after(delay_ms, planner.deliver, shard, value)

    def _perform(self, planner: Planner, effect: Effect) -> None:
        """Sends an order to the gateway session that it names; to nobody when it is over."""
        world = self.world
        if world.hit("dispatch_lost"):
            return
        delayed = world.hit("dispatch_delayed")
        delay_ms = world.between(100, 8_000) if delayed else world.between(0, 5)
        self._send_order(planner, effect, delay_ms)
        if world.hit("dispatch_repeated"):
            self._send_order(planner, effect, delay_ms + world.between(0, 5_000))

    def _send_order(self, planner: Planner, effect: Effect, delay_ms: int) -> None:
        for gateway in self.gateways:
            if gateway.session == effect.target and not planner.is_cut(gateway.name):
                gateway.after(delay_ms, self._order_arrived, gateway, effect)

    def _order_arrived(self, gateway: Gateway, effect: Effect) -> None:
        if gateway.alive and gateway.session == effect.target and not gateway.is_cut_off:
            gateway.take(effect.order)

    # --- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs both phases, or up to the first violation."""
        for planner in self.planners:
            planner.start()
        for gateway in self.gateways:
            gateway.start()
        for tracker in self.trackers:
            tracker.start()
        for sweeper in self.sweepers:
            sweeper.start()
        self.workload.start()
        self.dags.start()
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
        """
        Every step ends; what is indeterminate is resolved; every DAG is cancelled and answered;
        all sandboxes are released, and nothing of ours runs any more.
        """
        world = self.world
        began_ms = world.now_ms
        for stage in STAGES:
            if stage == "resolved":
                self._resolve()
            if stage == "dags":
                self.dags.end_all({view.name for view in self.auditor.dags.values() if view.closed})
            if stage == "released":
                self.workload.release_all()
            limit_ms = world.now_ms + self.options.settle_ms
            while waiting := self._waiting(stage):
                if world.now_ms >= limit_ms or world.events > EVENTS_MAX:
                    self._judge(waiting)
                    return
                self._advance_to(world.now_ms + LIVENESS_LOOK_MS)
                if world.now_ms - began_ms >= CALM_MS:
                    self._judge_bounds()
                if world.violations:
                    return
        self.settled_ms = world.now_ms - began_ms
        self._judge([])
        for checker in self.checkers:
            if isinstance(checker, checkers.LedgerUnbroken):
                checker.finish()

    def _recovery_stopped(self, view: SandboxView, _entry: dict[str, Any]) -> None:
        self._recoveries += 1
        delay_ms = self.world.between(100, 3_000)
        self.world.after(delay_ms, self.workload.recover, view.name, self._recoveries)

    def _refused(self, view: SandboxView, entry: dict[str, Any]) -> None:
        """An operator whose word came while no session was attached gives it once more."""
        again = (entry["command"], entry["reason"]) == ("recover", "no_live_epoch")
        if again and not view.releasing:
            self._recovery_stopped(view, entry)

    def _judge_bounds(self) -> None:
        """Once it is calm, a cancel is answered at its bound, whatever is outstanding."""
        late_ms = self.world.now_ms - LATE_MS
        late = [
            f"cancel {cancel} of {view.name} has no answer {LATE_MS} ms after its bound"
            for view in self.auditor.dags.values()
            for cancel, by_ms in view.asked.items()
            if by_ms < late_ms
        ]
        if late:
            self._judge(late)

    def _resolve(self) -> None:
        for view in self.auditor.sandboxes.values():
            for name, step in view.steps.items():
                if step.state == "indeterminate":
                    self.workload.resolve(view.name, name)

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
        unsent = self.workload.unsent + self.dags.unsent
        if unsent:
            waiting.append(f"{unsent} commands are not sent yet")
        if stage != "released":
            waiting += self._untaken("sandbox", self.log)
            if self.dag_log is not None:
                waiting += self._untaken("dag", self.dag_log)
        for sent in self.workload.sent:
            state = self.state_of(sent.sandbox, sent.step)
            if state in ("pending", "fenced") or (stage != "steps" and state == "indeterminate"):
                waiting.append(f"step {sent.sandbox}/{sent.step} is {state}")
        waiting += self._unanswered(stage)
        if stage != "steps":
            # Before their sandbox's release would have taken them along.
            waiting += [
                f"{instance.name}, which is nobody's, still runs"
                for instance in self.provider.instances.values()
                if instance.stray and instance.state != "gone" and instance.deployment == DEPLOYMENT
            ]
        if stage == "released":
            for name in self.workload.sandboxes:
                view = self.auditor.sandboxes.get(name)
                if view is None or not view.gone:
                    waiting.append(f"sandbox {name} is not gone")
            waiting += self._not_released()
        return waiting

    def _untaken(self, family: str, log: SimulatedLog) -> list[str]:
        return [
            f"{family} shard {shard} took {taken} of {len(stream.messages)} commands"
            for shard, stream in enumerate(log.commands)
            if (taken := self._position(family, shard, "commands")) < len(stream.messages)
        ]

    def _unanswered(self, stage: str) -> list[str]:
        """Cancels that got no verdict, or no answer at all."""
        waiting = []
        for plan in self.dags.dags:
            view = self.auditor.dags.get(plan.name)
            if view is None:
                if stage in ("dags", "released"):
                    waiting.append(f"nothing is known of {plan.name}")
                continue
            waiting += [
                f"cancel {cancel} of {plan.name} is not answered"
                for cancel in plan.cancels
                if cancel not in view.answers
            ]
        return waiting

    def _not_released(self) -> list[str]:
        """What is still held, still running, or called otherwise than it is."""
        waiting = [
            f"{view.name} is {view.verdict}, {view.open_count} are open"
            for view in self.auditor.dags.values()
            if view.closed and (view.open_count or view.verdict not in SETTLED)
        ]
        waiting += [
            f"instance {instance.name} still runs"
            for instance in self.provider.instances.values()
            if instance.state != "gone" and instance.deployment == DEPLOYMENT
        ]
        for checker in self.checkers:
            if isinstance(checker, MessagesOnce):
                waiting += checker.waiting()
        return waiting

    def _position(self, family: str, shard: int, name: str) -> int:
        """How far the ledger says that a stream was taken."""
        for checker in self.checkers:
            if isinstance(checker, checkers.LedgerUnbroken) and checker.family == family:
                return checker.recorded(shard, name)
        return 0

    def state_of(self, sandbox: str, step: str) -> str:
        view = self.auditor.sandboxes.get(sandbox)
        known = view.steps.get(step) if view is not None else None
        return "refused" if known is None else known.state


def _gateway_of(value: Any) -> str:
    """The process that speaks: a session's id is its process's name and a number."""
    return str(value.gateway.rpartition("-")[0])


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
