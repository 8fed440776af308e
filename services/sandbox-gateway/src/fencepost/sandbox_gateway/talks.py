"""
A conversation of many frames with one toolhost: those of a checkpoint, or of a restore.

Frames wait here until they are taken. How many bytes of them may wait is the caller's to bound:
`is_welcome` is asked for each before it is kept, and one that is not ends the conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fencepost.sandbox_gateway.attachment import Attachment, ChannelEndedError
from fencepost.sandbox_gateway.frames import Head

Item = tuple[Head, bytes]


class Talk:
    """Use as a context manager; frames under its id come to it alone."""

    def __init__(self, attachment: Attachment, is_welcome: Callable[[Head, bytes], bool]) -> None:
        self._attachment = attachment
        self._is_welcome = is_welcome
        self._frames: asyncio.Queue[Item | None] = asyncio.Queue()
        self._broken = ""
        self.id = ""

    def open(self, frame: Callable[[str], bytes]) -> None:
        self.id = self._attachment.talk(frame, self._take)

    def close(self) -> None:
        self._attachment.forget(self.id)

    def _take(self, head: Head | None, body: bytes) -> None:
        if head is not None and not self._is_welcome(head, body):
            self._broken = f"a frame {head.k!r} that was not asked for"
            head = None
        self._frames.put_nowait(None if head is None else (head, body))

    async def next(self, timeout_s: float) -> Item:
        """The next frame. Raises `ChannelEndedError` where none comes any more, or in time."""
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._frames.get()
        except TimeoutError as error:
            raise ChannelEndedError("toolhost_silent") from error
        if item is None:
            raise ChannelEndedError(self._broken or "channel_ended")
        return item
