"""
Checkpoints, restores and the dropping of what no checkpoint needs: orders in, facts out.

The toolhost reads and writes the disk, the store keeps the chunks; in between every chunk's digest
is compared, both ways, and only as many chunks are held as are on their way.

Rule 1: a namespace comes from an order, never from a toolhost: it names chunks by digest alone.
Rule 2: `checkpointed` is said when every chunk that its manifest reaches is proven to be stored:
        by its own acknowledgement, or by the base, which the ledger names. That some chunk happens
        to be there is no proof: it may be about to be dropped. And all of them are looked for in
        the store once more at the end: what it has lost of the base is sent again from the disk.
Rule 3: nothing is dropped that a manifest reaches which was reported and may not be known yet, and
        nothing while a checkpoint of that sandbox is taken, nor anything that was stored lately.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final, Literal, get_args

import structlog
from fencepost.core.errors import FencepostError, RefusedError, UnknownError
from fencepost.core.facts import Checkpointed, CheckpointFailed, Fact, Restored, RestoreFailed
from fencepost.core.sandbox.orders import CheckpointOrder, PruneOrder, RestoreOrder
from fencepost.core.sandbox.reported import Reported
from fencepost.runtime import crash
from fencepost.runtime.chunks import ChunkStore
from fencepost.runtime.metrics import GatewayMetrics
from fencepost.sandbox_gateway import frames, manifests
from fencepost.sandbox_gateway.attachment import Attachment, ChannelEndedError
from fencepost.sandbox_gateway.frames import Head
from fencepost.sandbox_gateway.manifests import Kind, ManifestError, Named, Tree
from fencepost.sandbox_gateway.talks import Talk

AT_ONCE: Final = 2
"""Checkpoints, and restores, that one gateway serves at once; the others wait."""
ON_THEIR_WAY: Final = 16
"""Chunks of one of them that are stored or fetched at once."""
WANTED_MAX: Final = 16
NEEDED_MAX: Final = 256
SILENT_S: Final = 600.0
"""Between two frames, in which a large tree may be walked, or synced. A toolhost that sends no
heartbeats is lost long before."""
QUEUED_S: Final = 900.0
"""A checkpoint waits in the toolhost for the command that runs."""
TRIES: Final = 3
KEPT_CHUNKS_MAX: Final = 500_000
"""Digests of trees that are remembered between checkpoints, of all sandboxes together."""
YOUNG_MS: Final = 10 * 60_000

CheckpointReason = Literal[
    "no_space", "io_error", "unreachable", "busy", "unsupported", "too_large"
]
RestoreReason = Literal[
    "missing", "corrupt", "no_space", "io_error", "unreachable", "unsupported", "not_empty"
]
_ELSEWHERE: Final = {
    "stale_epoch": "unreachable",
    "stale_session": "unreachable",
    "no_generation": "unreachable",
    "marker_moved": "unreachable",
    "restoring": "busy",
    "unknown_kind": "unsupported",
}

logger = structlog.get_logger(__name__)


class _FailedError(FencepostError):
    """A checkpoint or restore cannot be finished."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class _LostError(FencepostError):
    """The store has lost some of what a checkpoint inherits of its base."""

    def __init__(self, count: int, of: int) -> None:
        super().__init__(f"{count} of {of} chunks are not in the store")
        self.count = count


class Trees:
    """The tree of each sandbox's newest checkpoint, as far as there is room."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Tree] = OrderedDict()
        self._size = 0

    def get(self, sandbox: str, manifest: str) -> Tree | None:
        tree = self._kept.get(sandbox)
        return tree if tree is not None and tree.manifest == manifests.bare(manifest) else None

    def put(self, sandbox: str, tree: Tree) -> None:
        self.drop(sandbox)
        self._kept[sandbox] = tree
        self._size += len(tree.chunks)
        while self._size > KEPT_CHUNKS_MAX and len(self._kept) > 1:
            self.drop(next(iter(self._kept)))

    def drop(self, sandbox: str) -> None:
        tree = self._kept.pop(sandbox, None)
        if tree is not None:
            self._size -= len(tree.chunks)


class Checkpoints:
    """
    Serves one gateway session.

    `put_fact` hands a fact to the outbox; `may_write` tells whether the session's lease still
    holds; `now_ms` is the wall clock, compared with the store's stamps alone.
    """

    def __init__(
        self,
        store: ChunkStore,
        *,
        gateway: str,
        put_fact: Callable[[Fact], None],
        may_write: Callable[[], bool],
        now_ms: Callable[[], int],
        metrics: GatewayMetrics,
        young_ms: int = YOUNG_MS,
    ) -> None:
        self._store = store
        self._gateway = gateway
        self._put_fact = put_fact
        self._may_write = may_write
        self._now_ms = now_ms
        self._metrics = metrics
        self._young_ms = young_ms
        self._trees = Trees()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._restore_slots = asyncio.Semaphore(AT_ONCE)
        self._locks: dict[str, asyncio.Lock] = {}
        self._reported = Reported()

    def _lock(self, sandbox: str) -> asyncio.Lock:
        return self._locks.setdefault(sandbox, asyncio.Lock())

    # -- checkpoints ---------------------------------------------------------------------------

    async def checkpoint(self, attachment: Attachment, order: CheckpointOrder) -> None:
        """Takes a checkpoint and reports it; a repeated order gets the same report."""
        said = self._reported.answer(order)
        if said is not None:
            self._put_fact(said)
            return
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._lock(order.sandbox))
                await stack.enter_async_context(self._slots)
                with self._metrics.checkpoint_seconds.time():
                    fact = await self._taken(attachment, order)
                self._reported.add(fact)
        except _FailedError as failure:
            self._metrics.checkpoints.labels(failure.reason).inc()
            logger.warning("checkpoint_failed", **_told(failure, order))
            self._put_fact(
                CheckpointFailed(
                    reason=_word(failure.reason, CheckpointReason, "io_error"),
                    detail=failure.detail[:1000],
                    **self._about(order),
                )
            )
            return
        self._metrics.checkpoints.labels("stored").inc()
        self._metrics.checkpoint_bytes.inc(fact.sent_bytes)
        crash.point("gateway_checkpoint_stored")
        self._put_fact(fact)

    async def _taken(self, attachment: Attachment, order: CheckpointOrder) -> Checkpointed:
        base = await self._base(order)
        taking = _Taking(self._store, attachment, order, base)
        try:
            head, tree = await taking.run()
        except _LostError as error:
            # What is inherited can be had from the disk alone, while there is one.
            logger.warning("checkpoint_base_lost", sandbox=order.sandbox, detail=str(error))
            self._metrics.chunks_lost.inc(error.count)
            taking = _Taking(self._store, attachment, order, None)
            head, tree = await taking.run()
        marked = attachment.marked
        if not self._may_write():
            raise _FailedError("unreachable", "the gateway's lease is not renewed")
        said = (head.epoch, head.session, head.nonce)
        if marked is None or said != (order.epoch, order.session, marked.nonce):
            raise _FailedError("unreachable", "the disk is at another generation")
        self._trees.put(order.sandbox, tree)
        attachment.write(frames.kept(head.manifest))
        if head.skipped:
            logger.info("checkpoint_skipped", sandbox=order.sandbox, special_files=head.skipped)
        return Checkpointed(
            nonce=marked.nonce,
            manifest=head.manifest,
            journal_seq=head.journal_seq,
            files=head.files,
            size_bytes=head.size,
            sent_bytes=taking.stored_bytes,
            reason=order.reason,
            **self._about(order),
        )

    async def _base(self, order: CheckpointOrder) -> Tree | None:
        """What the base names. One that is proven not to be whole is none: all is stored anew."""
        if not order.base:
            return None
        try:
            tree = self._trees.get(order.sandbox, order.base)
            if tree is None:
                tree = await manifests.read(self._store, order.sandbox, order.base)
        except ManifestError as error:
            logger.warning("checkpoint_base_broken", sandbox=order.sandbox, detail=str(error))
            return None
        except UnknownError as error:
            raise _FailedError("unreachable", str(error)) from error
        return tree

    # -- restores ------------------------------------------------------------------------------

    async def restore(self, attachment: Attachment, order: RestoreOrder) -> None:
        """Has a checkpoint made on the disk, and reports it."""
        try:
            async with self._restore_slots:
                crash.point("gateway_restore_begun")
                with self._metrics.restore_seconds.time():
                    head = await _Giving(self._store, attachment, order).run()
        except _FailedError as failure:
            self._metrics.restores.labels(failure.reason).inc()
            logger.warning("restore_failed", **_told(failure, order))
            self._put_fact(
                RestoreFailed(
                    reason=_word(failure.reason, RestoreReason, "io_error"),
                    detail=failure.detail[:1000],
                    **self._about(order),
                )
            )
            return
        self._metrics.restores.labels("restored").inc()
        self._put_fact(
            Restored(
                manifest=order.manifest,
                journal_seq=head.journal_seq,
                files=head.files,
                size_bytes=head.size,
                **self._about(order),
            )
        )

    def _about(self, order: CheckpointOrder | RestoreOrder) -> dict[str, Any]:
        """What a fact about an order repeats of it."""
        return {
            "sandbox": order.sandbox,
            "gateway": self._gateway,
            "session": order.session,
            "epoch": order.epoch,
            "checkpoint": order.checkpoint,
        }

    # -- dropping ------------------------------------------------------------------------------

    async def prune(self, order: PruneOrder) -> None:
        """
        Drops what none of the manifests reaches; everything, where the order keeps none.

        Where the store does not say enough nothing is dropped: what remains costs space, and the
        next order finds it.
        """
        async with self._lock(order.sandbox):
            try:
                dropped = await self._drop(order)
            except (ManifestError, UnknownError) as error:
                self._metrics.prunes_given_up.inc()
                logger.warning("prune_given_up", sandbox=order.sandbox, detail=str(error))
                return
        self._metrics.chunks_dropped.inc(dropped)

    async def _drop(self, order: PruneOrder) -> int:
        # A sandbox that keeps nothing is gone for good, whatever is attached here for a moment yet:
        # nothing that was reported of it can count any more.
        is_gone = not order.keep
        if is_gone:
            self._trees.drop(order.sandbox)
        reached: set[bytes] = set()
        named: dict[bytes, Named] = {}  # pages that several of them share are read once
        for manifest in {*order.keep, *self._reported.unknown(order.sandbox, order.keep)}:
            tree = self._trees.get(order.sandbox, manifest)
            if tree is None:
                tree = await manifests.read(self._store, order.sandbox, manifest, known=named)
            named |= tree.named
            reached |= tree.chunks
        kept = {digest.hex() for digest in reached}
        before_ms = self._now_ms() - self._young_ms
        dropped = 0
        for name in sorted(await self._store.names(order.sandbox) - kept):
            if not is_gone:
                at_ms = await self._store.stored_at_ms(order.sandbox, name)
                if at_ms is None or at_ms > before_ms:
                    continue
            # Looked at before each: a process that was stopped for a while may find that another
            # gateway has taken checkpoints meanwhile, which may name any of these.
            if not self._may_write():
                break
            await self._store.delete(order.sandbox, name)
            dropped += 1
        return dropped


def _told(failure: _FailedError, order: CheckpointOrder | RestoreOrder) -> dict[str, str]:
    return {
        "sandbox": order.sandbox,
        "checkpoint": order.checkpoint,
        "reason": failure.reason,
        "detail": failure.detail,
    }


def _word(reason: str, known: Any, otherwise: Any) -> Any:
    reason = _ELSEWHERE.get(reason, reason)
    return reason if reason in get_args(known) else otherwise


async def _tried(work: Callable[[], Awaitable[Any]]) -> Any:
    """Does it again where the store did not say. Raises the last `UnknownError`."""
    for left in range(TRIES - 1, -1, -1):
        try:
            return await work()
        except UnknownError:
            if not left:
                raise
            await asyncio.sleep(0.2 * (TRIES - left))
    raise AssertionError("unreachable")


class _Taking:
    """One checkpoint: chunks from a toolhost into the store."""

    def __init__(
        self,
        store: ChunkStore,
        attachment: Attachment,
        order: CheckpointOrder,
        base: Tree | None,
    ) -> None:
        self._store = store
        self._attachment = attachment
        self._order = order
        self._base = base
        self._wanted: set[bytes] = set()
        self._seen: set[bytes] = set()
        self._stored: set[bytes] = set()
        self._named: dict[bytes, Named] = {}
        self._puts: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(ON_THEIR_WAY)
        self._failure: Exception | None = None
        self._talk = Talk(attachment, self._is_welcome)
        self.stored_bytes = 0

    def _is_welcome(self, head: Head, body: bytes) -> bool:
        if head.k != "chunk":
            return len(body) <= 32 * WANTED_MAX
        try:
            digest = manifests.bare(head.digest)
        except ManifestError:
            return False
        if digest not in self._wanted or len(body) > manifests.CHUNK_BYTES_MAX:
            return False
        self._wanted.discard(digest)
        return True

    async def run(self) -> tuple[Head, Tree]:
        """The toolhost's last word and the whole tree. Raises `_FailedError`."""
        order = self._order
        base = order.base if self._base is not None else ""
        self._talk.open(lambda id_: frames.checkpoint(id_, order, base=base))
        try:
            head = await self._served()
            await self._all_stored()
            return head, await self._whole(head)
        except ChannelEndedError as error:
            raise _FailedError("unreachable", str(error)) from error
        except UnknownError as error:
            raise _FailedError("unreachable", str(error)) from error
        except ManifestError as error:
            reason = "too_large" if error.reason == "too_large" else "io_error"
            raise _FailedError(reason, str(error)) from error
        except RefusedError as error:
            raise _FailedError("io_error", str(error)) from error
        finally:
            self._talk.close()
            for put in self._puts:
                put.cancel()
            await asyncio.gather(*self._puts, return_exceptions=True)
            self._attachment.write(frames.abort(self._talk.id))

    async def _served(self) -> Head:
        timeout_s = QUEUED_S
        while True:
            head, body = await self._talk.next(timeout_s)
            timeout_s = SILENT_S
            if self._failure is not None:
                raise self._failure
            match head.k:
                case "offer":
                    await self._want(body)
                case "chunk":
                    await self._put(head, body)
                case "checkpointed":
                    return head
                case _:
                    raise _FailedError(head.reason or "io_error", head.detail or head.k)

    async def _want(self, offered: bytes) -> None:
        """Asks for what the base does not have, once there is room for it."""
        names = [offered[at : at + 32] for at in range(0, len(offered), 32)]
        if len(offered) % 32 or self._wanted:
            raise _FailedError("io_error", "an offer of another form")
        held = self._base.chunks if self._base is not None else frozenset[bytes]()
        wanted = [name for name in names if name not in held and name not in self._seen]
        self._seen.update(wanted)
        self._wanted.update(wanted)
        if len(self._seen) > manifests.CHUNKS_MAX:
            raise _FailedError("too_large", f"more than {manifests.CHUNKS_MAX} chunks")
        async with self._room:
            self._attachment.write(frames.want(self._talk.id, b"".join(wanted)))

    async def _put(self, head: Head, body: bytes) -> None:
        digest = hashlib.sha256(body).digest()
        if digest != manifests.bare(head.digest):
            raise _FailedError("io_error", f"chunk {head.digest} has other bytes")
        if head.kind in ("page", "list"):
            self._named[digest] = manifests.named_by(head.kind, body)  # type: ignore[arg-type]
        await self._room.acquire()
        put = asyncio.create_task(self._put_one(digest, body))
        self._puts.add(put)
        put.add_done_callback(self._puts.discard)

    async def _put_one(self, digest: bytes, body: bytes) -> None:
        try:
            await _tried(lambda: self._store.put(self._order.sandbox, digest.hex(), body))
            self._stored.add(digest)
            self.stored_bytes += len(body)
        except FencepostError as error:
            self._failure = self._failure or error
        finally:
            self._room.release()

    async def _all_stored(self) -> None:
        while self._puts:
            await asyncio.wait(set(self._puts))
        if self._failure is not None:
            raise self._failure

    async def _whole(self, head: Head) -> Tree:
        """Proves that the store has all that the manifest reaches."""
        base = self._base
        known = self._stored if base is None else self._stored | base.chunks

        async def fetch(digest: bytes, kind: Kind) -> Named:
            found = self._named.get(digest)
            if found is None and base is not None:
                found = base.named.get(digest)
            if found is None:
                if digest not in known:
                    raise ManifestError("missing", f"chunk {digest.hex()} was never stored")
                data = await manifests.fetched(self._store, self._order.sandbox, digest)
                found = manifests.named_by(kind, data)
            return found

        tree = await manifests.grown(manifests.bare(head.manifest), fetch)
        lacking = tree.chunks - known
        if lacking:
            raise ManifestError("missing", f"{len(lacking)} chunks were never stored")
        # What was stored must still be there: others may drop things (rule 3), and a store may
        # lose some while the sandbox lives, which every later increment would inherit.
        names = {digest.hex() for digest in tree.chunks}
        gone = await _tried(lambda: self._store.absent(self._order.sandbox, names))
        if gone and base is not None:
            raise _LostError(len(gone), len(names))
        if gone:
            raise ManifestError("missing", f"{len(gone)} chunks were dropped meanwhile")
        return tree


class _Giving:
    """One restore: chunks from the store to a toolhost, in the order in which it needs them."""

    def __init__(self, store: ChunkStore, attachment: Attachment, order: RestoreOrder) -> None:
        self._store = store
        self._attachment = attachment
        self._order = order
        self._needed: deque[bytes] = deque()
        self._coming: deque[asyncio.Task[tuple[bytes, str]]] = deque()
        self._more = asyncio.Event()
        self._talk = Talk(attachment, self._is_welcome)

    def _is_welcome(self, head: Head, body: bytes) -> bool:
        """Needs are put in their queue here, so that fetching never waits for giving."""
        if head.k != "need":
            return len(body) == 0
        names = [body[at : at + 32] for at in range(0, len(body), 32)]
        if len(body) % 32 or len(self._needed) + len(self._coming) + len(names) > NEEDED_MAX:
            return False
        self._needed.extend(names)
        self._more.set()
        return True

    async def run(self) -> Head:
        """The toolhost's last word. Raises `_FailedError`."""
        order = self._order
        self._talk.open(lambda id_: frames.restore(id_, order))
        giving = asyncio.create_task(self._give())
        try:
            timeout_s = QUEUED_S
            while True:
                head, _ = await self._talk.next(timeout_s)
                timeout_s = SILENT_S
                if head.k == "restored":
                    said = (head.checkpoint, head.manifest)
                    if said != (order.checkpoint, order.manifest):
                        raise _FailedError("io_error", "another checkpoint was restored")
                    return head
                if head.k != "need":
                    raise _FailedError(head.reason or "io_error", head.detail or head.k)
        except ChannelEndedError as error:
            raise _FailedError("unreachable", str(error)) from error
        finally:
            self._talk.close()
            giving.cancel()
            for task in self._coming:
                task.cancel()
            await asyncio.gather(giving, *self._coming, return_exceptions=True)
            self._attachment.write(frames.abort(self._talk.id))

    async def _give(self) -> None:
        while True:
            self._fetch_more()
            if not self._coming:
                self._more.clear()
                await self._more.wait()
                continue
            digest, wait = self._coming[0].get_name(), self._coming[0]
            data, reason = await wait
            self._coming.popleft()
            self._fetch_more()
            if reason:
                logger.warning(
                    "chunk_not_given", sandbox=self._order.sandbox, chunk=digest, reason=reason
                )
                self._attachment.write(frames.chunk_failed(self._talk.id, digest, reason))
            else:
                self._attachment.write(frames.chunk(self._talk.id, digest, size=len(data)))
                self._attachment.write(data)
                await self._attachment.drain()

    def _fetch_more(self) -> None:
        while self._needed and len(self._coming) < ON_THEIR_WAY:
            digest = self._needed.popleft()
            self._coming.append(asyncio.create_task(self._fetch(digest), name=digest.hex()))

    async def _fetch(self, digest: bytes) -> tuple[bytes, str]:
        namespace = self._order.namespace
        try:
            data: bytes = await _tried(lambda: manifests.fetched(self._store, namespace, digest))
        except ManifestError as error:
            return b"", error.reason
        except FencepostError as error:
            logger.warning("chunk_unknown", sandbox=self._order.sandbox, detail=str(error))
            return b"", "unreachable"
        return data, ""
