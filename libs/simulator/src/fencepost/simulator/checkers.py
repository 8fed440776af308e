"""
The guarantees, one class each. A checker judges at the very moment at which something happens.

`checks` counts how often it judged, for the coverage table. Whatever it finds goes to the world as
a violation, and the run ends there.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from fencepost.contracts.messages import HASH, Batch
from fencepost.core import invariants
from fencepost.core.machine import Place
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.simulator.auditor import Auditor, BatchJson, SandboxView
from fencepost.simulator.ledger import Stored
from fencepost.simulator.provider import Instance
from fencepost.simulator.toolhost import Toolhost

COMPARE_EVERY = 8


class Checker:
    invariant: ClassVar[str] = ""
    promises: ClassVar[str] = ""

    def __init__(self, auditor: Auditor) -> None:
        self.auditor = auditor
        self.world = auditor.world
        self.checks = 0

    def need(self, holds: bool, detail: str) -> None:
        self.checks += 1
        if not holds:
            self.world.violate(self.invariant, detail)


class CommitJoins(Checker):
    """I1: the receipt is of the current, open epoch and session, in the state it extends."""

    invariant = "I1"
    promises = "a committed step has exactly one receipt, of the live epoch and session"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_entry.setdefault("committed", []).append(self.committed)

    def committed(self, view: SandboxView, entry: dict[str, Any]) -> None:
        name, receipt = entry["step"], entry["receipt"]
        step = view.steps.get(name)
        if step is None:
            self.need(False, f"{name} is committed and was never fenced")
            return
        marker = receipt["after"]
        epochs = (receipt["epoch"], marker["epoch"], step.epoch)
        sessions = (receipt["session"], marker["session"], step.session)
        self.need(step.state == "fenced", f"{name} is committed while {step.state}")
        self.need(step.direction == "apply", f"{name} is committed while {step.direction}")
        self.need(view.open, f"{name} is committed on a closed epoch {view.epoch}")
        self.need(
            all(type(e) is int and e == view.epoch for e in epochs),
            f"{name}: epochs {epochs}, the live one is {view.epoch}",
        )
        self.need(
            bool(view.session) and all(s == view.session for s in sessions),
            f"{name}: sessions {sessions}, the live one is {view.session!r}",
        )
        self.need(
            receipt["nonce"] == view.nonce == marker["nonce"],
            f"{name}: nonce {receipt['nonce']}, the live one is {view.nonce}",
        )
        self.need(
            receipt["instance"] == view.instance == marker["instance"],
            f"{name}: instance {receipt['instance']}, the live one is {view.instance}",
        )
        self.need(entry["gateway"] == view.gateway, f"{name}: stamped by {entry['gateway']}")
        self.need(
            (receipt["attempt"], receipt["no"], receipt["digest"])
            == (step.attempt, step.no, step.digest)
            and entry["attempt"] == step.attempt,
            f"{name}: the receipt is of another fence than {step.attempt} no {step.no}",
        )
        self.need(
            receipt["verdict"] in ("applied", "attested")
            and receipt.get("outcome") in ("ok", "failed"),
            f"{name}: verdict {receipt['verdict']}",
        )


class CommitIsOnDisk(Checker):
    """I2: the write was there when the receipt was made, and what is lost is owed."""

    invariant = "I2"
    promises = "a committed write was on the disk of its epoch; a lost one is owed"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_entry.setdefault("committed", []).append(self.committed)
        auditor.on_entry.setdefault("epoch_opened", []).append(self.epoch_opened)
        auditor.on_entry.setdefault("attached", []).append(self.attached)

    def committed(self, view: SandboxView, entry: dict[str, Any]) -> None:
        receipt = entry["receipt"]
        made = self.auditor.receipts.get((view.name, receipt["attempt"], receipt["no"]))
        if made is None:
            self.need(False, f"{entry['step']} is committed by a receipt that no disk gave")
            return
        self.need(made.held > 0, f"{entry['step']} is committed and its effect was not there")
        self.need(
            made.epoch_on_disk == receipt["epoch"],
            f"{entry['step']}: the disk was at epoch {made.epoch_on_disk}",
        )

    def epoch_opened(self, view: SandboxView, entry: dict[str, Any]) -> None:
        if entry["disk"] == "warm":
            return
        owed = entry.get("owed", 0)
        self.need(
            owed >= len(view.committed),
            f"{view.name} opens a {entry['disk']} epoch {entry['epoch']} that owes {owed}, "
            f"{len(view.committed)} steps are committed",
        )
        view.excused = dict(view.committed)

    def attached(self, view: SandboxView, entry: dict[str, Any]) -> None:
        held = self.auditor.marked_with.get(entry["session"])
        if held is None:
            self.need(False, f"{view.name} is attached in {entry['session']}, never marked")
            return
        for name in view.committed:
            if name not in view.excused:
                self.need(
                    held.get(name, 0) > 0,
                    f"{view.name}: epoch {view.epoch} silently lacks the committed {name}",
                )


class EffectsOnce(Checker):
    """I3: at most once per disk, external ones at most once in all, and none after the end."""

    invariant = "I3"
    promises = "an effect is applied at most once, and never after its step ended"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_wrote.append(self.wrote)
        auditor.on_acted.append(self.acted)
        auditor.on_entry.setdefault("compensated", []).append(self.compensated)

    def wrote(self, toolhost: Toolhost, step: str) -> None:
        held = toolhost.contents.held.get(step, 0)
        self.need(0 <= held <= 1, f"{step} is {held} times on {toolhost.disk.name}")
        view = self.auditor.sandbox_of_step.get(step)
        if held == 0 or view is None or toolhost.disk.pulled:
            return
        ended = view.steps[step]
        marker = toolhost.contents.marker
        if marker is not None and marker.epoch == view.epoch and view.open:
            self.need(
                ended.state not in ("compensated", "refused"),
                f"{step} is applied after it ended as {ended.state}",
            )

    def acted(self, step: str) -> None:
        count = self.auditor.outside.done[step]
        self.need(count == 1, f"the external {step} took effect {count} times")
        view = self.auditor.sandbox_of_step.get(step)
        if view is not None:
            ended = view.steps[step].state
            self.need(ended != "compensated", f"the external {step} acts after it ended")

    def compensated(self, view: SandboxView, entry: dict[str, Any]) -> None:
        name, evidence = entry["step"], entry["evidence"]
        if not entry["final"]:
            return
        step = view.steps[name]
        self.need(not step.is_final, f"{name} ends twice")
        if step.effect == "external":
            outside = self.auditor.outside
            if evidence == "undone":
                taken_back = outside.undone.get(name, 0) or not outside.done.get(name, 0)
                self.need(bool(taken_back), f"the external {name} is called undone and is not")
            else:
                self.need(
                    not outside.done.get(name, 0), f"the external {name} is called {evidence}"
                )
            return
        held = self.auditor.held_now(view, name, lost=evidence == "lost_with_epoch")
        self.need(held == 0, f"{name} is called {evidence} and is {held} times on the disk")


class AllNamed(Checker):
    """I5: whatever runs is named by the ledger."""

    invariant = "I5"
    promises = "every running sandbox is named by the ledger at every instant"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_started.append(self.started)
        for kind in ("created", "rebuild_intended", "assigned", "create_failed", "gone"):
            auditor.after_entry.setdefault(kind, []).append(self.changed)

    def started(self, instance: Instance) -> None:
        view = self.auditor.sandboxes.get(instance.sandbox)
        self.need(
            view is not None and not view.gone and instance.create_id in view.creates,
            f"{instance.name} starts for {instance.create_id}, which no ledger names",
        )

    def changed(self, view: SandboxView, entry: dict[str, Any]) -> None:
        for instance in self.auditor.running(view):
            self.need(
                instance.native_id == view.native_id or instance.create_id in view.creates,
                f"{instance.name} of {view.name} runs, unnamed after {entry['kind']}",
            )


class HeldNotStopped(Checker):
    """I6: what is held or claimed is not stopped; a condemned instance is replaced."""

    invariant = "I6"
    promises = "no sandbox with a live holder or a claim is stopped"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_stop.append(self.stopping)
        auditor.on_entry.setdefault("releasing", []).append(self.releasing)

    def stopping(self, instance: Instance) -> None:
        view = self.auditor.sandboxes.get(instance.sandbox)
        allowed = view is not None and (view.releasing or view.condemned)
        self.need(allowed, f"{instance.name} is stopped while {instance.sandbox} is held")

    def releasing(self, view: SandboxView, entry: dict[str, Any]) -> None:
        del entry
        self.need(not view.keepers, f"{view.name} is released while kept by {list(view.keepers)}")


class UnknownStaysUnknown(Checker):
    """I7: what the ledger calls gone was gone."""

    invariant = "I7"
    promises = "unknown never becomes absent: what is called gone is gone"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_entry.setdefault("gone", []).append(self.gone)
        auditor.on_entry.setdefault("epoch_closed", []).append(self.epoch_closed)
        auditor.on_entry.setdefault("compensated", []).append(self.compensated)

    def _is_gone(self, instance_name: str) -> bool:
        assert self.auditor.provider is not None
        native_id = instance_name.partition(".")[0]
        instance = self.auditor.provider.instances.get(native_id)
        return instance is None or instance.state == "gone"

    def gone(self, view: SandboxView, entry: dict[str, Any]) -> None:
        if entry["instance"]:
            self.need(self._is_gone(entry["instance"]), f"{entry['instance']} is called gone")
        else:
            self.need(not self.auditor.running(view), f"{view.name} is called never created")

    def epoch_closed(self, view: SandboxView, entry: dict[str, Any]) -> None:
        if entry["reason"] == "disk_gone":
            self.need(self._is_gone(view.instance), f"the disk of {view.name} is called gone")

    def compensated(self, view: SandboxView, entry: dict[str, Any]) -> None:
        if entry["evidence"] == "lost_with_epoch":
            held = self.auditor.held_now(view, entry["step"], lost=True)
            self.need(held == 0, f"{entry['step']} is called lost and is on the disk")


class LedgerUnbroken(Checker):
    """I8: unbroken batches, rising terms and epochs, positions that never go back, one fold."""

    invariant = "I8"
    promises = "the ledger is unbroken, and every state equals its fold"

    def __init__(self, auditor: Auditor, machine: SandboxMachine, shards: int) -> None:
        super().__init__(auditor)
        self._machine = machine
        self._states = [machine.initial(shard, shards) for shard in range(shards)]
        self._heads = [0] * shards
        self._terms = [0] * shards
        self._now_ms = [0] * shards
        self._positions: list[dict[str, int]] = [{} for _ in range(shards)]
        self._shards = [invariants.ShardAuditor("sandbox", shard) for shard in range(shards)]
        self._accepted = 0
        self._decoder = msgspec.json.Decoder(Batch)
        auditor.on_batch.append(self.batch)
        auditor.on_accepted.append(self.accepted)
        auditor.on_owned.append(self.compare)
        auditor.on_entry.setdefault("epoch_opened", []).append(self.epoch_opened)
        auditor.on_entry.setdefault("fenced", []).append(self.fenced)

    def batch(self, shard: int, stored: Stored, batch: BatchJson) -> None:
        self.need(
            batch.prev == self._heads[shard],
            f"the batch at {stored.seq} was decided on {batch.prev}, the head is "
            f"{self._heads[shard]}",
        )
        opened = bool(batch.entries) and batch.entries[0]["kind"] == "term_opened"
        want = self._terms[shard] + 1 if opened else self._terms[shard]
        self.need(
            batch.term == want, f"a batch of term {batch.term} at {stored.seq}, expected {want}"
        )
        self.need(batch.now_ms >= self._now_ms[shard], "the ledger's time goes back")
        for name, seq in self._positions[shard].items():
            now = batch.positions.get(name, {}).get("seq", 0)
            self.need(now >= seq, f"the position of {name} goes back from {seq} to {now}")
        self._heads[shard] = stored.seq
        self._terms[shard] = batch.term
        self._now_ms[shard] = batch.now_ms
        self._positions[shard] = {name: p["seq"] for name, p in batch.positions.items()}
        self._fold(shard, stored)

    def recorded(self, shard: int, name: str) -> int:
        return self._positions[shard].get(name, 0)

    def _fold(self, shard: int, stored: Stored) -> None:
        batch = self._decoder.decode(stored.payload)
        entries = self._machine.decode_entries(bytes(batch.entries))
        for index, entry in enumerate(entries):
            self._machine.evolve(self._states[shard], entry, Place(batch.prev, index), batch.now_ms)
        found = self._shards[shard].take(
            seq=stored.seq,
            prev=batch.prev,
            term=batch.term,
            owner=batch.owner,
            now_ms=batch.now_ms,
            entries=entries,
        )
        self.checks += 1
        for violation in found:
            self.world.violate(violation.invariant, f"recorded ledger: {violation.detail}")

    def accepted(self, hold: Any) -> None:
        if hold.head == self._heads[hold.shard]:
            taken = {name: position.seq for name, position in hold.positions.items()}
            recorded = self._positions[hold.shard]
            self.need(taken == recorded, f"inputs are taken to {taken}, recorded to {recorded}")
        self._accepted += 1
        if self._accepted % COMPARE_EVERY == 0:
            self.compare(hold)

    def compare(self, hold: Any) -> None:
        """The owner's state, however it came to be, equals the fold of every entry."""
        if hold.head != self._heads[hold.shard]:
            return  # its answer came late: the log has gone on
        mine = self._machine.encode_state(self._states[hold.shard])
        theirs = self._machine.encode_state(hold.state)
        self.need(mine == theirs, f"{hold.planner.name}'s state of {hold.shard} is not the fold")

    def finish(self) -> None:
        for shard in self._shards:
            self.checks += 1
            for violation in shard.finish():
                self.world.violate(violation.invariant, f"recorded ledger: {violation.detail}")

    def epoch_opened(self, view: SandboxView, entry: dict[str, Any]) -> None:
        self.need(
            entry["epoch"] == view.epoch + 1 and not view.open,
            f"{view.name}: epoch {entry['epoch']} opens after {view.epoch}",
        )

    def fenced(self, view: SandboxView, entry: dict[str, Any]) -> None:
        self.need(
            entry["no"] >= view.next_no,
            f"{view.name}: fence {entry['no']} after {view.next_no - 1}",
        )


class AllSettles(Checker):
    """I9: once faults stop, everything ends, or says what it waits for."""

    invariant = "I9"
    promises = "once faults stop every step ends, and what is released goes"

    def judge(self, waiting: list[str]) -> None:
        self.need(not waiting, "still waiting for: " + "; ".join(waiting[:6]))


class NothingBlocks(Checker):
    """I10: a tick that is due always ends, and no step waits for ever behind another."""

    invariant = "I10"
    promises = "a queue never blocks itself"

    def judge(self, parked: list[str]) -> None:
        self.need(not parked, "parked on a live sandbox with room: " + ", ".join(parked[:6]))


ALL: tuple[type[Checker], ...] = (
    CommitJoins,
    CommitIsOnDisk,
    EffectsOnce,
    AllNamed,
    HeldNotStopped,
    UnknownStaysUnknown,
    LedgerUnbroken,
    AllSettles,
    NothingBlocks,
)

assert HASH == "fnv1a32"
