"""
One session with one sandbox: a channel to its toolhost, what it said, and what it still owes.

Knows the protocol's conversations (hello, mark, read); knows no NATS and decides nothing. Whoever
makes it is told of receipts, of a moved marker and of the end of the channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from fencepost.core.errors import FencepostError
from fencepost.core.facts import Found, Marked, Ref
from fencepost.core.limits import MIB
from fencepost.core.receipts import Marker
from fencepost.core.steps import SandboxSpec
from fencepost.providers.protocol import Channel
from fencepost.sandbox_gateway import frames
from fencepost.sandbox_gateway.frames import Frames, FramingLostError, Head

# A toolhost that does not take its frames any more is as good as lost.
UNTAKEN_BYTES_MAX: Final = 16 * MIB

_SENT_MAX: Final = 1024

Answer = Callable[[Head | None, bytes], None]


class ChannelEndedError(FencepostError):
    """The channel ended before the answer came."""


class Attachment:
    """
    `on_receipt` takes (attachment, head, body); `on_moved` is called when a heartbeat shows another
    marker than the one that was written; `on_end` once, when the channel has ended by itself.
    """

    def __init__(
        self,
        *,
        sandbox: str,
        session: str,
        nonce_fresh: str,
        asked: int,
        ref: Ref,
        spec: SandboxSpec,
        shard: int,
        key: bytes,
        channel: Channel,
        on_receipt: Callable[[Attachment, Head, bytes], None],
        on_moved: Callable[[Attachment], None],
        on_end: Callable[[Attachment, str], None],
        now_ms: Callable[[], int],
    ) -> None:
        self.sandbox = sandbox
        self.session = session
        self.nonce_fresh = nonce_fresh
        self.asked = asked
        self.ref = ref
        self.spec = spec
        self.shard = shard
        self.key = key
        self.found: Found | None = None
        self.marked: Marked | None = None
        self.marked_at_ms = 0
        self.heard_at_ms = self.beat_at_ms = now_ms()
        self.beat: Head | None = None
        self.ended = False
        self._sent_at_ms: dict[str, int] = {}
        self._channel = channel
        self._on_receipt = on_receipt
        self._on_moved = on_moved
        self._on_end = on_end
        self._now_ms = now_ms
        self._frames = Frames()
        self._answers: dict[str, Answer] = {}
        self._talks: dict[str, Answer] = {}
        self._count = 0

    # -- the stream ----------------------------------------------------------------------------

    def start(self) -> None:
        self._channel.start(self._take, self._channel_ended)

    def write(self, data: bytes) -> None:
        self._channel.write(data)
        if self._channel.buffered_bytes > UNTAKEN_BYTES_MAX:
            self._fail("frames_untaken")

    def note_sent(self, call: str) -> None:
        """Remembers when a call was first sent, for the measure of how long it took."""
        if len(self._sent_at_ms) >= _SENT_MAX:
            self._sent_at_ms.clear()  # calls that were never answered: only a measure is lost
        self._sent_at_ms.setdefault(call, self._now_ms())

    def took_ms(self, call: str) -> int | None:
        sent_at_ms = self._sent_at_ms.pop(call, None)
        return None if sent_at_ms is None else self._now_ms() - sent_at_ms

    async def drain(self) -> None:
        await self._channel.drain()

    def _take(self, data: bytes) -> None:
        self.heard_at_ms = self._now_ms()
        try:
            taken = self._frames.feed(data)
        except FramingLostError as error:
            self._fail(f"framing_lost: {error}")
            return
        for head, body in taken:
            if head.k == "receipt":
                self._on_receipt(self, head, body)
            elif head.k == "heartbeat":
                self._take_heartbeat(head)
            elif (answer := self._answers.pop(head.id, None)) is not None:
                answer(head, body)
            elif (talk := self._talks.get(head.id)) is not None:
                talk(head, body)

    def _take_heartbeat(self, head: Head) -> None:
        self.beat_at_ms = self.heard_at_ms
        marked = self.marked
        if marked is None:
            return
        if (head.epoch, head.session, head.nonce) != (marked.epoch, self.session, marked.nonce):
            self._on_moved(self)
            return
        self.beat = head

    def _channel_ended(self, reason: str) -> None:
        already = self.ended
        self.ended = True
        answers = [*self._answers.values(), *self._talks.values()]
        self._answers.clear()
        self._talks.clear()
        for answer in answers:
            answer(None, b"")
        if not already:
            self._on_end(self, reason)

    def _fail(self, reason: str) -> None:
        if not self.ended:
            self._channel_ended(reason)

    async def end(self, *, grace_s: float) -> None:
        """Ends the toolhost on purpose: `on_end` is not called."""
        self.ended = True
        talks, self._talks = list(self._talks.values()), {}
        for talk in talks:
            talk(None, b"")
        await self._channel.end(grace_s=grace_s)

    def last_words(self) -> str:
        return self._channel.last_words()

    # -- conversations -------------------------------------------------------------------------

    def ask(self, frame: Callable[[str], bytes], answer: Answer) -> str:
        """Sends a frame made for a fresh id; `answer` gets its reply, or None at the end."""
        self._count += 1
        id_ = str(self._count)
        if self.ended:
            answer(None, b"")
            return id_
        self._answers[id_] = answer
        self.write(frame(id_))
        return id_

    def talk(self, frame: Callable[[str], bytes], answer: Answer) -> str:
        """As `ask`, for many replies: `answer` gets all of them until it is forgotten."""
        id_ = self.ask(frame, answer)
        if self._answers.pop(id_, None) is not None:
            self._talks[id_] = answer
        return id_

    def forget(self, id_: str) -> None:
        self._answers.pop(id_, None)
        self._talks.pop(id_, None)

    async def _converse(self, frame: Callable[[str], bytes], timeout_s: float) -> Head:
        answered: asyncio.Future[Head | None] = asyncio.get_running_loop().create_future()

        def take(head: Head | None, _body: bytes) -> None:
            if not answered.done():
                answered.set_result(head)

        id_ = self.ask(frame, take)
        try:
            async with asyncio.timeout(timeout_s):
                head = await answered
        except TimeoutError as error:
            self.forget(id_)
            raise ChannelEndedError("toolhost_silent") from error
        if head is None:
            raise ChannelEndedError("channel_ended")
        return head

    async def hello(self, *, gateway: str, timeout_s: float) -> Found:
        """Reads the disk's marker. Raises `ChannelEndedError`."""
        head = await self._converse(frames.hello, timeout_s)
        if head.k != "hello":
            raise ChannelEndedError(f"toolhost_refused: {head.reason} {head.detail}")
        marker = head.marker
        self.found = Found(
            sandbox=self.sandbox,
            gateway=gateway,
            session=self.session,
            ref=self.ref,
            marker=None
            if marker is None
            else Marker(
                epoch=marker.epoch,
                session=marker.session,
                nonce=marker.nonce,
                instance=head.instance or "",
            ),
            journal_seq=head.journal_seq,
            nonce_fresh=self.nonce_fresh,
            asked=self.asked,
        )
        return self.found

    async def mark(self, *, epoch: int, nonce: str, timeout_s: float) -> Head:
        """Has the marker written; the answer is `marked` or `refused`."""

        def frame(id_: str) -> bytes:
            return frames.mark(id_, epoch=epoch, session=self.session, nonce=nonce)

        return await self._converse(frame, timeout_s)
