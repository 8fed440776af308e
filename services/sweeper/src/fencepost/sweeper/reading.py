"""
Where a sweep reads, and where its proposals go: gateways, shards, the stream of facts.

Rule 1: an answer that did not come, or cannot be read, is a problem with a name; never an absence.
Rule 2: a listing is whole only when its last page says so.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec
import structlog
from fencepost.contracts import streams as table
from fencepost.contracts import subjects
from fencepost.contracts.messages import Ask, ListReply, ListRequest
from fencepost.core import ids
from fencepost.core.errors import FencepostError, RefusedError, UnknownError
from fencepost.core.facts import Fact
from fencepost.core.sandbox.inputs import GatewaySeen
from fencepost.core.sweeping import Dag, Ledger, LedgerPage, Listing, Report
from fencepost.runtime import dags, streams
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.link import ApiError, Link

Mode: TypeAlias = Literal["on", "census", "off"]
MODES: Final[tuple[Mode, ...]] = ("on", "census", "off")

GATEWAY_SILENT_MS: Final = 5_000
LIST_S: Final = 20.0
ASK_S: Final = 2.0
PAGES_MAX: Final = 10_000

logger = structlog.get_logger(__name__)
_encode: Final = msgspec.json.Encoder().encode
_LIST: Final = msgspec.json.Decoder(ListReply)
_SEEN: Final = msgspec.json.Decoder(GatewaySeen)


class _Stored(msgspec.Struct, frozen=True):
    seq: int = 0
    error: ApiError | None = None


class Sources(Protocol):
    """What a sweep needs of the world. Nothing here raises; what is not known is said so."""

    def authorities(self) -> list[str]:
        """Those that a living gateway reaches."""

    async def mode(self, setting: Mode) -> Mode: ...

    async def listing(self, authority: str) -> Listing: ...

    async def ledger(self) -> Ledger: ...

    async def dag(self, dag: str) -> Dag | None:
        """None: its shard did not say, with proof."""

    async def propose(self, fact: Fact) -> bool:
        """Whether the stream has it. Again is no harm: the shard decides each on its state."""

    def report(self, report: Report) -> None: ...


class NatsSources:
    """The real ones. `listen` first."""

    def __init__(self, link: Link, clock: SystemClock, shards: int) -> None:
        self._link = link
        self._clock = clock
        self._shards = shards
        self._gateways: dict[str, tuple[list[str], int]] = {}

    async def listen(self) -> None:
        await self._link.subscribe_raw(subjects.GATEWAY_SEEN, self._take_seen)

    def _take_seen(self, msg: Any) -> None:
        try:
            seen = _SEEN.decode(msg.data)
        except msgspec.DecodeError as error:
            logger.warning("undecodable", subject=msg.subject, detail=str(error))
            return
        if seen.closing or not ids.is_id(seen.gateway):
            self._gateways.pop(seen.gateway, None)
        else:
            self._gateways[seen.gateway] = (seen.authorities, self._clock.monotonic_ms())

    def _reaching(self, authority: str) -> str:
        """The gateway heard of last that reaches it, or ""."""
        found = [
            (at_ms, name) for name, (reach, at_ms) in self._living().items() if authority in reach
        ]
        return max(found)[1] if found else ""

    def _living(self) -> dict[str, tuple[list[str], int]]:
        oldest_ms = self._clock.monotonic_ms() - GATEWAY_SILENT_MS
        for name in [n for n, (_, at_ms) in self._gateways.items() if at_ms < oldest_ms]:
            del self._gateways[name]
        return self._gateways

    def authorities(self) -> list[str]:
        return sorted({name for reach, _ in self._living().values() for name in reach})

    async def mode(self, setting: Mode) -> Mode:
        try:
            found = await streams.read_meta(self._link, table.SWEEP_MODE)
        except UnknownError as error:
            logger.warning("sweep_mode_unknown", detail=str(error))
            return "off" if setting == "off" else "census"  # the switch may be off
        if found is None:
            return setting
        text = found.decode("ascii", "replace")
        return next((mode for mode in MODES if mode == text), "census")

    async def listing(self, authority: str) -> Listing:
        problem, deployment, observes_gone = "", "", True
        items: list[Any] = []
        gateway, token = self._reaching(authority), ""
        for _ in range(PAGES_MAX):
            reply = await self._page(gateway, ListRequest(authority=authority, token=token))
            if reply is None or reply.problem:
                problem = "no_answer" if reply is None else reply.problem
                break
            deployment, observes_gone = reply.deployment, reply.observes_gone
            items += reply.items
            token = reply.token
            if not token:
                problem = "" if reply.complete else "incomplete_listing"
                break
        else:
            problem = "endless_listing"
        return Listing(
            authority=authority,
            deployment=deployment,
            items=items,
            observes_gone=observes_gone,
            problem=problem,
        )

    async def _page(self, gateway: str, request: ListRequest) -> ListReply | None:
        if not gateway:
            return ListReply(problem="no_gateway")
        try:
            subject = subjects.gateway_list(gateway)
            msg = await self._link.call(subject, _encode(request), timeout_s=LIST_S)
            return _LIST.decode(msg.data)
        except (FencepostError, msgspec.DecodeError) as error:
            logger.warning("listing_page_unknown", gateway=gateway, detail=str(error))
            return None

    async def ledger(self) -> Ledger:
        ledger = Ledger(self._shards)
        await asyncio.gather(*(self._read_shard(ledger, shard) for shard in range(self._shards)))
        return ledger

    async def _read_shard(self, ledger: Ledger, shard: int) -> None:
        after: int | None = 0
        while after is not None:
            ask = _encode(Ask(what="sweep", after=after))
            try:
                msg = await self._link.call(subjects.ask(shard), ask, timeout_s=ASK_S)
                status = msgspec.json.decode(msg.data, type=_Status).status
                if status:
                    raise UnknownError(f"shard {shard} answers {status}")
                page = msgspec.json.decode(msg.data, type=LedgerPage)
            except (FencepostError, msgspec.DecodeError) as error:
                logger.warning("shard_silent", shard=shard, detail=str(error))
                ledger.silent.add(shard)
                return
            ledger.take(page)
            after = page.next if page.next is None or page.next > after else None

    async def dag(self, dag: str) -> Dag | None:
        try:
            found = await dags.show(self._link, self._shards, dag, timeout_s=ASK_S)
        except (UnknownError, RefusedError) as error:
            logger.info("dag_silent", dag=dag, detail=str(error))
            return None
        if found is None:
            return Dag(exists=False)
        try:
            said = msgspec.convert(found, _DagView)
        except msgspec.ValidationError as error:
            logger.warning("dag_undecodable", dag=dag, detail=str(error))
            return None
        named = frozenset(one.acquisition for one in said.outstanding)
        return Dag(
            exists=True, acquisitions=named, whole=said.outstanding_count == len(said.outstanding)
        )

    async def propose(self, fact: Fact) -> bool:
        kind = str(fact.__struct_config__.tag)
        try:
            subject = subjects.fact(fact.sandbox, kind)
            msg = await self._link.call(subject, _encode(fact), timeout_s=ASK_S)
            stored = msgspec.json.decode(msg.data, type=_Stored)
        except (FencepostError, msgspec.DecodeError) as error:
            logger.warning("proposal_unknown", sandbox=fact.sandbox, kind=kind, detail=str(error))
            return False
        return stored.error is None and stored.seq > 0

    def report(self, report: Report) -> None:
        subject = subjects.event_sweep(token_of(report.authority))
        self._link.publish(subject, _encode(report))


class _Status(msgspec.Struct, frozen=True):
    status: str = ""


class _Outstanding(msgspec.Struct, frozen=True):
    acquisition: str


class _DagView(msgspec.Struct, frozen=True):
    outstanding: list[_Outstanding]
    outstanding_count: int


def token_of(authority: str) -> str:
    """An authority's name as a subject's token: itself, or a digest where it cannot be one."""
    if ids.is_id(authority):
        return authority
    return "x-" + hashlib.sha256(authority.encode("utf-8", "replace")).hexdigest()[:24]
