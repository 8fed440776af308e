"""
What the system says back: events, answers to questions, refusals; read into the client's words.

An answer has three forms here too: found, absent (proven by the shard's owner), or `UnknownError`.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Self, cast

import msgspec
from fencepost.client import ledger
from fencepost.client.outcome import LedgerPosition, StepOutcome, StepState
from fencepost.contracts import subjects
from fencepost.contracts.messages import Ask
from fencepost.core import ids
from fencepost.core.errors import FencepostError, RefusedError, RetryLaterError, UnknownError
from fencepost.core.machine import Place
from fencepost.core.sandbox import entries as e
from fencepost.runtime import streams
from fencepost.runtime.link import Link
from nats.aio.msg import Msg

_encode = msgspec.json.Encoder().encode
_NULL: Final = msgspec.Raw(b"null")


class _Position(msgspec.Struct, frozen=True):
    shard: int
    seq: int
    index: int


class Event(msgspec.Struct, frozen=True):
    """The fields of a step's public events that a waiting client needs."""

    attempt: str = ""
    epoch: int = 0
    outcome: Literal["ok", "failed", ""] = ""
    result: msgspec.Raw = _NULL
    reason: str = ""
    detail: str = ""
    field: str = ""
    digest: str = ""
    evidence: str = ""
    final: bool = True
    position: _Position | None = None


decode_event = msgspec.json.Decoder(Event).decode


def outcome_of_event(sandbox: str, step: str, state: str, event: Event) -> StepOutcome:
    at = event.position
    return StepOutcome(
        sandbox=sandbox,
        step=step,
        state=cast("StepState", state),
        attempts=ordinal_of(event.attempt),
        epoch=event.epoch,
        outcome=event.outcome,
        raw_result=event.result,
        reason=event.reason,
        detail=event.detail,
        evidence=event.evidence,
        position=LedgerPosition(at.shard, at.seq, at.index) if at is not None else None,
    )


def refusal(reason: str, field: str, detail: str) -> FencepostError:
    """The error that a recorded refusal is at a caller's; `overloaded` is not final."""
    text = f"{field}: {detail or reason}" if field else detail or reason
    if reason == "overloaded":
        return RetryLaterError(text, delay_ms=500)
    expected = detail.removeprefix("expected ").partition(":")[0] if "expected" in detail else ""
    return RefusedError(reason, text, field=field, expected=expected)


def ordinal_of(attempt: str) -> int:
    """The number of an attempt, from its id."""
    number = attempt.rpartition(".")[2]
    return int(number) if number.isdigit() else 0


async def ask(link: Link, shard: int, question: Ask, *, timeout_s: float) -> Any:
    """
    Asks a shard's owner. Raises `UnknownError` when there is no owner now, or no answer.

    A shard that is just being taken over does not answer; ask again.
    """
    message = await link.call(subjects.ask(shard), _encode(question), timeout_s=timeout_s)
    try:
        answer = msgspec.json.decode(message.data)
    except msgspec.DecodeError as error:
        raise UnknownError(f"shard {shard}: an answer that cannot be read") from error
    if isinstance(answer, dict) and "status" in answer:
        text = f"shard {shard}: {answer.get('detail') or answer.get('reason', 'unknown')}"
        if answer["status"] == "refused":
            raise RefusedError(str(answer.get("reason", "refused")), text)
        raise UnknownError(text)
    return answer


class StepAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`open` covers pending and fenced. `outcome` is there when the step has one."""

    status: Literal["absent", "open", "final"]
    state: str = ""
    digest: str = ""
    outcome: StepOutcome | None = None
    view: dict[str, Any] = {}


async def ask_step(
    link: Link, shards: int, sandbox: str, step: str, *, ledgers: int, timeout_s: float
) -> StepAnswer:
    """Asks for a step; a final one's outcome is read from the ledger, where the owner points."""
    shard = ids.shard_of(sandbox, shards)
    question = Ask(what="step", sandbox=sandbox, step=step)
    view = await ask(link, shard, question, timeout_s=timeout_s)
    if view is None:
        return StepAnswer(status="absent")
    state, digest = str(view["state"]), str(view.get("digest", ""))
    if state == "indeterminate":
        outcome = StepOutcome(
            sandbox=sandbox,
            step=step,
            state="indeterminate",
            attempts=ordinal_of(view["attempt"]),
            epoch=view.get("epoch", 0),
            reason=view.get("reason", ""),
        )
        return StepAnswer(status="open", state=state, digest=digest, outcome=outcome, view=view)
    place = view.get("place")
    if place is None:
        return StepAnswer(status="open", state=state, digest=digest, view=view)
    at = Place(place["after"], place["index"])
    outcome = await _recorded(link, shard, sandbox, step, at, ledgers=ledgers)
    return StepAnswer(status="final", state=state, digest=digest, outcome=outcome, view=view)


async def _recorded(
    link: Link, shard: int, sandbox: str, step: str, place: Place, *, ledgers: int
) -> StepOutcome:
    recorded = await ledger.batch_after(link, shard, place.after, ledgers=ledgers)
    entries = recorded.entries if recorded is not None else ()
    if recorded is None or place.index >= len(entries):
        raise UnknownError(f"step {step}: its final entry after {place.after} cannot be read")
    entry = entries[place.index]
    position = LedgerPosition(shard, recorded.seq, place.index)
    outcome = outcome_of_entry(entry, position)
    if outcome is None or (outcome.sandbox, outcome.step) != (sandbox, step):
        raise UnknownError(f"step {step}: another entry stands at {recorded.seq}.{place.index}")
    return outcome


def outcome_of_entry(entry: e.SandboxEntry, position: LedgerPosition) -> StepOutcome | None:
    """The outcome that an entry of the ledger gives a step, or None when it gives none."""
    match entry:
        case e.Committed(receipt=receipt):
            return StepOutcome(
                sandbox=entry.sandbox,
                step=entry.step,
                state="committed",
                attempts=ordinal_of(entry.attempt),
                epoch=receipt.epoch,
                outcome=receipt.outcome,
                raw_result=receipt.result,
                position=position,
            )
        case e.Compensated(final=True):
            return StepOutcome(
                sandbox=entry.sandbox,
                step=entry.step,
                state="compensated",
                attempts=ordinal_of(entry.attempt),
                epoch=entry.epoch,
                reason=entry.reason,
                detail=entry.detail,
                evidence=entry.evidence,
                position=position,
            )
        case e.Resolved():
            return StepOutcome(
                sandbox=entry.sandbox,
                step=entry.step,
                state=entry.state,
                attempts=ordinal_of(entry.attempt),
                reason="resolved",
                detail=f"{entry.who}: {entry.note}",
                evidence="resolved",
                position=position,
            )
        case _:
            return None


class Refusals:
    """Listens for the refusal of one command that is not a step."""

    def __init__(self, link: Link, command_id: str) -> None:
        self._link = link
        self._id = command_id
        self._found: FencepostError | None = None
        self._subscription: Any = None

    @classmethod
    async def listen(cls, link: Link, sandbox: str, command_id: str) -> Refusals:
        listening = cls(link, command_id)
        listening._subscription = await link.subscribe_raw(
            subjects.event_sandbox(sandbox, "refused"), listening._heard
        )
        return listening

    def raise_any(self) -> None:
        """Raises the refusal when one came."""
        if self._found is not None:
            raise self._found

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._link.nc.is_closed:
            await self._subscription.unsubscribe()

    def _heard(self, message: Msg) -> None:
        body = msgspec.json.decode(message.data)
        if body.get("id") == self._id:
            self._found = refusal(
                body.get("reason", "refused"), body.get("field", ""), body.get("detail", "")
            )


async def cut(link: Link) -> streams.Cut:
    """
    How the deployment's history is cut, as its services wrote it.

    Raises `UnknownError` where no deployment has written it (yet).
    """
    found = await streams.read_cut(link)
    if found is None:
        raise UnknownError("no planner has started here yet")
    return found
