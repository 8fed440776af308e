"""
A workspace as it was at a committed step, brought back into a new sandbox.

`Past` folds the origin's entries and says what the workspace held, and from which checkpoint with
which steps it is made again; it only computes. `fork` does it: the newest checkpoint that holds
nothing later is restored into a sandbox of its own, and the steps after it are sent there as
ordinary steps, in the order in which disks saw them.

Rule 1: a fork shares nothing with its origin but bytes: its own id, its own epochs, its own ledger.
Rule 2: what acted outside is never run again, and is named.
Rule 3: every step's effect is compared with its first receipt; at a difference the fork stops there
        and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from fencepost.client import commands, ledger, ulid
from fencepost.client.client import Client
from fencepost.core import ids, limits
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.core.machine import Place
from fencepost.core.receipts import Receipt
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import owed
from fencepost.core.sandbox.holding import OPERATOR
from fencepost.core.sandbox.state import Key
from fencepost.core.steps import Origin, SandboxSpec, StepSpec, digest_of

STEP_S_MAX: Final = 600.0
_LIVE_S_MAX: Final = 300.0
_ALONE_S_MAX: Final = 60.0
_LOOK_S: Final = 0.1

_START: Final = Place(0, -1)

Say = Callable[[str], None]


@dataclass(slots=True)
class Done:
    """One committed step of the past, and until when the workspace held it."""

    step: str
    spec: StepSpec
    effect: str
    line: int
    seq: int
    key: Key
    at: Place
    dropped_at: Place | None = None

    def is_held(self, at: Place) -> bool:
        """Whether a later generation would have got it back, at that point of the ledger."""
        return self.at <= at and (self.dropped_at is None or self.dropped_at > at)


class Point(NamedTuple):
    """A checkpoint. `namespace` is the sandbox under whose name it is stored."""

    origin: Origin
    at: Place
    line: int
    seq: int


class Plan(NamedTuple):
    """How a fork is made. `external` and `unproven` are steps that it will not have."""

    at: str
    start: Point | None
    steps: list[Done]
    external: list[str]
    unproven: list[str]


@dataclass(slots=True)
class Past:
    """A fold of one sandbox's entries."""

    sandbox: str
    spec: SandboxSpec | None = None
    is_released: bool = False
    _open: dict[str, StepSpec] = field(default_factory=dict)
    _done: dict[str, Done] = field(default_factory=dict)
    _unproven: dict[str, Place] = field(default_factory=dict)
    _points: list[Point] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _base: Point | None = None
    _end: Place = _START

    def known_spec(self) -> SandboxSpec:
        """How it was created. Raises `RefusedError` where no entry says that it was."""
        if self.spec is None:
            raise RefusedError(
                "unknown_sandbox", f"sandbox: there is no sandbox {self.sandbox!r}", field="sandbox"
            )
        return self.spec

    def take(self, entry: e.SandboxEntry, place: Place) -> None:
        """Takes the next entry; other sandboxes' are passed over."""
        if getattr(entry, "sandbox", "") != self.sandbox:
            return
        self._end = place
        match entry:
            case e.Created():
                self.spec = entry.spec
                if entry.spec.origin is not None:
                    self._base = Point(entry.spec.origin, place, 0, 0)
            case e.Parked() | e.Fenced() if entry.spec is not None:
                self._open[entry.step] = entry.spec
            case e.Committed():
                self._committed(entry.step, entry.receipt, entry.line, place)
            case e.Compensated() if entry.final:
                self._open.pop(entry.step, None)
            case e.Resolved():
                if self._open.pop(entry.step, None) is not None and entry.state == "committed":
                    self._unproven[entry.step] = place
            case e.Replayed() if entry.accepted and entry.verdict and entry.step in self._done:
                self._done[entry.step].effect = entry.effect
            case e.CheckpointedEntry():
                origin = Origin(
                    sandbox=self.sandbox, checkpoint=entry.checkpoint, manifest=entry.manifest
                )
                self._points.append(Point(origin, place, entry.line, entry.journal_seq))
            case e.Recovered() if entry.mode == "told":
                self._told(entry, place)
            case e.Releasing():
                # What it stored goes once its last instance has; a reclaim alone drops nothing.
                self.is_released = True
            case _:
                pass

    def _committed(self, step: str, receipt: Receipt, line: int, place: Place) -> None:
        spec = self._open.pop(step, None)
        if spec is None:
            return
        first = line or receipt.epoch
        self._done[step] = Done(
            step=step,
            spec=spec,
            effect=owed.effect_of(receipt),
            line=first,
            seq=owed.written_seq(receipt),
            key=owed.key_of(first, receipt),
            at=place,
        )

    def _told(self, entry: e.Recovered, place: Place) -> None:
        """What was owed above `kept` was given up; with a lost checkpoint, all in it as well."""
        newest = self._points[-1] if self._points else None
        for done in self._done.values():
            if done.dropped_at is not None:
                continue
            is_stored = newest is not None and self._is_in(done, newest)
            if (is_stored and entry.lost) or (not is_stored and done.key > entry.kept):
                done.dropped_at = place
        if entry.lost:
            self.lost.append(entry.lost)
            self._points = [p for p in self._points if p.origin.checkpoint != entry.lost]

    def _is_in(self, done: Done, point: Point) -> bool:
        """Whether a checkpoint holds a step: committed before it, or seen by its disk till then."""
        seen = done.line == point.line and done.seq <= point.seq
        return done.is_held(point.at) or (done.at > point.at and seen)

    def given_up(self) -> list[Done]:
        """The committed workspace steps that no later generation gets back, in disks' order."""
        gone = [done for done in self._done.values() if done.dropped_at is not None]
        return sorted((d for d in gone if d.spec.effect == "workspace"), key=lambda done: done.key)

    def plan(self, at: str = "") -> Plan:
        """
        How the workspace is made again as it was right after step `at`, or as it is by now.

        Raises `RefusedError` for a step that is not committed, or that acted outside alone.
        """
        if at:
            until = self._until(at)
            key, when = until.key, until.at
        else:
            key, when = None, self._end
        wanted = {
            done.step: done
            for done in self._done.values()
            if (done.dropped_at is None or done.dropped_at > when)
            and (key is None or done.key <= key)
        }
        start = self._start(wanted)
        left = sorted(
            (d for d in wanted.values() if start is None or not self._is_in(d, start)),
            key=lambda done: done.key,
        )
        inside = [done for done in wanted.values() if done.spec.effect == "workspace"]
        last = max(inside, key=lambda done: done.key).step if inside else ""
        return Plan(
            at=at or last,
            start=start,
            steps=[done for done in left if done.spec.effect == "workspace"],
            external=[done.step for done in left if done.spec.effect != "workspace"],
            unproven=[step for step, place in self._unproven.items() if place <= when],
        )

    def _until(self, step: str) -> Done:
        done = self._done.get(step)
        if done is not None and done.spec.effect == "workspace":
            return done
        if done is not None:
            problem = "acted outside: there is no workspace of that moment"
        elif step in self._unproven:
            problem = "is committed by an operator's word: no receipt says what it wrote"
        else:
            problem = f"is no committed step of {self.sandbox}"
        raise RefusedError(
            "not_committed",
            f"--at: {step!r} {problem}",
            field="--at",
            expected="a committed workspace step",
        )

    def _start(self, wanted: dict[str, Done]) -> Point | None:
        """The newest checkpoint that is kept still and holds nothing but what is wanted."""
        kept = [] if self.is_released else self._points[-limits.CHECKPOINTS_KEPT :]
        for point in reversed(kept):
            inside = [d for d in self._done.values() if self._is_in(d, point)]
            if all(done.step in wanted for done in inside if done.spec.effect == "workspace"):
                return point
        return self._base


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose effect in the fork is not what its first receipt says."""

    step: str
    expected: str
    found: str


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """
    A sandbox that was made from another's past. It holds what the origin held right after `at`.

    `external` steps acted outside and were not run again; `unproven` ones are committed by an
    operator's word alone. With a `difference` it ends at that step, and is not what was asked for.
    `leans`: it has no checkpoint of its own yet, so it is lost where its origin and its disk are.
    """

    sandbox: str
    origin: str
    at: str
    epoch: int
    checkpoint: str = ""
    replayed: int = 0
    external: list[str] = []
    unproven: list[str] = []
    difference: Difference | None = None
    leans: bool = False


async def fork(
    client: Client,
    sandbox: str,
    *,
    at: str = "",
    name: str | None = None,
    say: Say = lambda _text: None,
) -> Fork:
    """
    Brings the workspace of `sandbox`, as of step `at`, back into a new sandbox.

    Without `at`, as of everything that is committed. The origin is only read, and may be gone.
    Raises `RefusedError`; a fork that was begun stays, for its operator to release.
    """
    past = await _past(client, sandbox)
    plan = past.plan(at)
    name = await _fresh_name(client, sandbox, name)
    origin = plan.start.origin if plan.start is not None else None
    say(
        f"{sandbox} at {plan.at or 'its beginning'}: "
        + (f"checkpoint {origin.checkpoint}" if origin is not None else "no checkpoint")
        + f", then {len(plan.steps)} steps"
    )
    spec = msgspec.structs.replace(past.known_spec(), origin=origin)
    reason = f"fork of {sandbox} at {plan.at}"
    await client.create_sandbox(name, spec, reason=reason, timeout_s=_LIVE_S_MAX)
    # Two forks under one name, at once: the same spec again is no second sandbox.
    if (await client.show(name))["claims"].get(OPERATOR) != reason:
        raise _name_taken(name, "another was made under it meanwhile")
    leans = origin is not None and not await _stands_alone(client, name)
    difference = None
    replayed = 0
    for done in plan.steps:
        difference = await _again(client, name, done)
        if difference is not None:
            break
        replayed += 1
        if replayed % 100 == 0:
            say(f"  {replayed} of {len(plan.steps)}")
    return Fork(
        sandbox=name,
        origin=sandbox,
        at=plan.at,
        epoch=int((await client.show(name))["epoch"]),
        checkpoint=origin.checkpoint if origin is not None else "",
        replayed=replayed,
        external=plan.external,
        unproven=plan.unproven,
        difference=difference,
        leans=leans,
    )


async def _stands_alone(client: Client, name: str) -> bool:
    """Waits for the checkpoint that a fork takes first of all; False where none comes in time."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _ALONE_S_MAX
    while ((await client.show(name))["checkpoint"] or {}).get("namespace") != name:
        if loop.time() > until:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


async def _past(client: Client, sandbox: str) -> Past:
    past = Past(sandbox)
    await tell(client, sandbox, past.take)
    past.known_spec()
    return past


async def tell(client: Client, sandbox: str, take: Callable[[e.SandboxEntry, Place], None]) -> None:
    """
    Gives every entry of the batches that name a sandbox, from its ledger's first one on.

    Raises `UnknownError`.
    """
    named = f'"{sandbox}"'.encode()
    async for recorded in client.history(sandbox):
        if named in bytes(recorded.batch.entries):
            for index, entry in enumerate(recorded.entries):
                take(entry, Place(recorded.batch.prev, index))


async def _fresh_name(client: Client, origin: str, name: str | None) -> str:
    """The fork's id, which nothing had before: a create under a known id would be a repeat."""
    if name is None:
        return f"fork-{ulid.mint()}"
    commands.require_id("--as", name)
    try:
        await client.show(name)
    except RefusedError as error:
        if error.reason == "unknown_sandbox":
            return name
        raise
    detail = "it is the origin itself" if name == origin else "there is one already"
    raise _name_taken(name, detail)


def _name_taken(name: str, detail: str) -> RefusedError:
    return RefusedError(
        "sandbox_exists", f"--as: expected an id of its own, got {name!r}: {detail}", field="--as"
    )


async def _again(client: Client, sandbox: str, done: Done) -> Difference | None:
    """Sends one step of the past, and compares what came of it."""
    spec = done.spec
    assert digest_of(bytes(spec.args)) == spec.digest, "a command's arguments are what it names"
    compensation: dict[str, Any] | None = None
    if spec.compensation.kind == "command":
        compensation = {"kind": "command", "args": msgspec.json.decode(spec.compensation.args)}
    outcome = await client.step(
        sandbox,
        spec.tool,
        msgspec.json.decode(spec.args),
        step=done.step,
        compensation=compensation,
        timeout_s=STEP_S_MAX,
    )
    if outcome.position is None or not outcome.is_committed:
        return Difference(
            step=done.step, expected=done.effect, found=f"{outcome.state}: {outcome.reason}"
        )
    shard = ids.shard_of(sandbox, client.shards)
    recorded = await ledger.batch_after(
        client.link, shard, outcome.position.seq - 1, ledgers=client.ledgers
    )
    entry = recorded.entries[outcome.position.entry] if recorded is not None else None
    if not isinstance(entry, e.Committed) or entry.step != done.step:
        raise UnknownError(f"step {done.step} of {sandbox}: its receipt cannot be read")
    found = owed.effect_of(entry.receipt)
    if owed.is_same(done.effect, found):
        return None
    return Difference(step=done.step, expected=done.effect, found=found)
