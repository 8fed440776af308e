"""
Asks providers whether they will take away what is attached here, and says it once per session.

A notice is a last chance to save something, and evidence of nothing: the sandbox goes on until it
is observed gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog
from fencepost.providers.protocol import Provider
from fencepost.sandbox_gateway.attachment import Attachment

LOOK_S: Final = 1.0
SHARE: Final = 20
"""Of the time, at most one part in so many goes into asking one provider."""

logger = structlog.get_logger(__name__)


class Notices:
    """`attached` is by sandbox, as it is at any time; `announce` takes a notice's milliseconds."""

    def __init__(
        self,
        providers: Mapping[str, Provider],
        *,
        attached: Mapping[str, Attachment],
        announce: Callable[[Attachment, int], None],
    ) -> None:
        self._providers = providers
        self._attached = attached
        self._announce = announce
        self._announced: set[str] = set()

    def is_announced(self, attachment: Attachment) -> bool:
        return attachment.session in self._announced

    async def run(self) -> None:
        """Until it is cancelled. One provider that is slow keeps no other one waiting."""
        await asyncio.gather(*(self._follow(name) for name in self._providers))

    async def _follow(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        complaint = ""
        while True:
            began = loop.time()
            try:
                await self._look(name)
                complaint = ""
            except Exception as error:
                # Whatever ails one provider, the next notice may be read, and the others' are.
                if complaint != (complaint := repr(error)):
                    logger.exception("notices_not_read", provider=name)
            await asyncio.sleep(max(LOOK_S, SHARE * (loop.time() - began)))

    async def _look(self, name: str) -> None:
        provider = self._providers[name]
        here = {
            attachment.ref: attachment
            for attachment in self._attached.values()
            if provider.traits.names(attachment.ref) and attachment.marked is not None
        }
        self._announced &= {attachment.session for attachment in self._attached.values()}
        waiting = {ref: one for ref, one in here.items() if not self.is_announced(one)}
        for notice in await provider.notices(waiting):
            attachment = waiting.get(notice.ref)
            if attachment is None or self._attached.get(attachment.sandbox) is not attachment:
                continue
            self._announced.add(attachment.session)
            logger.warning(
                "preemption_announced",
                sandbox=attachment.sandbox,
                provider=name,
                grace_ms=notice.grace_ms,
                detail=notice.detail,
            )
            self._announce(attachment, notice.grace_ms)
