"""I8 over the accepted batches of one family, and the audit of a recorded ledger beside it."""

from __future__ import annotations

from typing import Any

import msgspec
from fencepost.contracts.messages import HASH, Batch
from fencepost.core import invariants
from fencepost.core.machine import Place
from fencepost.simulator.auditor import Auditor, BatchJson, SandboxView
from fencepost.simulator.checking import Checker
from fencepost.simulator.ledger import Stored

COMPARE_EVERY = 8

assert HASH == "fnv1a32"


class LedgerUnbroken(Checker):
    """
    I8: unbroken batches, rising terms and epochs, positions that never go back, one fold.

    One for each family.
    """

    invariant = "I8"
    promises = "the ledger is unbroken, and every state equals its fold"

    def __init__(self, auditor: Auditor, machine: Any, shards: int) -> None:
        super().__init__(auditor)
        self.family: str = machine.family
        self._machine = machine
        self._states = [machine.initial(shard, shards) for shard in range(shards)]
        self._heads = [0] * shards
        self._terms = [0] * shards
        self._now_ms = [0] * shards
        self._positions: list[dict[str, int]] = [{} for _ in range(shards)]
        self._shards = [invariants.ShardAuditor(self.family, shard) for shard in range(shards)]
        self._accepted = 0
        self._decoder = msgspec.json.Decoder(Batch)
        auditor.on_batch.append(self.batch)
        auditor.on_accepted.append(self.accepted)
        auditor.on_owned.append(self.compare)
        if self.family == "sandbox":
            auditor.on_entry.setdefault("epoch_opened", []).append(self.epoch_opened)
            auditor.on_entry.setdefault("fenced", []).append(self.fenced)

    def batch(self, family: str, shard: int, stored: Stored, batch: BatchJson) -> None:
        if family != self.family:
            return
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
        if hold.machine.family != self.family:
            return
        if hold.head == self._heads[hold.shard]:
            taken = {name: position.seq for name, position in hold.positions.items()}
            recorded = self._positions[hold.shard]
            self.need(taken == recorded, f"inputs are taken to {taken}, recorded to {recorded}")
        self._accepted += 1
        if self._accepted % COMPARE_EVERY == 0:
            self.compare(hold)

    def compare(self, hold: Any) -> None:
        """The owner's state, however it came to be, equals the fold of every entry."""
        if hold.machine.family != self.family or hold.head != self._heads[hold.shard]:
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
