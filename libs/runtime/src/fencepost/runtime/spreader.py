"""
Spreads the shards of a family over its replicas.

Every replica says every 300 ms in a key of its own that it is alive, and a key per shard says
whose it is. A replica is dead to another one when its key's revision has not changed for 1,200 ms
of the other's own monotonic clock: no clock is compared, and the bucket's own ages play no part.

A replica that cannot own a shard, whose ledger it cannot read (an older version beside newer ones),
lets go of it and says so in its key: the others take it beyond their share.

This protects nothing. Two replicas that both believe to own a shard are told apart by the append
(`shard_runner`); here it is only decided who tries.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import msgspec
import structlog
from fencepost.contracts import streams
from fencepost.core.errors import LedgerBrokenError, UnknownError
from fencepost.runtime.link import ApiError, Link, pub
from fencepost.runtime.ports import Clock

RENEW_MS: Final = 300
DEAD_MS: Final = 1_200
CLAIM_AGAIN_MS: Final = 10_000
RETRY_MS: Final = 1_000
RETRY_MS_MAX: Final = 15_000

logger = structlog.get_logger(__name__)


class _Ack(msgspec.Struct, frozen=True):
    seq: int = 0
    error: ApiError | None = None


class Owners:
    """The bucket of owners: all keys of a family at once, writes conditional on revisions."""

    def __init__(self, link: Link, family: str) -> None:
        self._link = link
        self._stream = f"KV_{streams.BUCKET_OWNERS}"
        self._prefix = f"$KV.{streams.BUCKET_OWNERS}.{family}."

    async def read(self) -> dict[str, tuple[int, str]]:
        """Every key with its revision and value. Raises `UnknownError`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        found: dict[str, tuple[int, str]] = {}

        def take(msg: Any) -> None:
            headers = msg.headers or {}
            status = headers.get("Status")
            if done.done():
                return
            if status is None:
                key = headers.get("Nats-Subject", "").removeprefix(self._prefix)
                value = "" if headers.get("KV-Operation") else msg.data.decode("utf-8", "replace")
                found[key] = (int(headers["Nats-Sequence"]), value)
            elif status in ("204", "404"):
                done.set_result(None)
            else:
                done.set_exception(UnknownError(f"owners: status {status}"))

        def denied(error: UnknownError) -> None:
            if not done.done():
                done.set_exception(error)

        inbox = self._link.nc.new_inbox()
        sub = await self._link.subscribe_raw(inbox, take)
        body = {"multi_last": [self._prefix + ">"], "batch": 4096}
        api = f"$JS.API.DIRECT.GET.{self._stream}"
        try:
            with self._link.asking(api, denied):
                self._link.send(pub(api, msgspec.json.encode(body), inbox))
                async with asyncio.timeout(2.0):
                    await done
        except TimeoutError as error:
            raise UnknownError("owners: no answer") from error
        finally:
            if not self._link.nc.is_closed:
                await sub.unsubscribe()
        return found

    async def write(self, key: str, value: str, revision: int | None) -> int | None:
        """
        Writes a key; None when its revision is another one now. None as `revision`: whatever it is.

        Raises `UnknownError`.
        """
        headers = b""
        if revision is not None:
            headers = b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: %d\r\n\r\n" % revision
        msg = await self._link.call(
            self._prefix + key, value.encode(), headers=headers, timeout_s=2.0
        )
        ack = msgspec.json.decode(msg.data, type=_Ack)
        return ack.seq if ack.error is None else None


class Spreader:
    """
    Decides which shards this replica tries to own.

    `own(shard)` returns when the shard is owned, or raises; `give_up(shard)` hands it over. Both
    are called for one shard at a time. `ended(shard)` must be called when an ownership ends.
    """

    def __init__(
        self,
        owners: Owners,
        clock: Clock,
        *,
        replica: str,
        shards: int,
        own: Callable[[int], Awaitable[None]],
        give_up: Callable[[int], Awaitable[None]],
    ) -> None:
        self.replica = replica
        self.shards = shards
        self.held: dict[int, int] = {}
        self.owned: set[int] = set()
        self._owners = owners
        self._clock = clock
        self._own = own
        self._give_up = give_up
        self._seen: dict[str, tuple[int, int]] = {}
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._retry: dict[int, tuple[int, int]] = {}
        self._claimed_ms: dict[int, int] = {}
        self._doubted_ms: dict[int, int] = {}
        self._unfit: set[int] = set()
        self._is_blind = False
        self._looked = False
        self._task: asyncio.Task[None] | None = None
        self._renewer: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._renewer = asyncio.create_task(self._renew_for_ever(), name="spreader-renew")
        self._task = asyncio.create_task(self._run(), name="spreader")

    async def stop(self) -> None:
        """Hands every shard over, and says that this replica is gone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for task in tuple(self._busy.values()):
            task.cancel()
        await asyncio.gather(*self._busy.values(), return_exceptions=True)
        await asyncio.gather(*(self._release(shard) for shard in tuple(self.held)))
        if self._renewer is not None:
            self._renewer.cancel()
            await asyncio.gather(self._renewer, return_exceptions=True)
        try:
            await self._owners.write(f"replica.{self.replica}", "", None)
        except UnknownError as error:
            logger.info("owner_key_not_cleared", detail=str(error))

    @property
    def is_settled(self) -> bool:
        """Tells whether this replica has looked, and owns all that it holds."""
        return self._looked and set(self.held) <= self.owned and not self._busy

    def ended(self, shard: int, cleaning: Coroutine[Any, Any, None]) -> None:
        """An ownership ended by itself; it is tried again after a while, longer each time."""
        self.owned.discard(shard)
        self._back_off(shard)
        self._spawn(shard, cleaning)

    def _back_off(self, shard: int) -> None:
        now_ms = self._clock.monotonic_ms()
        _, delay_ms = self._retry.get(shard, (0, RETRY_MS // 2))
        delay_ms = min(delay_ms * 2, RETRY_MS_MAX)
        self._retry[shard] = (now_ms + delay_ms, delay_ms)

    async def _renew_for_ever(self) -> None:
        count = 0
        while True:
            count += 1
            try:
                unfit = ",".join(str(shard) for shard in sorted(self._unfit))
                value = f"{count} {unfit}".rstrip()
                await self._owners.write(f"replica.{self.replica}", value, None)
            except UnknownError as error:
                logger.debug("owner_key_not_renewed", detail=str(error))
            await asyncio.sleep(RENEW_MS / 1000)

    async def _run(self) -> None:
        while True:
            try:
                await self.step()
            except UnknownError as error:
                if not self._is_blind:
                    logger.warning("owners_unknown", detail=str(error))
                self._is_blind = True
            else:
                self._is_blind = False
            await asyncio.sleep(RENEW_MS / 2000)

    async def step(self) -> None:
        """One look and what follows from it."""
        keys = await self._owners.read()
        live = self._live(keys)
        share = math.ceil(self.shards / len(live))
        now_ms = self._clock.monotonic_ms()
        for shard in tuple(self.held):
            if shard in self._busy:
                continue
            revision, owner = keys.get(f"shard.{shard}", (0, ""))
            if self._is_lost(shard, revision, owner, now_ms):
                logger.info("shard_claimed_by_another", shard=shard, owner=owner)
                del self.held[shard]
                self._spawn(shard, self._drop(shard))
            elif now_ms - self._claimed_ms.get(shard, 0) > CLAIM_AGAIN_MS or not revision:
                await self._claim(shard, revision if owner == self.replica else 0)
            elif shard not in self.owned and shard not in self._busy and self._may_try(shard):
                self._spawn(shard, self._take(shard))
        left, fit = _left_by_others(keys, live - {self.replica})
        # What others cannot own is shared among those that can, beside what all can.
        for part, most in ((False, share), (True, math.ceil(len(left) / (fit + 1)))):
            held = [shard for shard in sorted(self.held) if (shard in left) is part]
            if len(held) > most:
                idle = [shard for shard in held if shard not in self._busy]
                if idle:
                    self._spawn(idle[-1], self._release(idle[-1]))
                return
            free = [shard for shard in self._candidates(keys, live) if (shard in left) is part]
            for shard in free[: most - len(held)]:
                if await self._claim(shard, keys.get(f"shard.{shard}", (0, ""))[0]):
                    self._spawn(shard, self._take(shard))
        self._looked = True

    def _is_lost(self, shard: int, revision: int, owner: str, now_ms: int) -> bool:
        """
        Tells whether somebody else's claim stands over one's own.

        A lower revision is a stale read, or a bucket that was made anew: the latter lasts.
        """
        if not owner or owner == self.replica:
            self._doubted_ms.pop(shard, None)
            return False
        if revision > self.held[shard]:
            return True
        return now_ms - self._doubted_ms.setdefault(shard, now_ms) > DEAD_MS

    def _live(self, keys: dict[str, tuple[int, str]]) -> set[str]:
        """The replicas whose key has changed lately, as seen by this process's own clock."""
        now_ms = self._clock.monotonic_ms()
        live = {self.replica}
        for key, (revision, value) in keys.items():
            if not key.startswith("replica."):
                continue
            seen = self._seen.get(key)
            if seen is None or seen[0] != revision:
                seen = self._seen[key] = (revision, now_ms)
            if value and now_ms - seen[1] < DEAD_MS:
                live.add(key.removeprefix("replica."))
        return live

    def _candidates(self, keys: dict[str, tuple[int, str]], live: set[str]) -> list[int]:
        """Shards that nobody alive holds, in an order of this replica's own."""
        start = sum(self.replica.encode()) % self.shards
        free: list[int] = []
        for offset in range(self.shards):
            shard = (start + offset) % self.shards
            if shard in self.held or shard in self._busy or not self._may_try(shard):
                continue
            owner = keys.get(f"shard.{shard}", (0, ""))[1]
            if not owner or owner not in live or owner == self.replica:
                free.append(shard)
        return free

    def _may_try(self, shard: int) -> bool:
        return self._clock.monotonic_ms() >= self._retry.get(shard, (0, 0))[0]

    async def _claim(self, shard: int, revision: int) -> bool:
        claimed = await self._owners.write(f"shard.{shard}", self.replica, revision)
        if claimed is None:
            return False
        self._doubted_ms.pop(shard, None)
        self.held[shard] = claimed
        self._claimed_ms[shard] = self._clock.monotonic_ms()
        return True

    def _spawn(self, shard: int, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine, name=f"spread-{shard}")
        self._busy[shard] = task

        def done(task: asyncio.Task[None]) -> None:
            if self._busy.get(shard) is task:
                del self._busy[shard]
            if not task.cancelled() and task.exception() is not None:
                logger.error("spreading_failed", shard=shard, exc_info=task.exception())

        task.add_done_callback(done)

    async def _take(self, shard: int) -> None:
        try:
            await self._own(shard)
        except Exception as error:
            # Contained: one shard that cannot be owned must not keep the others.
            detail = f"{type(error).__name__}: {error}"
            logger.warning("shard_not_owned", shard=shard, detail=detail)
            self._back_off(shard)
            if isinstance(error, LedgerBrokenError):
                self._unfit.add(shard)
                await self._let_go(shard)
            return
        self.owned.add(shard)
        self._unfit.discard(shard)
        self._retry.pop(shard, None)

    async def _drop(self, shard: int) -> None:
        self.owned.discard(shard)
        await self._give_up(shard)

    async def _release(self, shard: int) -> None:
        """Stops, then says that the shard is free."""
        await self._drop(shard)
        if shard in self.held:
            self._retry[shard] = (self._clock.monotonic_ms() + RETRY_MS, RETRY_MS // 2)
            await self._let_go(shard)

    async def _let_go(self, shard: int) -> None:
        revision = self.held.pop(shard, None)
        if revision is None:
            return
        try:
            await self._owners.write(f"shard.{shard}", "", revision)
        except UnknownError as error:
            logger.info("shard_not_released", shard=shard, detail=str(error))


def _left_by_others(keys: dict[str, tuple[int, str]], others: set[str]) -> tuple[set[int], int]:
    """The shards that some living replica says it cannot own, and how many say so of none."""
    left: set[int] = set()
    fit = 0
    for replica in others:
        _, _, told = keys.get(f"replica.{replica}", (0, ""))[1].partition(" ")
        found = {int(shard) for shard in told.split(",") if shard.isdigit()}
        left |= found
        fit += not found
    return left, fit
