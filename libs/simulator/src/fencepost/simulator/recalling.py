"""What a sandbox shard's owner reads in its own log: the steps that recovering sandboxes owe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fencepost.contracts.messages import Batch
from fencepost.core import limits
from fencepost.core.machine import Place
from fencepost.core.sandbox import inputs, owed

if TYPE_CHECKING:
    from fencepost.simulator.owner import Hold

_BATCH = msgspec.json.Decoder(Batch)


def recall(hold: Hold) -> list[Any]:
    """What the machine waits for, read up to the accepted head. Nothing for another family."""
    if hold.machine.family != "sandbox":
        return []
    return [_next(hold, want) for want in hold.machine.wanted(hold.state)]


def _next(hold: Hold, want: owed.Wanted) -> Any:
    entries = _entries(hold, want.after)
    found = owed.OwedList(want.sandbox, want.checkpoint)
    for place, entry in entries.items():
        found.take(entry, place)
    following = found.after(want.key)
    if not following:
        return inputs.OwedEnd(sandbox=want.sandbox, epoch=want.epoch)
    if want.tell:
        return owed.page_of(want, following[: limits.OWED_PAGE])
    one = following[0]
    return owed.step_of(want, one, entries[one.spec_at], found.accepted)


def _entries(hold: Hold, after: int) -> dict[Place, Any]:
    found: dict[Place, Any] = {}
    for stored in hold.log.batches[hold.shard]:
        if after < stored.seq <= hold.head:
            batch = _BATCH.decode(stored.payload)
            for index, entry in enumerate(hold.machine.decode_entries(bytes(batch.entries))):
                found[Place(batch.prev, index)] = entry
    return found
