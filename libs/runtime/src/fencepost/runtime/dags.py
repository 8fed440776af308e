"""
Asking something of a DAG and hearing what came of it; for the HTTP API and for clients.

Rule 1: a command is stored before anything is waited for, so whoever asks may go away.
Rule 2: `confirmed` and `nothing_held` are only ever passed on, from an accepted batch; what this
        module says by itself, when the time is over, is `unconfirmed`.
Rule 3: an event may be lost; what is waited for is asked for as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from fencepost.contracts import subjects
from fencepost.contracts.messages import AskDag
from fencepost.core import ids
from fencepost.core.errors import RefusedError, RetryLaterError, UnknownError
from fencepost.runtime.link import ApiError, Link

BOUND_MS_DEFAULT: Final = 5_000
_ACK_S: Final = 1.0
_LOOK_S: Final = 0.25
_PAUSE_S: Final = 0.05
_MARGIN_MS: Final = 250
_SUBJECT_TAKEN: Final = 10077

_ENCODE = msgspec.json.Encoder().encode


class _Stored(msgspec.Struct, frozen=True):
    seq: int = 0
    error: ApiError | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """
    What was said of a DAG's sandboxes. `outstanding` counts acquisitions that are not settled.

    `cancelled` counts nodes that the cancel ended. `position` is (shard, ledger sequence, index)
    of the entry that says so, or None where nothing was said in time: the release goes on.
    """

    dag: str
    released: str
    reason: str = ""
    evidence: str = ""
    outstanding: int = 0
    cancelled: int = 0
    cancel: str = ""
    position: tuple[int, int, int] | None = None
    at_ms: int = 0


class _Position(msgspec.Struct, frozen=True):
    shard: int
    seq: int
    index: int


class _Released(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `fp.v1.release.<dag>`."""

    dag: str
    released: str
    position: _Position
    reason: str = ""
    evidence: str = ""
    outstanding: int = 0
    cancelled: int = 0
    cancel: str = ""
    at_ms: int = 0


_RELEASED = msgspec.json.Decoder(_Released)


def decode_verdict(data: bytes) -> Verdict:
    """Reads a release event. Raises `msgspec.DecodeError`."""
    found = _RELEASED.decode(data)
    at = found.position
    fields = msgspec.structs.asdict(found) | {"position": (at.shard, at.seq, at.index)}
    return Verdict(**fields)


class Heard:
    """What was heard of one DAG since the listening began; `woken` after each piece of news."""

    def __init__(self) -> None:
        self.answers: dict[str, Verdict] = {}
        self.kinds: set[str] = set()
        self.woken = asyncio.Event()
        self._events: dict[tuple[str, str], dict[str, Any]] = {}

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """The last event of a kind about an acquisition, a node or a command, by its name."""
        return self._events.get((kind, name))

    def refusal_of(self, command: str) -> RefusedError | RetryLaterError | None:
        """The recorded refusal of a command; `overloaded` is not final."""
        event = self.find("refused", command)
        return None if event is None else _refusal(event)

    def take(self, message: Any) -> None:
        try:
            if message.subject.startswith(subjects.release("")):
                verdict = decode_verdict(message.data)
                if verdict.cancel:
                    self.answers[verdict.cancel] = verdict
            else:
                self._take_event(msgspec.json.decode(message.data, type=dict[str, Any]))
        except msgspec.MsgspecError:
            pass  # news all the same: whoever waits asks
        self.woken.set()

    def _take_event(self, event: dict[str, Any]) -> None:
        kind = str(event.get("kind", ""))
        self.kinds.add(kind)
        for field in ("acquisition", "node", "id"):
            if field in event:
                self._events[kind, str(event[field])] = event
                return

    async def wait(self, seconds: float) -> None:
        """Returns at the next news, or when the time is over."""
        self.woken.clear()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self.woken.wait()
        except TimeoutError:
            return


def _refusal(event: Mapping[str, Any]) -> RefusedError | RetryLaterError:
    reason, field = str(event.get("reason", "refused")), str(event.get("field", ""))
    detail = str(event.get("detail", "")) or reason
    text = f"{field}: {detail}" if field else detail
    if reason == "overloaded":
        return RetryLaterError(text, delay_ms=500)
    return RefusedError(reason, text, field=field)


@asynccontextmanager
async def listening(link: Link, dag: str) -> AsyncIterator[Heard]:
    """Listens to all that is made public of a DAG."""
    heard = Heard()
    wanted = (subjects.release(dag), subjects.event_dag(dag, "*"))
    subscriptions = [await link.subscribe_raw(subject, heard.take) for subject in wanted]
    try:
        yield heard
    finally:
        if not link.nc.is_closed:
            for subscription in subscriptions:
                await subscription.unsubscribe()


async def store(
    link: Link, dag: str, id_: str, body: Mapping[str, Any], *, within_s: float
) -> None:
    """
    Stores a command of a DAG. The same id again is the same command.

    Raises `UnknownError` when it may be stored or not, `RefusedError` for an id that cannot be.
    """
    subject, data = subjects.command(subjects.DAG_COMMAND, dag, id_), _ENCODE(body)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    problem = "no time"
    while (left := deadline - loop.time()) > 0:
        try:
            message = await link.call(subject, data, timeout_s=min(_ACK_S, left))
            said = msgspec.json.decode(message.data, type=_Stored)
        except UnknownError as error:
            problem = str(error)
        except msgspec.MsgspecError:
            problem = "an answer that cannot be read"
        else:
            if said.error is None or said.error.err_code == _SUBJECT_TAKEN:
                return
            if said.error.code in {400, 403}:
                # The same again is refused again.
                detail = f"{said.error.description} ({said.error.err_code})"
                raise RefusedError("not_accepted", f"command: {detail}", field="command")
            problem = said.error.description
        await asyncio.sleep(min(_PAUSE_S, max(0.0, left)))
    raise UnknownError(f"{subject}: not acknowledged within {within_s:g} s: {problem}")


async def ask(link: Link, shard: int, question: AskDag, *, timeout_s: float) -> Any:
    """
    Asks a dag shard's owner; None is a proven absence.

    Raises `UnknownError` when nobody owns it now, or the answer says so.
    """
    message = await link.call(subjects.ask_dag(shard), _ENCODE(question), timeout_s=timeout_s)
    try:
        answer = msgspec.json.decode(message.data)
    except msgspec.MsgspecError as error:
        raise UnknownError(f"dag shard {shard}: an answer that cannot be read") from error
    if isinstance(answer, dict) and "status" in answer:
        text = f"dag shard {shard}: {answer.get('detail') or answer.get('reason', 'unknown')}"
        if answer["status"] == "refused":
            raise RefusedError(str(answer.get("reason", "refused")), text)
        raise UnknownError(text)
    return answer


async def show(
    link: Link, shards: int, dag: str, *, timeout_s: float = 2.0
) -> dict[str, Any] | None:
    """What the shard's owner says of a DAG after a proof; None: there is none."""
    found: dict[str, Any] | None = await ask(
        link, ids.shard_of(dag, shards), AskDag(what="dag", dag=dag), timeout_s=timeout_s
    )
    return found


async def cancel(
    link: Link, shards: int, dag: str, id_: str, *, reason: str, bound_ms: int = BOUND_MS_DEFAULT
) -> Verdict:
    """
    Cancels a DAG and waits for the verdict, at most `bound_ms` from now on.

    At the bound the answer is `unconfirmed`: `pending_shard` while the barrier is not known to be
    closed, `pending_stop` after it. The cancel is stored before anything is waited for, and goes
    on. Raises `RefusedError` for a DAG that does not exist.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + bound_ms / 1000
    async with listening(link, dag) as heard:
        body = {
            "do": "cancel",
            "reason": reason,
            # The shard's own bound ends first, so that its answer, which knows more, comes in time.
            "bound_ms": max(0, bound_ms - min(_MARGIN_MS, bound_ms // 4)),
        }
        try:
            await store(link, dag, id_, body, within_s=bound_ms / 1000)
        except UnknownError:
            return Verdict(dag=dag, released="unconfirmed", reason="pending_shard", cancel=id_)
        while (left := deadline - loop.time()) > 0:
            answer = heard.answers.get(id_)
            if answer is not None:
                return answer
            refused = heard.refusal_of(id_)
            if refused is not None:
                raise refused
            await heard.wait(min(left, _LOOK_S))
            if not heard.woken.is_set():
                await _look(link, shards, dag, id_, heard=heard, left_s=deadline - loop.time())
    is_closed = not heard.kinds.isdisjoint(("closed", "cancel_asked"))
    why = "pending_stop" if is_closed else "pending_shard"
    return Verdict(dag=dag, released="unconfirmed", reason=why, cancel=id_)


async def _look(
    link: Link, shards: int, dag: str, id_: str, *, heard: Heard, left_s: float
) -> None:
    """Asks for the answer to a cancel whose event may be lost."""
    try:
        found = await show(link, shards, dag, timeout_s=max(0.01, min(_LOOK_S, left_s)))
    except UnknownError:
        return
    if found is None or not found["closed"]:
        return
    heard.kinds.add("closed")
    if id_ in found["answered"]:
        heard.answers[id_] = Verdict(
            dag=dag,
            released=found["released"],
            reason=found["reason"],
            evidence=found["evidence"],
            outstanding=found["outstanding_count"],
            cancelled=found["cancelled"],
            cancel=id_,
        )
