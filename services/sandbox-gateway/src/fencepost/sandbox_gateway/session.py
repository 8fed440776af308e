"""
One gateway session: from its first lease renewal to the end of its lease, or of the process.

It decides nothing durable. Orders come in by core NATS and are carried out; what was seen goes out
as facts, what toolhosts said as stamped receipts. Everything it holds dies with it: a session
whose lease is past drops its orders, ends its toolhosts, and another one starts under another id.

Rule 1: before a batch of orders is looked at, the monotonic clock is: a process that was stopped
for longer than its lease must not carry out what was queued for it meanwhile (S-192, S-224).
Rule 2: no task and no await between an order and its frame, or a receipt and its publication.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec
import structlog
from fencepost.contracts import streams, subjects
from fencepost.contracts.messages import receipt_key, stamp
from fencepost.core import ids, limits
from fencepost.core.errors import UnknownError
from fencepost.core.facts import (
    Assigned,
    AttachFailed,
    CreateFailed,
    Gone,
    Lost,
    Marked,
    Preempting,
    Ref,
    StopAnswered,
)
from fencepost.core.receipts import Receipt
from fencepost.core.sandbox.inputs import GatewaySeen, Heartbeat, Heartbeats
from fencepost.core.sandbox.orders import (
    AttachOrder,
    CheckpointOrder,
    CreateOrder,
    Dispatch,
    MarkOrder,
    Order,
    PruneOrder,
    RestoreOrder,
    StopOrder,
)
from fencepost.providers.protocol import (
    ChannelRefusedError,
    CreateAmbiguous,
    Created,
    CreateRefused,
    Observation,
    Provider,
    StopAnswer,
    Unknown,
)
from fencepost.runtime import crash
from fencepost.runtime.chunks import ChunkStore
from fencepost.runtime.chunks.jetstream import JetStreamChunks
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import GatewayMetrics
from fencepost.sandbox_gateway import blobs, frames, orders, oversize
from fencepost.sandbox_gateway.attachment import Attachment, ChannelEndedError
from fencepost.sandbox_gateway.checkpoints import YOUNG_MS, Checkpoints
from fencepost.sandbox_gateway.faults import Faults
from fencepost.sandbox_gateway.frames import Head
from fencepost.sandbox_gateway.lease import Lease
from fencepost.sandbox_gateway.listings import Listings
from fencepost.sandbox_gateway.notices import Notices
from fencepost.sandbox_gateway.outbox import FactOutbox, ReceiptOutbox, publish_acked
from fencepost.sandbox_gateway.reads import Reads

Ending: TypeAlias = Literal["lease_over", "stopped"]

_RECEIPT: Final = msgspec.json.Decoder(Receipt)
_encode: Final = msgspec.json.Encoder().encode
_STALE: Final = frozenset({"stale_epoch", "stale_session", "no_generation"})
_BEATS_MISSED_MAX: Final = 2
_TERMINATING_MS: Final = 1_000
_RETRY_AFTER_MS_MAX: Final = 60_000
_NOT_ENDED: Final = "tools_alive"
"""The toolhost's word for: processes of a former session could not be shown to be gone."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`master` is the secret that receipt keys are made of; times are milliseconds."""

    shards: int
    master: bytes
    lease_ms: int = limits.LEASE_MS
    heartbeat_ms: int = limits.HEARTBEAT_MS
    hello_ms: int = 10_000
    mark_ms: int = 10_000
    gone_within_ms: int = 5_000
    allow_faults: bool = False
    deployment: str = "local"
    chunks_young_ms: int = YOUNG_MS


class Clock(Protocol):
    def now_ms(self) -> int: ...

    def monotonic_ms(self) -> int: ...


_CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def mint(prefix: str, now_ms: int) -> str:
    """Mints an id that sorts by time: 48 bits of milliseconds, 80 of chance, as a ULID has."""
    number = (now_ms << 80) | secrets.randbits(80)
    return f"{prefix}-" + "".join(_CROCKFORD[(number >> at) & 31] for at in range(125, -5, -5))


class GatewaySession:
    """Run it once, with `run`. `id` names it everywhere."""

    def __init__(
        self,
        link: Link,
        *,
        providers: Mapping[str, Provider],
        options: Options,
        clock: Clock,
        metrics: GatewayMetrics,
        blob_store: blobs.BlobStore,
        chunk_store: ChunkStore | None = None,
    ) -> None:
        self.id = mint("gw", clock.now_ms())
        assert ids.is_id(self.id)
        self._link = link
        self._providers = providers
        self._options = options
        self._clock = clock
        self._metrics = metrics
        self._blobs = blob_store
        self._lease = Lease(options.lease_ms)
        self._attached: dict[str, Attachment] = {}
        self._subscriptions: dict[Attachment, list[Any]] = {}
        self._receipts = ReceiptOutbox(link)
        self._facts = FactOutbox(link, self._fact_answered)
        self._reads = Reads(link, metrics)
        self._listings = Listings(link, providers, options.deployment)
        self._faults: Faults | None = None
        if options.allow_faults:
            self._faults = Faults(
                link,
                attached=self._attached.get,
                reclaim=self._reclaim,
                publish=lambda attachment, stamped, size: self._receipts.put(
                    attachment.shard, stamped, size
                ),
                announce=self.announce_preemption,
            )
        self._checkpoints = Checkpoints(
            chunk_store if chunk_store is not None else JetStreamChunks(link),
            gateway=self.id,
            put_fact=self._facts.put,
            may_write=self._may_write,
            now_ms=clock.now_ms,
            metrics=metrics,
            young_ms=options.chunks_young_ms,
        )
        self._notices = Notices(
            providers, attached=self._attached, announce=self.announce_preemption
        )
        self._busy: set[tuple[str, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dispatched = {
            direction: metrics.dispatches.labels(direction)
            for direction in ("apply", "undo", "replay", "revoke")
        }
        self._over = asyncio.Event()
        self._ending: Ending = "stopped"

    # -- life ----------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> Ending:
        """Serves until `stop` is set or the lease is past, and tells which it was."""
        if not await self._first_renewal(stop):
            return "stopped"
        heard = await self._link.subscribe_raw(subjects.orders(self.id), self._take_orders)
        listings = await self._link.subscribe_raw(
            subjects.gateway_list(self.id), self._listings.take
        )
        stopping = asyncio.create_task(self._stop_when(stop))
        if self._faults is not None:
            await self._faults.listen_ahead()
        self._spawn(("notices", self.id), self._notices.run())
        logger.info("gateway_session_open", gateway=self.id)
        try:
            beat = asyncio.create_task(self._beat())
            await self._over.wait()
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
        finally:
            self._over.set()
            stopping.cancel()
            if not self._link.nc.is_closed:
                await heard.unsubscribe()
                await listings.unsubscribe()
            await self._listings.close()
            await self._close()
        logger.info("gateway_session_over", gateway=self.id, reason=self._ending)
        return self._ending

    async def _stop_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._end("stopped")

    def _end(self, ending: Ending) -> None:
        if not self._over.is_set():
            self._ending = ending
            self._over.set()

    @property
    def is_open(self) -> bool:
        """Whether it holds a lease under which writes may be sent."""
        return not self._over.is_set() and self._lease.may_write(self._clock.monotonic_ms())

    async def _close(self) -> None:
        graceful = self._ending == "stopped"
        if graceful:
            self._say_seen(closing=True)
        attachments = list(self._attached.values())
        for attachment in attachments:
            self._forget(attachment)
            if graceful:
                self._facts.put(self._lost(attachment, "gateway_closing", "present"))
        # Past its lease it may not wait for anything; otherwise a tool may finish its last write.
        grace_s = 1.0 if graceful else 0.0
        await asyncio.gather(*(attachment.end(grace_s=grace_s) for attachment in attachments))
        self._receipts.flush()
        if self._faults is not None:
            await self._faults.close()
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if graceful:
            await self._facts.drain(2.0)
        await self._facts.close()

    def _fact_answered(self, kind: str, acknowledged: bool) -> None:
        if acknowledged:
            self._metrics.facts.labels(kind).inc()
        else:
            self._metrics.facts_unacknowledged.labels(kind).inc()

    def _spawn(self, key: tuple[str, str], work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` unless the same thing is under way: orders are repeated until answered."""
        if key in self._busy:
            work.close()
            return
        self._busy.add(key)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._finished(key, done))

    def _finished(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        self._busy.discard(key)
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._metrics.orders_refused.labels("failed").inc()
            logger.error("order_failed", order=key[0], about=key[1], exc_info=error)

    # -- lease and heartbeats ------------------------------------------------------------------

    async def _first_renewal(self, stop: asyncio.Event) -> bool:
        pause_s = 0.1
        while not stop.is_set():
            if await self._renew():
                return True
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 1.0)
        return False

    async def _renew(self) -> bool:
        sent_at_ms = self._clock.monotonic_ms()
        subject = f"$KV.{streams.BUCKET_LEASES}.{self.id}"
        body = _encode({"gateway": self.id, "lease_ms": self._options.lease_ms})
        try:
            await publish_acked(
                self._link, subject, body, timeout_s=self._options.lease_ms / 1000 / 2
            )
        except UnknownError as error:
            self._metrics.lease_renewals_failed.inc()
            logger.warning("lease_not_renewed", gateway=self.id, detail=str(error))
            return False
        if self._lease.is_over(self._clock.monotonic_ms()):
            self._end("lease_over")
            return False
        return self._lease.renewed(sent_at_ms)

    async def _beat(self) -> None:
        while True:
            if self._lease.is_over(self._clock.monotonic_ms()):
                self._end("lease_over")
                return
            self._spawn(("renew", self.id), self._renew_and_grant())
            self._say_seen()
            self._say_heartbeats()
            self._look_for_silence()
            await asyncio.sleep(self._options.heartbeat_ms / 1000)

    async def _renew_and_grant(self) -> None:
        if await self._renew():
            for attachment in list(self._attached.values()):
                self._grant(attachment)

    def _grant(self, attachment: Attachment) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._lease.may_write(now_ms):
            attachment.write(frames.grant(self._lease.remaining_ms(now_ms)))

    def _say_seen(self, *, closing: bool = False) -> None:
        seen = GatewaySeen(
            gateway=self.id,
            authorities=sorted(p.traits.authority for p in self._providers.values()),
            providers=sorted(self._providers),
            places={name: p.traits.authority for name, p in self._providers.items()},
            sandboxes=len(self._attached),
            closing=closing,
        )
        self._link.publish(subjects.GATEWAY_SEEN, _encode(seen))
        self._metrics.sandboxes.set(len(self._attached))

    def _say_heartbeats(self) -> None:
        """Passes on what came since the last time: no beat is ever said twice."""
        packs: dict[int, list[Heartbeat]] = {}
        for attachment in self._attached.values():
            beat, attachment.beat = attachment.beat, None
            if beat is None or beat.epoch is None:
                continue
            packs.setdefault(attachment.shard, []).append(
                Heartbeat(
                    sandbox=attachment.sandbox,
                    gateway=self.id,
                    epoch=beat.epoch,
                    session=attachment.session,
                    journal_seq=beat.journal_seq,
                )
            )
        for shard, beats in packs.items():
            self._metrics.heartbeats.inc(len(beats))
            self._link.publish(
                subjects.heartbeats(shard), _encode(Heartbeats(gateway=self.id, beats=beats))
            )

    def _look_for_silence(self) -> None:
        now_ms = self._clock.monotonic_ms()
        for attachment in list(self._attached.values()):
            silent_ms = now_ms - attachment.beat_at_ms
            if now_ms - attachment.heard_at_ms > self._options.lease_ms:
                self._lose(attachment, "toolhost_silent")
            elif silent_ms > _BEATS_MISSED_MAX * self._options.heartbeat_ms:
                # A disk that cannot be read has no heartbeat: is there still one (S-182)?
                self._spawn(("look", attachment.session), self._look(attachment))

    async def _look(self, attachment: Attachment) -> None:
        observed = (await self._observe(attachment.ref)).state
        # What is announced to go is on its way out for as long as it was given, and alive so long.
        going = observed == "terminating" and not self._notices.is_announced(attachment)
        if observed == "gone" or going:
            self._lose(attachment, "not_there")

    # -- orders --------------------------------------------------------------------------------

    def _take_orders(self, msg: Any) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._over.is_set() or self._lease.is_over(now_ms):
            self._metrics.orders_refused.labels("lease_over").inc()
            self._end("lease_over")
            return
        crash.point("gateway_order_received")
        taken, wrong = orders.decode(msg.data)
        for detail in wrong:
            self._metrics.orders_refused.labels("malformed").inc()
            logger.warning("order_malformed", gateway=self.id, detail=detail)
        self._take_decoded(taken)

    def _take_decoded(self, taken: list[Order]) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._over.is_set() or self._lease.is_over(now_ms):
            return
        may_write = self._lease.may_write(now_ms)
        writes: dict[Attachment, list[bytes]] = {}
        dispatched = 0
        for order in taken:
            if self._faults is not None and self._faults.is_echoing:
                sandbox = order.fence.sandbox if isinstance(order, Dispatch) else order.sandbox
                self._faults.echo(sandbox, partial(self._take_decoded, [order]))
            if type(order) is not Dispatch:
                self._take_order(order)
                continue
            attachment = self._attached.get(order.fence.sandbox)
            if attachment is None or attachment.session != order.fence.session:
                # Answered by nothing: the shard learns of it by the facts about that session.
                self._metrics.orders_refused.labels("not_attached").inc()
            elif not may_write:
                self._metrics.orders_refused.labels("lease_not_renewed").inc()
            elif blobs.MARK in bytes(order.args):
                self._dispatch_with_blobs(attachment, order)
            else:
                dispatched += 1
                self._note_dispatch(attachment, order)
                writes.setdefault(attachment, []).append(frames.dispatch(order))
        for attachment, parts in writes.items():
            attachment.write(b"".join(parts))
        if dispatched:
            crash.point("gateway_frames_sent")

    def _take_order(self, order: Order) -> None:
        self._metrics.orders.labels(str(order.__struct_config__.tag)).inc()
        match order:
            case CreateOrder():
                self._spawn(("create", order.create_id), self._create(order))
            case AttachOrder():
                self._spawn(("attach", order.sandbox), self._attach(order))
            case MarkOrder():
                self._spawn(("mark", f"{order.session}/{order.epoch}"), self._mark(order))
            case StopOrder():
                about = order.ref.instance if order.ref is not None else order.create_id
                self._spawn(("stop", about), self._stop(order))
            case CheckpointOrder() | RestoreOrder():
                self._take_disk_order(order)
            case PruneOrder():
                self._spawn(("prune", order.sandbox), self._checkpoints.prune(order))
            case Dispatch():
                raise AssertionError("dispatches are taken in their batch")

    def _take_disk_order(self, order: CheckpointOrder | RestoreOrder) -> None:
        attachment = self._attached.get(order.sandbox)
        about = f"{order.session}/{order.checkpoint}"
        if attachment is None or attachment.session != order.session:
            self._metrics.orders_refused.labels("not_attached").inc()
        elif not self._may_write():
            self._metrics.orders_refused.labels("lease_not_renewed").inc()
        elif isinstance(order, CheckpointOrder):
            self._spawn(("checkpoint", about), self._checkpoints.checkpoint(attachment, order))
        else:
            self._spawn(("restore", about), self._checkpoints.restore(attachment, order))

    def _may_write(self) -> bool:
        return self._lease.may_write(self._clock.monotonic_ms())

    def _dispatch_with_blobs(self, attachment: Attachment, order: Dispatch) -> None:
        about = f"{order.fence.attempt}/{order.fence.direction}"
        self._spawn(("blobs", f"{attachment.session}/{about}"), self._send_blobs(attachment, order))

    async def _send_blobs(self, attachment: Attachment, order: Dispatch) -> None:
        for digest in blobs.named_in(bytes(order.args)):
            try:
                content = await self._blobs.get(digest)
            except UnknownError as error:
                # Not sent at all: "missing" would be an answer, and this is none.
                self._metrics.orders_refused.labels("blob_store_unknown").inc()
                logger.warning("blob_unknown", sandbox=attachment.sandbox, detail=str(error))
                return
            if content is None:
                continue
            size = len(content)
            for at in range(0, max(size, 1), frames.BLOB_PART_BYTES):
                part = content[at : at + frames.BLOB_PART_BYTES]
                last = at + len(part) >= size
                attachment.write(frames.blob(digest, size=size, last=last, part=part))
                await attachment.drain()
        if self._lease.may_write(self._clock.monotonic_ms()):
            self._note_dispatch(attachment, order)
            attachment.write(frames.dispatch(order))

    def _note_dispatch(self, attachment: Attachment, order: Dispatch) -> None:
        fence = order.fence
        self._dispatched[fence.direction].inc()
        attachment.note_sent(f"{fence.attempt}/{fence.direction}")

    # -- receipts ------------------------------------------------------------------------------

    def _on_receipt(self, attachment: Attachment, head: Head, body: bytes) -> None:
        crash.point("gateway_receipt_received")
        receipt: Receipt | None = None
        try:
            receipt = _RECEIPT.decode(body)
            if not oversize.is_shallow(body):
                receipt, body = None, oversize.presentable(body, head)
        except oversize.UNREADABLE:
            body = oversize.presentable(body, head)
        verdict = receipt.verdict if receipt is not None else "malformed"
        self._metrics.receipts.labels(verdict).inc()
        if receipt is not None:
            took_ms = attachment.took_ms(f"{receipt.attempt}/{receipt.direction}")
            if took_ms is not None:
                self._metrics.tool_seconds.observe(took_ms / 1000)
        if len(body) > limits.INLINE_BYTES_MAX:
            self._spawn(
                ("receipt", f"{attachment.session}/{head.attempt}/{secrets.token_hex(4)}"),
                self._publish_oversized(attachment, body, receipt),
            )
        else:
            self._publish_receipt(attachment, body)
        if receipt is not None and _shows_moved(attachment, receipt):
            self._lose(attachment, "marker_moved")

    def _publish_receipt(self, attachment: Attachment, body: bytes) -> None:
        stamped = stamp(
            attachment.key,
            gateway=self.id,
            sandbox=attachment.sandbox,
            at_ms=self._clock.now_ms(),
            receipt=body,
        )
        size = len(body) + 256
        if self._faults is None or not self._faults.holds(attachment, stamped, size):
            self._receipts.put(attachment.shard, stamped, size)
        if self._faults is not None and self._faults.is_echoing:
            again = partial(self._receipts.put, attachment.shard, stamped, size)
            self._faults.echo(attachment.sandbox, again)

    async def _publish_oversized(
        self, attachment: Attachment, body: bytes, receipt: Receipt | None
    ) -> None:
        try:
            body = await oversize.reduced(body, receipt, self._blobs)
        except UnknownError as error:
            # The shard asks again, and the journal gives the same receipt.
            self._metrics.orders_refused.labels("blob_store_unknown").inc()
            logger.warning("result_not_stored", sandbox=attachment.sandbox, detail=str(error))
            return
        self._publish_receipt(attachment, body)

    # -- creating, attaching, marking ----------------------------------------------------------

    async def _create(self, order: CreateOrder) -> None:
        def failed(reason: str, *, ambiguous: bool) -> None:
            self._facts.put(
                CreateFailed(
                    sandbox=order.sandbox,
                    create_id=order.create_id,
                    gateway=self.id,
                    reason=reason,
                    ambiguous=ambiguous,
                )
            )

        provider = self._providers.get(order.spec.provider)
        if provider is None:
            failed(f"unknown_provider: {order.spec.provider}", ambiguous=False)
            return
        if self._faults is not None:
            await self._faults.take_time(order.sandbox)
        # Again here, because this runs later than its order was taken.
        if self._lease.is_over(self._clock.monotonic_ms()):
            self._end("lease_over")
            return
        crash.point("gateway_before_create")
        answer = await provider.create(order.create_id, order.spec, order.labels)
        self._metrics.provider_calls.labels("create", type(answer).__name__.lower()).inc()
        crash.point("gateway_after_create")
        match answer:
            case Created():
                self._put_assigned(order.sandbox, order.create_id, answer)
            case CreateRefused():
                failed(answer.reason, ambiguous=False)
            case CreateAmbiguous():
                failed(answer.reason, ambiguous=True)

    def _put_assigned(self, sandbox: str, create_id: str, created: Created) -> None:
        self._facts.put(
            Assigned(
                sandbox=sandbox,
                create_id=create_id,
                gateway=self.id,
                ref=created.ref,
                capabilities=created.capabilities,
            )
        )

    def _provider_of(self, ref: Ref) -> Provider | None:
        provider = self._providers.get(ref.provider)
        if provider is None or provider.traits.authority != ref.authority:
            return None
        return provider

    async def _observe(self, ref: Ref) -> Observation:
        provider = self._provider_of(ref)
        if provider is None:
            return Observation(state="unknown", detail="another authority")
        return await provider.observe(ref)

    async def _attach(self, order: AttachOrder) -> None:
        current = self._attached.get(order.sandbox)
        if current is not None and current.ref == order.ref and self._was_told(current, order):
            return
        provider = self._provider_of(order.ref)
        session = mint("ss", self._clock.now_ms())
        if provider is None:
            self._attach_failed(order, session, "unreachable_authority", "unknown")
            return
        if current is not None:
            self._forget(current)
            await current.end(grace_s=1.0)
        try:
            channel = await provider.channel(order.ref, order.spec)
        except ChannelRefusedError as refusal:
            self._attach_failed(
                order, session, refusal.reason, refusal.observed, condemned=refusal.ended
            )
            return
        attachment = Attachment(
            sandbox=order.sandbox,
            session=session,
            nonce_fresh=secrets.token_hex(16),
            asked=order.asked,
            ref=order.ref,
            spec=order.spec,
            shard=ids.shard_of(order.sandbox, self._options.shards),
            key=receipt_key(self._options.master, self.id, order.sandbox),
            channel=channel,
            on_receipt=self._on_receipt,
            on_moved=lambda moved: self._lose(moved, "marker_moved"),
            on_end=self._lose,
            now_ms=self._clock.monotonic_ms,
        )
        attachment.start()
        try:
            self._grant(attachment)
            await attachment.hello(gateway=self.id, timeout_s=self._options.hello_ms / 1000)
        except ChannelEndedError as error:
            await attachment.end(grace_s=0.0)
            observed = await self._observe(order.ref)
            self._attach_failed(order, session, str(error), observed.state)
            return
        except asyncio.CancelledError:
            await attachment.end(grace_s=0.0)
            raise
        await self._take_in(attachment)

    async def _take_in(self, attachment: Attachment) -> None:
        self._attached[attachment.sandbox] = attachment
        self._facts.put(_assert_found(attachment))
        self._subscriptions[attachment] = [
            await self._link.subscribe_raw(
                subjects.read(attachment.sandbox), lambda msg: self._reads.take(attachment, msg)
            )
        ]
        if self._faults is not None:
            await self._faults.listen(attachment.sandbox)
        if self._attached.get(attachment.sandbox) is not attachment:
            await self._unsubscribe(attachment)

    def _was_told(self, current: Attachment, order: AttachOrder) -> bool:
        """
        Answers an order that was sent before the shard saw our answer to the last one.

        Orders are repeated until answered. Replacing a session for each repeat would end a
        session while the shard marks it, and so on for ever. One that asks anew needs another
        reading of the disk: what this session found first may be out of date.
        """
        if current.ended or current.found is None or order.asked > current.asked:
            return False
        if order.asked < current.asked:
            return True  # late: it was answered by the session before this one
        age_ms = self._clock.monotonic_ms() - current.marked_at_ms
        by_hand = order.asked == 0
        if by_hand and current.marked is not None and age_ms > limits.EFFECT_REPEAT_MS:
            return False
        self._facts.put(current.found)
        if current.marked is not None:
            self._facts.put(current.marked)
        return True

    def _attach_failed(
        self,
        order: AttachOrder,
        session: str,
        reason: str,
        observed: Literal["present", "terminating", "gone", "unknown"],
        *,
        condemned: bool = False,
    ) -> None:
        self._facts.put(
            AttachFailed(
                sandbox=order.sandbox,
                gateway=self.id,
                session=session,
                ref=order.ref,
                reason=reason,
                observed=observed,
                condemned=condemned,
            )
        )

    async def _mark(self, order: MarkOrder) -> None:
        attachment = self._attached.get(order.sandbox)
        if attachment is None or attachment.session != order.session:
            self._metrics.orders_refused.labels("not_attached").inc()
            return
        marked = attachment.marked
        if marked is not None and (marked.epoch, marked.nonce) == (order.epoch, order.nonce):
            self._facts.put(marked)
            return
        if not self._lease.may_write(self._clock.monotonic_ms()):
            return
        try:
            head = await attachment.mark(
                epoch=order.epoch, nonce=order.nonce, timeout_s=self._options.mark_ms / 1000
            )
        except ChannelEndedError as error:
            await self._give_up(attachment, str(error), condemned=False)
            return
        said = (head.k, head.epoch, head.session, head.nonce)
        if said != ("marked", order.epoch, order.session, order.nonce):
            reason = f"{head.reason}: {head.detail}" if head.detail else head.reason or head.k
            await self._give_up(attachment, reason, condemned=head.reason == _NOT_ENDED)
            return
        attachment.marked_at_ms = self._clock.monotonic_ms()
        attachment.marked = Marked(
            sandbox=attachment.sandbox,
            gateway=self.id,
            session=attachment.session,
            epoch=order.epoch,
            nonce=order.nonce,
            instance=attachment.ref.instance,
            journal_seq=head.journal_seq,
        )
        self._facts.put(attachment.marked)

    async def _give_up(self, attachment: Attachment, reason: str, *, condemned: bool) -> None:
        self._forget(attachment)
        await attachment.end(grace_s=0.0)
        observed = await self._observe(attachment.ref)
        self._facts.put(
            AttachFailed(
                sandbox=attachment.sandbox,
                gateway=self.id,
                session=attachment.session,
                ref=attachment.ref,
                reason=reason,
                observed=observed.state,
                condemned=condemned,
            )
        )

    # -- losing and stopping -------------------------------------------------------------------

    def _forget(self, attachment: Attachment) -> None:
        """From now on nothing reaches this session any more, and it is not found again."""
        if self._attached.get(attachment.sandbox) is attachment:
            del self._attached[attachment.sandbox]
        attachment.ended = True
        if attachment in self._subscriptions:
            self._spawn(("unsubscribe", attachment.session), self._unsubscribe(attachment))

    async def _unsubscribe(self, attachment: Attachment) -> None:
        for subscription in self._subscriptions.pop(attachment, ()):
            if not self._link.nc.is_closed:
                await subscription.unsubscribe()

    def _lose(self, attachment: Attachment, reason: str) -> None:
        if self._attached.get(attachment.sandbox) is not attachment:
            return
        self._forget(attachment)
        self._spawn(("lost", attachment.session), self._report_lost(attachment, reason))

    async def _report_lost(self, attachment: Attachment, reason: str) -> None:
        ending = asyncio.create_task(attachment.end(grace_s=0.0))
        observed = await self._observe(attachment.ref)
        provider = self._provider_of(attachment.ref)
        if observed.state == "terminating" and provider is not None:
            # Said now, it would be a session that ended on a disk that may live on, and the
            # loss would only be seen by the next attempt to attach.
            await self._is_gone_in_time(
                provider, attachment.ref, within_ms=self._options.gone_within_ms
            )
            observed = await self._observe(attachment.ref)
        self._metrics.channels_lost.labels(observed.state).inc()
        self._facts.put(self._lost(attachment, reason, observed.state))
        await ending
        logger.warning(
            "session_lost",
            sandbox=attachment.sandbox,
            session=attachment.session,
            epoch=attachment.marked.epoch if attachment.marked is not None else 0,
            reason=reason,
            observed=observed.state,
            toolhost=attachment.last_words(),
        )

    async def _observe_settled(self, ref: Ref) -> Observation:
        """Observes, and waits a moment for what is just on its way out: gone says more."""
        until_ms = self._clock.monotonic_ms() + _TERMINATING_MS
        while (observed := await self._observe(ref)).state == "terminating":
            if self._clock.monotonic_ms() >= until_ms:
                break
            await asyncio.sleep(0.01)
        return observed

    def _lost(
        self,
        attachment: Attachment,
        reason: str,
        observed: Literal["present", "terminating", "gone", "unknown"],
    ) -> Lost:
        return Lost(
            sandbox=attachment.sandbox,
            gateway=self.id,
            session=attachment.session,
            epoch=attachment.marked.epoch if attachment.marked is not None else 0,
            ref=attachment.ref,
            reason=reason,
            observed=observed,
        )

    async def _stop(self, order: StopOrder) -> None:
        if order.ref is None:
            await self._stop_create(order)
            return
        ref = order.ref
        provider = self._provider_of(ref)
        if provider is None:
            known = ref.provider in self._providers
            answer: Literal["unreachable", "unconfigured"] = (
                "unreachable" if known else "unconfigured"
            )
            self._facts.put(
                StopAnswered(
                    sandbox=order.sandbox,
                    gateway=self.id,
                    ref=ref,
                    answer=answer,
                    detail="no provider of this gateway has this authority",
                )
            )
            return
        attachment = self._attached.get(order.sandbox)
        if attachment is not None and attachment.ref == ref:
            self._forget(attachment)
            await attachment.end(grace_s=0.0)
        crash.point("gateway_before_stop")
        if self._faults is not None and self._faults.refuses_stop(order.sandbox):
            said = StopAnswer(answer="refused", detail="a fault was asked for")
        else:
            said = await provider.stop(ref, ref.instance)
        self._metrics.provider_calls.labels("stop", said.answer).inc()
        crash.point("gateway_after_stop")
        if said.answer not in ("accepted", "not_found"):
            logger.warning(
                "stop_not_accepted", sandbox=order.sandbox, answer=said.answer, detail=said.detail
            )
        self._facts.put(
            StopAnswered(
                sandbox=order.sandbox,
                gateway=self.id,
                ref=ref,
                answer=said.answer,
                detail=said.detail,
            )
        )
        # One that refuses is doing nothing: waiting for it would only hold up the next try.
        within_ms = 0 if said.answer == "refused" else self._options.gone_within_ms
        if await self._is_gone_in_time(provider, ref, within_ms=within_ms):
            self._facts.put(Gone(sandbox=order.sandbox, gateway=self.id, ref=ref))
        elif said.retry_after_ms > 0:
            # Repeats of the order are dropped while this one is under way. Bounded, because a
            # provider must not be able to put a release off for ever.
            await asyncio.sleep(min(said.retry_after_ms, _RETRY_AFTER_MS_MAX) / 1000)

    async def _is_gone_in_time(self, provider: Provider, ref: Ref, *, within_ms: int) -> bool:
        """Two signals: only an observation says gone, whatever the stop was answered."""
        until_ms = self._clock.monotonic_ms() + within_ms
        pause_s = 0.02
        while (await provider.observe(ref)).state != "gone":
            if self._clock.monotonic_ms() >= until_ms:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.5)
        return True

    async def _stop_create(self, order: StopOrder) -> None:
        """
        Ends a create id of which the shard has no ref.

        First no later create may make anything; then what is there is named, and stopped. Where a
        provider can promise or say nothing, it stays ambiguous.
        """
        if self._faults is not None:
            await self._faults.take_time(order.sandbox)
        is_settled = True
        for provider in self._providers.values():
            promised = await provider.settle(order.create_id)
            found = await provider.find(order.create_id)
            if isinstance(found, Created):
                self._put_assigned(order.sandbox, order.create_id, found)
                await self._stop(
                    StopOrder(sandbox=order.sandbox, create_id=order.create_id, ref=found.ref)
                )
                return
            if isinstance(found, Unknown) or not promised:
                is_settled = False
        self._facts.put(
            CreateFailed(
                sandbox=order.sandbox,
                create_id=order.create_id,
                gateway=self.id,
                reason="settled" if is_settled else "create_ambiguous",
                ambiguous=not is_settled,
                settled=is_settled,
            )
        )

    def announce_preemption(self, attachment: Attachment, grace_ms: int) -> None:
        """A provider said that it will take this instance away, in so long or later."""
        self._facts.put(
            Preempting(
                sandbox=attachment.sandbox,
                gateway=self.id,
                session=attachment.session,
                epoch=attachment.marked.epoch if attachment.marked is not None else 0,
                ref=attachment.ref,
                grace_ms=grace_ms,
            )
        )

    async def _reclaim(self, attachment: Attachment) -> bool:
        """Takes a sandbox away behind everybody's back, this session's included."""
        provider = self._provider_of(attachment.ref)
        return provider is not None and await provider.reclaim(attachment.ref)


def _assert_found(attachment: Attachment) -> Any:
    assert attachment.found is not None
    return attachment.found


def _shows_moved(attachment: Attachment, receipt: Receipt) -> bool:
    """
    Whether a receipt shows that the disk no longer has the marker that this session wrote.

    A refusal alone does not: a fence may just be old, and then the marker is as it was.
    """
    marked = attachment.marked
    if marked is None:
        return False
    if receipt.verdict in ("fault", "indeterminate"):
        return receipt.reason == "marker_moved"
    if receipt.verdict == "refused" and receipt.reason in _STALE:
        return (receipt.epoch, receipt.session) != (marked.epoch, attachment.session)
    return False
