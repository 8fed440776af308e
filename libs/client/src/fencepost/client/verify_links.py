"""
Holds what shards have taken of each other's messages to what was sent.

A ledger stream that was restored from an older back-up, or made anew, is unbroken, and each of its
shards folds by itself. That the others go on from what it has no more is seen between them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from fencepost.client import ledger
from fencepost.client.client import Client
from fencepost.contracts import subjects
from fencepost.contracts.messages import Seen
from fencepost.core.machine import Machine
from fencepost.runtime.outbox import MessageMaker

Taken: TypeAlias = dict[str, dict[str, Seen]]
"""By sender (`family.shard`) and by receiver's subject: the last message that was taken."""


async def read_taken(client: Client, families: Iterable[str]) -> Taken:
    """What each shard's newest batch says. Raises as `ledger.last_batch` does."""
    found: Taken = {}
    for family in families:
        for shard in range(client.shards):
            last = await ledger.last_batch(
                client.link, shard, family=family, ledgers=client.ledgers
            )
            seen = last.batch.last_seen if last is not None else {}
            for sender, each in seen.items():
                found.setdefault(sender, {})[subjects.message(family, shard)] = each
    return found


class Sender:
    """One shard's messages, of which others say that they have taken them. Give it each batch."""

    def __init__(self, machine: Machine[Any, Any], shard: int, shards: int, taken: Taken) -> None:
        self._machine = machine
        self._maker = MessageMaker(machine, shard, shards)
        self._name = f"{machine.family}.{shard}"
        self._taken = dict(taken.get(self._name, {}))
        self._sequences = {seen.seq for seen in self._taken.values()}

    def take(self, recorded: ledger.Recorded) -> None:
        if recorded.seq not in self._sequences:
            return
        entries = self._machine.decode_entries(bytes(recorded.batch.entries))
        made = self._maker.make(recorded.seq, entries, recorded.batch.now_ms)
        for index, (receiver, _) in enumerate(made):
            if self._taken.get(receiver) == Seen(recorded.seq, index):
                del self._taken[receiver]

    def unsent(self) -> Iterator[tuple[Seen, str]]:
        """After the last batch: what was taken and is not there, and how to say it."""
        for receiver, seen in self._taken.items():
            family, shard = receiver.split(".")[-2:]
            detail = (
                f"{family}.{shard} has taken a message that {self._name} did not send: was one of "
                "their ledgers restored from an older back-up, or made anew?"
            )
            yield seen, detail
