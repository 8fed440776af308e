"""
The same rate with a million entries of history as with none?

Two stacks with their sandboxes. In one, the planner is stopped, batches of finished steps in the
shape of real ones are appended to every shard, and the planner is started again: it takes its
shards over by folding all of it. Then both are measured in turns, so that what disturbs one
disturbs the other.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
from fencepost.client import ulid
from fencepost.client.ledger import log_of
from fencepost.contracts import subjects
from fencepost.contracts.messages import Batch, Sent
from fencepost.core import ids
from fencepost.core.receipts import Change, Marker, Receipt
from fencepost.core.sandbox import entries as e
from fencepost.core.steps import Compensation, StepSpec, canonical, digest_of
from fencepost.runtime.fold import decode_batch
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.ports import Valid

from bench import fencepost_bench, rig
from bench.owning import as_owner

FAMILY = "sandbox"
OWNER = "bench"
ENTRIES_PER_STEP = 2
STEPS_PER_BATCH = 64
READY_S_MAX = 900.0

_encode = msgspec.json.Encoder().encode
Say = Callable[[str], None]


async def compare(
    entries: int, in_flight: list[int], seconds: float, rounds: int, say: Say
) -> dict[str, Any]:
    """Measures with `entries` of history and with none, in turns; medians of the rounds."""
    found: dict[str, list[list[rig.Measurement]]] = {
        name: [[] for _ in in_flight] for name in ("none", "filled")
    }
    async with fencepost_bench.running() as none, fencepost_bench.running() as filled:
        began = time.perf_counter()
        count = await fill(filled, entries)
        say(f"{count} entries appended in {time.perf_counter() - began:.0f} s")
        took_s = await _restart(filled)
        say(f"taken over in {took_s:.1f} s")
        for round_ in range(rounds):
            for place, number in enumerate(in_flight):
                for name, stack in (("none", none), ("filled", filled)):
                    row = await stack.measure(number, seconds)
                    found[name][place].append(row)
                    say(
                        f"round {round_ + 1}/{rounds}, {number} in flight: {name}"
                        f" {row['steps_s']:.0f}/s (load {os.getloadavg()[0]:.1f})"
                    )
    result: dict[str, Any] = {
        name: [rig.medians(rows) for rows in places] for name, places in found.items()
    }
    result["entries"] = count
    result["takeover_s"] = round(took_s, 1)
    result["filled_to_none"] = [
        round(statistics.median(a["steps_s"] / b["steps_s"] for a, b in zip(*pair, strict=True)), 2)
        for pair in zip(found["filled"], found["none"], strict=True)
    ]
    return result


def table(result: dict[str, Any]) -> str:
    """Lays the comparison out for a person."""
    return "\n".join(
        [
            f"{result['entries']} entries of history; taken over in {result['takeover_s']} s",
            "",
            "no history",
            rig.table(result["none"]),
            "",
            "with history",
            rig.table(result["filled"]),
            "",
            f"rate with history to rate without: {result['filled_to_none']}",
        ]
    )


async def _restart(stack: fencepost_bench.Running) -> float:
    """Starts the planner again; how long its takeovers took, to the first committed steps."""
    planner = stack.stack.services["planner-1"]
    began = time.perf_counter()
    planner.start()
    await planner.ready(seconds=READY_S_MAX)
    for sandbox in stack.sandboxes:
        await stack.client.write_file(sandbox, fencepost_bench.PATH, "taken over")
    return time.perf_counter() - began


async def fill(stack: fencepost_bench.Running, entries: int) -> int:
    """Stops the planner and appends about this many entries, spread over the shards."""
    client = stack.client
    views: dict[int, list[dict[str, Any]]] = {}
    for sandbox in stack.sandboxes:
        shard = ids.shard_of(sandbox, client.shards)
        views.setdefault(shard, []).append(await client.show(sandbox))
    await stack.stack.services["planner-1"].stop()
    per_batch = STEPS_PER_BATCH * ENTRIES_PER_STEP
    batches = -(-entries // (len(views) * per_batch))
    async with as_owner(stack.stack, "planner") as link:
        await asyncio.gather(
            *(
                _fill(log_of(link, shard, client.ledgers), shard, found, batches)
                for shard, found in views.items()
            )
        )
    return batches * per_batch * len(views)


async def _fill(log: JetStreamLog, shard: int, views: list[dict[str, Any]], batches: int) -> None:
    subject = subjects.ledger(FAMILY, shard)
    last = await log.last(subject)
    assert isinstance(last, Valid), "a shard with sandboxes has a log"
    batch = decode_batch(last.payload, family=FAMILY, shard=shard)
    seq = last.seq
    writers = [_Writer(view) for view in views]
    for number in range(batches):
        now_ms = batch.now_ms + 1
        made: list[Any] = []
        for step in range(STEPS_PER_BATCH):
            made += writers[step % len(writers)].step(now_ms)
        batch = Batch(
            v=batch.v,
            id=f"{OWNER}.{shard}.{number}",
            family=FAMILY,
            shard=shard,
            term=batch.term,
            owner=OWNER,
            prev=seq,
            now_ms=now_ms,
            positions=batch.positions,
            last_seen=batch.last_seen,
            sent=Sent(events=seq, messages=seq),
            entries=msgspec.Raw(_encode(made)),
            snapshot=batch.snapshot,
        )
        seq = await log.append(subject, _encode(batch), seq)


class _Writer:
    """Makes up the steps of one sandbox."""

    def __init__(self, view: dict[str, Any]) -> None:
        self._view = view
        # Fence numbers rise; the few steps that really ran are far below.
        self._no = 1_000_000
        content = "x" * fencepost_bench.CONTENT_BYTES
        self._args = canonical({"path": fencepost_bench.PATH, "content": content})
        self._digest = digest_of(self._args)
        self._marker = Marker(
            epoch=view["epoch"],
            session=view["session"],
            nonce=ulid.mint() * 2,
            instance=view["instance"],
        )

    def step(self, now_ms: int) -> list[e.SandboxEntry]:
        """One step's two entries: fenced, then committed with its receipt."""
        self._no += 1
        step, sandbox, marker = ulid.mint(), str(self._view["sandbox"]), self._marker
        attempt = ids.attempt_id(step, 1)
        spec = StepSpec(
            tool="write_file",
            args=msgspec.Raw(self._args),
            digest=self._digest,
            compensation=Compensation(kind="pre_image"),
            attempts_max=5,
            deadline_at_ms=now_ms + 300_000,
        )
        receipt = Receipt(
            sandbox=sandbox,
            step=step,
            attempt=attempt,
            direction="apply",
            no=self._no,
            verdict="applied",
            epoch=marker.epoch,
            session=marker.session,
            nonce=marker.nonce,
            instance=marker.instance,
            after=marker,
            tool=spec.tool,
            digest=spec.digest,
            # The real disk has none of these steps: its journal must not seem to have gone back.
            journal_seq=0,
            outcome="ok",
            changes=[Change(fencepost_bench.PATH, self._digest, self._digest)],
        )
        return [
            e.Fenced(
                sandbox=sandbox,
                step=step,
                attempt=attempt,
                ordinal=1,
                no=self._no,
                epoch=marker.epoch,
                session=marker.session,
                spec=spec,
            ),
            e.Committed(
                sandbox=sandbox,
                step=step,
                attempt=attempt,
                receipt=receipt,
                gateway=str(self._view["gateway"]),
            ),
        ]
