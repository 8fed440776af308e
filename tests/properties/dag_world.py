"""
DAGs, sandboxes, one gateway and a provider that sees all: every wait between them is a choice.

Nothing happens by itself. Whatever is under way (a command, a message between the families, an
order, a provider's call, a fact) waits in a queue until somebody picks it, so a test decides what
is late. The provider knows what really runs; the shards hear of it by facts only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
from fencepost.core import facts
from fencepost.core.dag import entries as d
from fencepost.core.dag.machine import DagMachine
from fencepost.core.invariants import ShardAuditor
from fencepost.core.machine import Effect, Message, Place
from fencepost.core.receipts import Marker
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import inputs, orders
from fencepost.core.sandbox.machine import SandboxMachine

GATEWAY = "gw1"
FAULTS = (
    "none",
    "ambiguous_create",
    "lost_reply",
    "refused",
    "not_found",
    "unknown_success",
    "timeout",
    "terminating",
)


class Shard:
    """One family's only shard: decides, writes through bytes, is audited, can be taken over."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.state = machine.initial(0, 1)
        self.hints = machine.new_hints()
        self.auditor = ShardAuditor(machine.family, 0)
        self.entries: list[Any] = []
        self.messages: list[Message] = []
        self.now_ms = 1_000_000
        self.seq = 0
        self.term = 0
        self.sizes: list[int] = []
        self.accepted: Callable[[Any], None] = lambda _entry: None
        self.open_term()

    def open_term(self) -> None:
        self.term += 1
        self._accept([self.machine.term_opened(self.term, f"o{self.term}", 1, "h")])

    def restart(self) -> None:
        self.state = self.machine.decode_state(self.machine.encode_state(self.state))
        self.hints = self.machine.new_hints()
        self.open_term()

    def take(self, value: Any) -> list[Any]:
        if self.machine.take_hint(self.state, self.hints, value, self.now_ms):
            return []
        entries = list(self.machine.decide(self.state, self.hints, value, self.now_ms))
        if entries:
            self._accept(entries)
        return entries

    def feed(self, source: str, subject: str, data: bytes) -> list[Any]:
        return [x for v in self.machine.decode(source, subject, data) for x in self.take(v)]

    @property
    def is_due(self) -> bool:
        due = self.machine.next_due_ms(self.state, self.hints)
        return due is not None and due <= self.now_ms

    def tick(self) -> None:
        for _ in range(10_000):
            if not self.is_due:
                return
            self.take(self.machine.tick())
        raise AssertionError("something is due for ever")

    def _accept(self, entries: list[Any]) -> None:
        data = self.machine.encode_entries(entries)
        assert len(data) <= 64 * 1024, "an input's entries must fit a batch"
        self.sizes.append(len(data))
        entries = list(self.machine.decode_entries(data))
        prev, self.seq = self.seq, self.seq + 1
        for index, entry in enumerate(entries):
            self.machine.evolve(self.state, entry, Place(prev, index), self.now_ms)
        found = self.auditor.take(
            seq=self.seq,
            prev=prev,
            term=self.term,
            owner=f"o{self.term}",
            now_ms=self.now_ms,
            entries=entries,
        )
        assert not found, found
        for entry in entries:
            self.entries.append(entry)
            self.messages += self.machine.messages_of(entry)
            list(self.machine.effects_of(self.state, self.hints, entry))
            list(self.machine.events_of(entry))
            self.accepted(entry)

    def of_kind(self, kind: Any) -> list[Any]:
        return [entry for entry in self.entries if isinstance(entry, kind)]


@dataclass
class Thing:
    """What a provider really has."""

    create_id: str
    sandbox: str
    ref: facts.Ref
    terminating: bool = False


@dataclass
class World:
    """
    A create id makes one thing, once: asked again, the provider names the same, gone or not.

    `luck` picks faults; an unlucky call is one that it draws.
    """

    fault: str = "none"
    fault_rate: float = 0.5
    luck: Random = field(default_factory=lambda: Random(0))
    observes_gone: bool = True
    dags: Shard = field(default_factory=lambda: Shard(DagMachine()))
    boxes: Shard = field(default_factory=lambda: Shard(SandboxMachine()))
    running: dict[str, Thing] = field(default_factory=dict)
    made: dict[str, Thing] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    commands: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    calls: list[orders.Order] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)
    minted: int = 0
    markers: dict[str, Marker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dags.accepted = self._judge
        self.see()

    # --- the shards -----------------------------------------------------------------------------

    def see(self) -> None:
        self.boxes.take(
            inputs.GatewaySeen(gateway=GATEWAY, authorities=["host"], providers=["process"])
        )

    def ask(self, dag: str, id_: str, **content: Any) -> list[Any]:
        """A command that arrives at once."""
        return self.dags.feed(
            "commands", f"fp.v1.in.0.dag.{dag}.{id_}", msgspec.json.encode(content)
        )

    def tell_box(self, kind: str, sandbox: str, id_: str, **content: Any) -> list[Any]:
        subject = f"fp.v1.in.0.{kind}.{sandbox}.{id_}"
        return self.boxes.feed("commands", subject, msgspec.json.encode(content))

    def later(self, dag: str, id_: str, **content: Any) -> None:
        self.commands.append((dag, id_, content))

    def owed(self) -> list[Effect]:
        return [
            effect
            for effect in self.boxes.machine.effects(
                self.boxes.state, self.boxes.hints, self.boxes.now_ms
            )
            if effect.target == GATEWAY and effect.order not in self.calls
        ]

    def choices(self) -> list[Callable[[], None]]:
        """Whatever may happen next; messages between two shards keep their order."""
        found: list[Callable[[], None]] = []
        if self.commands:
            found.append(self._command)
        if self.dags.messages:
            found.append(self._to_boxes)
        if self.boxes.messages:
            found.append(self._to_dags)
        found += [shard.tick for shard in (self.dags, self.boxes) if shard.is_due]
        found += [lambda n=n: self._report(n) for n in range(len(self.reports))]  # type: ignore[misc]
        found += [lambda n=n: self._call(n) for n in range(len(self.calls))]  # type: ignore[misc]
        found += [
            lambda x=thing: self._end(x)  # type: ignore[misc]
            for thing in self.running.values()
            if thing.terminating
        ]
        if len(self.calls) + len(self.reports) < 4:  # it is asked again, but not without end
            found += [lambda x=effect: self.calls.append(x.order) for effect in self.owed()]  # type: ignore[misc]
        return found

    def _command(self) -> None:
        dag, id_, content = self.commands.pop(0)
        self.dags.tick()
        self.ask(dag, id_, **content)

    def _to_boxes(self) -> None:
        message = self.dags.messages.pop(0)
        assert message.family == "sandbox"
        self.boxes.feed("messages", "", msgspec.json.encode(message.body))

    def _to_dags(self) -> None:
        message = self.boxes.messages.pop(0)
        assert message.family == "dag"
        self.dags.feed("messages", "", msgspec.json.encode(message.body))

    def _report(self, number: int) -> None:
        self.boxes.take(self.reports.pop(number))
        self.check_named()

    def advance(self, ms: int) -> None:
        self.dags.now_ms += ms
        self.boxes.now_ms += ms
        self.see()

    # --- the gateway and the provider -----------------------------------------------------------

    def _strikes(self, fault: str) -> bool:
        return self.fault == fault and self.luck.random() < self.fault_rate

    def _call(self, number: int) -> None:
        order = self.calls.pop(number)
        lost = self._strikes("lost_reply")
        before = len(self.reports)
        match order:
            case orders.CreateOrder():
                self._create(order)
            case orders.AttachOrder():
                self._attach(order)
            case orders.MarkOrder():
                self._mark(order)
            case orders.StopOrder(ref=None):
                self._stop_create(order)
            case orders.StopOrder():
                self._stop(order)
        if lost:
            del self.reports[before:]

    def _create(self, order: orders.CreateOrder) -> None:
        if order.create_id in self.settled:
            self._failed(order, reason="refused", ambiguous=False)
            return
        thing = self.made.get(order.create_id)
        if thing is None:
            self.minted += 1
            ref = facts.Ref(
                authority="host",
                provider="process",
                native_id=order.create_id,
                instance=f"i{self.minted}",
            )
            thing = Thing(order.create_id, order.sandbox, ref)
            self.made[order.create_id] = self.running[order.create_id] = thing
            self.check_named()
        if self._strikes("ambiguous_create"):
            self._failed(order, reason="no answer", ambiguous=True)
            return
        self._assigned(order.sandbox, order.create_id, thing.ref)

    def _assigned(self, sandbox: str, create_id: str, ref: facts.Ref) -> None:
        self.reports.append(
            facts.Assigned(
                sandbox=sandbox,
                create_id=create_id,
                gateway=GATEWAY,
                ref=ref,
                capabilities=facts.Capabilities(observes_gone=self.observes_gone),
            )
        )

    def _failed(self, order: Any, *, reason: str, ambiguous: bool, settled: bool = False) -> None:
        self.reports.append(
            facts.CreateFailed(
                sandbox=order.sandbox,
                create_id=order.create_id,
                gateway=GATEWAY,
                reason=reason,
                ambiguous=ambiguous,
                settled=settled,
            )
        )

    def _attach(self, order: orders.AttachOrder) -> None:
        thing = self.running.get(order.ref.native_id)
        self.minted += 1
        session = f"S{self.minted}"
        if thing is None or thing.ref != order.ref:
            self.reports.append(
                facts.AttachFailed(
                    sandbox=order.sandbox,
                    gateway=GATEWAY,
                    session=session,
                    ref=order.ref,
                    reason="not there",
                    observed="gone",
                )
            )
            return
        self.reports.append(
            facts.Found(
                sandbox=order.sandbox,
                gateway=GATEWAY,
                session=session,
                ref=thing.ref,
                marker=self.markers.get(thing.ref.instance),
                journal_seq=0,
                nonce_fresh=f"N{self.minted}",
                asked=order.asked,
            )
        )

    def _mark(self, order: orders.MarkOrder) -> None:
        sandbox = self.boxes.state.sandboxes[order.sandbox]
        if sandbox.ref is not None and sandbox.ref in [t.ref for t in self.running.values()]:
            self.markers[sandbox.instance] = Marker(
                order.epoch, order.session, order.nonce, sandbox.instance
            )
        self.reports.append(
            facts.Marked(
                sandbox=order.sandbox,
                gateway=GATEWAY,
                session=order.session,
                epoch=order.epoch,
                nonce=order.nonce,
                instance=sandbox.instance,
                journal_seq=0,
            )
        )

    def _stop(self, order: orders.StopOrder) -> None:
        assert order.ref is not None
        sandbox = self.boxes.state.sandboxes[order.sandbox]
        assert not sandbox.holders, "I6: a held sandbox is stopped"
        assert not sandbox.claims, "I6: a claimed sandbox is stopped"
        thing = self.running.get(order.ref.native_id)
        if thing is not None and thing.ref != order.ref:
            thing = None
        answer: Any = "accepted" if thing else "not_found"
        for fault in ("refused", "timeout", "not_found"):
            if self._strikes(fault):
                answer = fault
        if answer == "accepted" and not self._strikes("unknown_success"):
            assert thing is not None
            self.stops.append(thing.create_id)
            if self.fault == "terminating":
                thing.terminating = True
            else:
                del self.running[thing.create_id]
        self.reports.append(
            facts.StopAnswered(sandbox=order.sandbox, gateway=GATEWAY, ref=order.ref, answer=answer)
        )
        left = self.running.get(order.ref.native_id)
        if left is None or left.ref != order.ref:
            self.reports.append(facts.Gone(sandbox=order.sandbox, gateway=GATEWAY, ref=order.ref))

    def _end(self, thing: Thing) -> None:
        self.running.pop(thing.create_id, None)

    def _stop_create(self, order: orders.StopOrder) -> None:
        if self._strikes("ambiguous_create"):
            self._failed(order, reason="create_ambiguous", ambiguous=True)
            return
        self.settled.add(order.create_id)
        thing = self.running.get(order.create_id)
        if thing is None:
            self._failed(order, reason="settled", ambiguous=False, settled=True)
            return
        self._assigned(order.sandbox, order.create_id, thing.ref)
        self._stop(
            orders.StopOrder(sandbox=order.sandbox, create_id=order.create_id, ref=thing.ref)
        )

    # --- what must hold -------------------------------------------------------------------------

    def acquired(self, dag: str) -> set[str]:
        """The sandboxes that this DAG asked for, refused ones left out."""
        refused = {
            x.acquisition
            for x in self.boxes.of_kind(e.ToldEntry)
            if x.dag == dag and x.phase == "refused"
        }
        return {
            x.sandbox
            for x in self.dags.of_kind(d.Intended)
            if x.dag == dag and x.acquisition not in refused
        }

    def _judge(self, entry: Any) -> None:
        """I4, by what the provider really has at the moment of the answer."""
        if not isinstance(entry, d.Answered) or entry.verdict == "unconfirmed":
            return
        if not self.observes_gone and entry.evidence == "stop_accepted":
            return
        left = self.acquired(entry.dag) & {thing.sandbox for thing in self.running.values()}
        assert not left, f"I4: {entry.dag} was answered {entry.verdict}, {left} still run"

    def check_named(self) -> None:
        """I5: whatever runs is named by its sandbox's state, or is on its way to be."""
        for thing in self.running.values():
            sandbox = self.boxes.state.sandboxes[thing.sandbox]
            if thing.terminating and sandbox.gone:
                assert not self.observes_gone
                continue
            named = thing.create_id in sandbox.creates or sandbox.ref == thing.ref
            assert named, f"I5: {thing.create_id} runs, and nothing names it"

    # --- running --------------------------------------------------------------------------------

    def step(self, pick: Random) -> bool:
        found = self.choices()
        if not found:
            return False
        pick.choice(found)()
        return True

    def settle(self, *, faults: bool = False, rounds: int = 80, ms: int = 700) -> None:
        """Time goes on, and everything that is under way arrives."""
        fault = self.fault
        if not faults:
            self.fault = "none"
        for _ in range(rounds):
            for _ in range(400):
                found = self.choices()
                if not found:
                    break
                found[0]()
            if not (self.dags.state.busy or self.boxes.state.busy):
                break
            self.advance(ms)
        self.fault = fault

    def check_end(self) -> None:
        """I9, and the provider's set is what the ledger names; for DAGs that are all closed."""
        for dag in self.dags.state.dags.values():
            assert not dag.cancels, f"{dag.id}: a cancel was never answered"
            assert dag.closed, f"{dag.id} was never closed"
            assert not dag.acquisitions, f"{dag.id} never settled {dag.acquisitions}"
            assert not dag.held
            assert not dag.slots
        assert not self.running, self.running
        for sandbox in self.boxes.state.sandboxes.values():
            assert sandbox.gone, f"{sandbox.id} was never released"
            assert not sandbox.debtors
            assert not sandbox.untold
            assert not sandbox.told
        assert not self.dags.state.busy
        assert not self.boxes.state.busy
        settled = [x.acquisition for x in self.dags.of_kind((d.ReleaseSettled, d.Abandoned))]
        assert len(settled) == len(set(settled)), "an acquisition was settled twice"

    def verdict(self, dag: str) -> str:
        return str(self.dags.of_kind(d.Answered)[-1].verdict if dag else "")

    def answers(self, dag: str) -> list[d.Answered]:
        return [x for x in self.dags.of_kind(d.Answered) if x.dag == dag]
