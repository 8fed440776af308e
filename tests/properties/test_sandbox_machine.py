"""Random commands, receipts, facts, faults and restarts against the invariants and the auditor."""

from __future__ import annotations

from typing import Any

import msgspec
from fencepost.core import limits
from fencepost.core.machine import Place
from fencepost.core.receipts import Receipt
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import inputs, orders
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.core.sandbox.state import Sandbox, Step
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.factories import UNDO, body
from tests.properties.world import Disk, World

SANDBOXES = ("sa", "sb")
GATEWAYS = ("gw1", "gw2")
STEPS = tuple(f"s{n}" for n in range(6))
sandboxes = st.sampled_from(SANDBOXES)
steps = st.sampled_from(STEPS)
gateways = st.sampled_from(GATEWAYS)
picks = st.integers(0, 1000)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.bench = self.world.bench
        self.audited = 0

    @initialize()
    def begin(self) -> None:
        for gateway in GATEWAYS:
            self.bench.see_gateway(gateway)
        self.bench.create(SANDBOXES[0])
        self.bench.create(SANDBOXES[1], checkpoint_every_steps=2)
        self.go_on(3)

    # --- clients ------------------------------------------------------------------------------

    @rule(
        sandbox=sandboxes,
        step=steps,
        effect=st.sampled_from(["workspace", "external"]),
        tool=st.sampled_from(["write_file", "run_command"]),
        policy=st.sampled_from(["retry", "reject"]),
        attempts=st.sampled_from([None, 1, 2]),
        deadline_ms=st.sampled_from([None, 500, 10_000]),
        content=st.sampled_from(["x", "y"]),
        commit_after=st.sampled_from(["receipt", "receipt", "heartbeat", "checkpoint"]),
    )
    def send(self, sandbox: str, step: str, effect: str, tool: str, **over: Any) -> None:
        args = {"path": "a", "content": over["content"]}
        command = body(tool, args) if tool == "write_file" else body(tool, {"argv": ["a"]})
        command |= {"effect": effect, "on_moved_epoch": over["policy"]}
        if effect == "workspace":
            command["commit_after"] = over["commit_after"]
        if tool == "run_command":
            command["compensation"] = UNDO
        for name, key in (("attempts_max", "attempts"), ("deadline_ms", "deadline_ms")):
            if over[key] is not None:
                command[name] = over[key]
        self.bench.step(step, command, sandbox)

    @rule(sandbox=sandboxes, checkpoint=st.sampled_from(["k1", "k2", "k3"]))
    def ask_for_a_checkpoint(self, sandbox: str, checkpoint: str) -> None:
        self.bench.command("checkpoint", checkpoint, {}, sandbox)

    @rule(sandbox=sandboxes, decision=st.sampled_from(["accept", "tell", "discard"]))
    def decide_on_a_recovery(self, sandbox: str, decision: str) -> None:
        self.bench.command("recover", "r1", {"decision": decision, "who": "me"}, sandbox)

    @rule(sandbox=sandboxes, step=steps)
    def cancel(self, sandbox: str, step: str) -> None:
        self.bench.cancel(step, sandbox=sandbox)

    @rule(sandbox=sandboxes, step=steps, as_=st.sampled_from(["committed", "compensated"]))
    def resolve(self, sandbox: str, step: str, as_: str) -> None:
        self.bench.command("resolve", step, {"as": as_, "who": "me", "note": ""}, sandbox)

    @rule(sandbox=sandboxes, often=st.integers(0, 9))
    def release(self, sandbox: str, often: int) -> None:
        if often == 0:
            self.bench.command("release", "r", {}, sandbox)

    @rule(
        data=st.binary(max_size=40), kind=st.sampled_from(["step", "cancel", "create", "resolve"])
    )
    def send_nonsense(self, data: bytes, kind: str) -> None:
        assert all(type(entry) is e.Refused for entry in self.bench.command(kind, "s1", data, "sa"))

    # --- gateways -----------------------------------------------------------------------------

    @rule(pick=picks, keep=st.booleans())
    def carry_out(self, pick: int, keep: bool) -> None:
        """One owed order is carried out; its report is delivered, or stays under way."""
        owed = self.bench.effects()
        if owed:
            effect = owed[pick % len(owed)]
            self._report(self.world.carry_out(effect.order, effect.target), keep=keep)

    @rule(rounds=st.integers(1, 4))
    def go_on(self, rounds: int) -> None:
        """Everything that is owed is carried out, and what that leads to."""
        for _ in range(rounds):
            for effect in self.bench.effects():
                self._report(self.world.carry_out(effect.order, effect.target), keep=False)
            self.bench.tick(20)
            self.bench.recall()

    @rule(
        sandbox=sandboxes,
        count=st.integers(1, 3),
        rounds=st.integers(0, 3),
        commit_after=st.sampled_from(["receipt", "heartbeat", "checkpoint"]),
    )
    def work(self, sandbox: str, count: int, rounds: int, commit_after: str) -> None:
        """An ordinary session: steps that nobody has sent before."""
        for _ in range(count):
            self.bench.step(self.world.mint("w"), sandbox=sandbox, commit_after=commit_after)
        self.go_on(rounds)

    @rule(sandbox=sandboxes, rounds=st.integers(0, 6))
    def reclaim(self, sandbox: str, rounds: int) -> None:
        """The disk goes, without a word; how far the next generation comes is drawn."""
        known = self.bench.sandbox(sandbox)
        if known.ref is not None and known.ref.native_id in self.world.disks:
            del self.world.disks[known.ref.native_id]
        if known.session:
            self.bench.lost(sandbox)
        self.go_on(rounds)

    @rule(pick=picks)
    def carry_out_an_old_order(self, pick: int) -> None:
        """A dispatch that was only late (S-203), or any other order, long after it was owed."""
        if self.bench.owed:
            effect = self.bench.owed[pick % len(self.bench.owed)]
            if not isinstance(effect.order, orders.CreateOrder):
                self._report(self.world.carry_out(effect.order, effect.target), keep=True)

    @rule(pick=picks, again=st.booleans())
    def deliver(self, pick: int, again: bool) -> None:
        pending = self.world.pending
        if pending:
            report = pending[pick % len(pending)] if again else pending.pop(pick % len(pending))
            self._deliver(report)

    @rule()
    def recall(self) -> None:
        self.bench.recall()

    @rule()
    def fail_the_next_restore(self) -> None:
        self.world.fail_restore = True

    @rule(gateway=gateways)
    def see(self, gateway: str) -> None:
        self.bench.see_gateway(gateway)

    @rule(sandbox=sandboxes)
    def beat(self, sandbox: str) -> None:
        if self.world.beats(sandbox):
            self.bench.beat(sandbox)

    @rule(
        sandbox=sandboxes,
        pick=picks,
        change=st.sampled_from(
            [
                {"epoch": 0},
                {"epoch": 99},
                {"session": "S0"},
                {"nonce": "N0"},
                {"instance": "i0"},
                {"no": 0},
                {"digest": ""},
                {"tool": "stat"},
                {"attempt": "s0.0"},
                {"direction": "undo"},
                {"outcome": ""},
                {"sandbox": "sc"},
            ]
        ),
    )
    def corrupt(self, sandbox: str, pick: int, change: dict[str, Any]) -> None:
        """A receipt of an open step in which one thing is wrong commits nothing."""
        known = self.bench.sandbox(sandbox)
        if not known.fenced or not known.live:
            return
        name = list(known.fenced)[pick % len(known.fenced)]
        right = self.bench.receipt(name, sandbox)
        wrong = msgspec.structs.replace(right, **{"verdict": "applied", "outcome": "ok", **change})
        if wrong.direction == "undo" and known.steps[name].phase == "undo":
            return
        entries = self.bench.receive(wrong, sandbox)
        assert all(type(entry) is e.ReceiptRefused for entry in entries), entries

    # --- bad luck -----------------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 100, 700, 3_000, 7_000, 40_000]))
    def wait(self, ms: int) -> None:
        self.bench.tick(ms)

    @rule()
    def change_owner(self) -> None:
        self.bench.restart()

    def _disk(self, pick: int) -> str | None:
        names = sorted(self.world.disks)
        return names[pick % len(names)] if names else None

    @rule(pick=picks)
    def lose_disk(self, pick: int) -> None:
        name = self._disk(pick)
        if name:
            del self.world.disks[name]

    @rule(pick=picks)
    def replace_disk(self, pick: int) -> None:
        name = self._disk(pick)
        if name:
            self.world.replace_disk(name)

    @rule(pick=picks)
    def snapshot(self, pick: int) -> None:
        name = self._disk(pick)
        if name:
            self.world.snapshot(name)

    @rule(pick=picks)
    def restore(self, pick: int) -> None:
        name = self._disk(pick)
        if name and name in self.world.snapshots:
            self.world.restore(name)

    @rule()
    def break_the_next_command(self) -> None:
        self.world.break_next = True

    @rule(sandbox=sandboxes)
    def lose_session(self, sandbox: str) -> None:
        if self.bench.sandbox(sandbox).session:
            self.bench.lost(sandbox)

    # --- delivery -----------------------------------------------------------------------------

    def _report(self, reports: list[Any], *, keep: bool) -> None:
        self.world.pending += reports
        if len(self.world.pending) > 50:
            del self.world.pending[:10]
        if not keep:
            for report in reports:
                self._deliver(report)

    def _deliver(self, report: Any) -> None:
        if not isinstance(report, tuple):
            self.bench.take(report)
            return
        gateway, sandbox, said = report
        assert isinstance(said, Receipt)
        for entry in self.bench.take(
            inputs.ReceiptReceived(sandbox=sandbox, gateway=gateway, mac_ok=True, receipt=said)
        ):
            if type(entry) is e.Committed:
                self._check_commit(sandbox, entry)

    def _check_commit(self, sandbox: str, entry: e.Committed) -> None:
        """I2: where the disk of that generation is still there, the effect is on it."""
        for disk in self.world.disks.values():
            if (disk.nonce, disk.instance) == (entry.receipt.nonce, entry.receipt.instance):
                there = disk.applied.get(entry.step, 0)
                restored = disk.seq < entry.receipt.journal_seq
                assert there == 1 or restored, (entry, disk)

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def external_effects_happen_at_most_once(self) -> None:
        assert all(0 <= times <= 1 for times in self.world.external.values()), self.world.external

    @invariant()
    def a_disk_holds_an_effect_at_most_once(self) -> None:
        for disk in self.world.disks.values():
            assert all(0 <= times <= 1 for times in disk.applied.values()), disk

    @invariant()
    def the_collections_of_a_sandbox_agree(self) -> None:
        state = self.bench.state
        assert state.open_steps == sum(len(s.steps) for s in state.sandboxes.values())
        for sandbox in state.sandboxes.values():
            phases = ("apply", "joined", "revoke", "undo")
            assert set(sandbox.fenced) == {n for n, s in sandbox.steps.items() if s.phase in phases}
            joined = {n for n, s in sandbox.steps.items() if s.phase == "joined"}
            assert set(sandbox.joined) == joined
            assert all((s.receipt is not None) == (n in joined) for n, s in sandbox.steps.items())
            waiting = {n for n, s in sandbox.steps.items() if s.phase == "parked"}
            assert set(sandbox.parked) | set(sandbox.requeued) == waiting
            assert not set(sandbox.parked) & set(sandbox.requeued)
            assert len(sandbox.fenced) <= limits.OPEN_STEPS_PER_SANDBOX_MAX
            assert not set(sandbox.steps) & set(sandbox.finished)

    @invariant()
    def every_open_step_is_owed_something_or_has_a_reason_to_wait(self) -> None:
        dispatched = {
            (f.order.fence.sandbox, f.order.step)
            for f in self.bench.effects()
            if isinstance(f.order, orders.Dispatch)
        }
        for sandbox in self.bench.state.sandboxes.values():
            for name, step in sandbox.steps.items():
                assert (sandbox.id, name) in dispatched or self._waits(sandbox, name, step), name

    def _waits(self, sandbox: Sandbox, name: str, step: Step) -> bool:
        if step.phase == "indeterminate":
            return True
        unsettled = sandbox.id in self.bench.hints.unsettled or not self.bench.hints.synced
        if step.phase == "parked":
            full = len(sandbox.fenced) >= limits.OPEN_STEPS_PER_SANDBOX_MAX
            return not sandbox.fences or full or unsettled
        if step.phase == "joined":
            return True  # for a heartbeat, or a checkpoint
        stale = (step.epoch, step.session) != (sandbox.epoch, sandbox.session)
        if stale and sandbox.recovering is not None:
            return True
        return not sandbox.open or sandbox.session == "" or (stale and unsettled)

    @invariant()
    def what_an_entry_owed_is_owed_still_until_it_is_answered(self) -> None:
        keys = {f.key: f for f in self.bench.effects()}
        for effect in self.bench.owed[-5:]:
            order = effect.order
            if isinstance(order, orders.Dispatch):
                known = self.bench.state.sandboxes[order.fence.sandbox]
                step = known.steps.get(order.step)
                current = step is not None and step.no == order.fence.no and known.open
                if current and known.session == order.fence.session and step is not None:
                    if step.phase in ("apply", "revoke", "undo"):
                        assert keys[effect.key].order == order

    # --- at the end -----------------------------------------------------------------------------

    def teardown(self) -> None:
        if not self.bench.state.sandboxes:
            return
        self._check_fold()
        self._check_liveness()
        found = self.bench.auditor.finish()
        assert not found, found
        self._check_fold()

    def _check_fold(self) -> None:
        """I8: the state is the fold of the log, nothing else."""
        machine = SandboxMachine()
        state = machine.initial(0, 1)
        for seq, now_ms, entries in self.bench.batches:
            for index, entry in enumerate(entries):
                machine.evolve(state, entry, Place(seq - 1, index), now_ms)
        assert machine.encode_state(state) == machine.encode_state(self.bench.state)

    def _check_liveness(self) -> None:
        """I9: once faults stop and everything is answered, every step ends or is indeterminate."""
        self.world.break_next = False
        for name in SANDBOXES:
            if self.bench.sandbox(name).session:
                self.bench.lost(name)  # so that every disk is looked at once more
        for _ in range(120):
            for gateway in GATEWAYS:
                self.bench.see_gateway(gateway)
            for name in SANDBOXES:
                self.beat(name)
                if self.world.beats(name):
                    self._beat_with_what_it_has(name)
            self.bench.recall()
            for effect in self.bench.effects():
                self._report(self.world.carry_out(effect.order, effect.target), keep=False)
            self.bench.tick(700)
            if not self._open():
                break
            self._decide_what_stopped()
        assert not self._open(), self._open()
        for sandbox in self.bench.state.sandboxes.values():
            assert sandbox.gone or not sandbox.releasing, "a release is outstanding"
            self._check_ends(sandbox)

    def _beat_with_what_it_has(self, sandbox: str) -> None:
        known = self.bench.sandbox(sandbox)
        disk = self.world.disks[known.ref.native_id] if known.ref is not None else None
        if disk is not None:
            self.bench.beat(sandbox, journal_seq=disk.seq)

    def _decide_what_stopped(self) -> None:
        for sandbox in self.bench.state.sandboxes.values():
            if sandbox.recovering is not None and sandbox.recovering.phase == "stopped":
                command = {"decision": "tell", "who": "me"}
                self.bench.command("recover", "r9", command, sandbox.id)

    def _open(self) -> list[Any]:
        return [
            (sandbox.id, name, step.phase, step.reason)
            for sandbox in self.bench.state.sandboxes.values()
            for name, step in sandbox.steps.items()
            if step.phase != "indeterminate"
        ] + [
            (sandbox.id, sandbox.recovering, sandbox.checkpointing)
            for sandbox in self.bench.state.sandboxes.values()
            if not sandbox.gone and not sandbox.fences
        ]

    def _check_ends(self, sandbox: Sandbox) -> None:
        """What is called compensated is not there: not on the live disk, not in the world."""
        resolved = {
            entry.step for entry in self.bench.of_kind(e.Resolved) if entry.sandbox == sandbox.id
        }
        disk = self.world.disks.get(sandbox.ref.native_id) if sandbox.ref else None
        for name, finished in sandbox.finished.items():
            if finished.state == "compensated" and name not in resolved:
                assert not self.world.external.get((sandbox.id, name)), (sandbox.id, name)
                if disk is not None and disk.nonce == sandbox.nonce:
                    assert not disk.applied.get(name), (sandbox.id, name)
        if disk is not None and disk.nonce == sandbox.nonce and sandbox.whole:
            self._check_whole(sandbox, disk)

    def _check_whole(self, sandbox: Sandbox, disk: Disk) -> None:
        """I2: the disk of a whole generation holds what was committed, but for what was told."""
        told = {
            named.step
            for entry in self.bench.of_kind(e.OwedTold)
            if entry.sandbox == sandbox.id
            for named in entry.steps
        }
        lost = any(
            entry.lost or entry.mode == "accepted"
            for entry in self.bench.of_kind(e.Recovered)
            if entry.sandbox == sandbox.id
        )
        accepted = any(
            entry.accepted
            for entry in self.bench.of_kind(e.Replayed)
            if entry.sandbox == sandbox.id
        )
        for entry in self.bench.of_kind(e.Committed):
            if entry.sandbox == sandbox.id and not lost and not accepted and entry.step not in told:
                external = (sandbox.id, entry.step) in self.world.external
                assert external or disk.applied.get(entry.step) == 1, (sandbox.id, entry.step)


Machine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSandboxMachine = Machine.TestCase
