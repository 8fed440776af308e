"""
What this gateway's providers list, page by page, for sweepers.

Only hands and eyes: nothing here is judged. A walk is kept for a while between its pages, since a
provider may name everything at once, which is more than one message holds; one that was forgotten
is said to be over, never to be complete.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from fencepost.contracts.messages import ListReply, ListRequest
from fencepost.core import sweeping
from fencepost.core.sweeping import Listed
from fencepost.providers.protocol import LABEL_ACQUISITION, LABEL_CREATE, LABEL_DAG, Provider
from fencepost.runtime.link import Link

PAGE: Final = 500
WALKS_MAX: Final = 4
LABELS: Final = (
    sweeping.LABEL_DEPLOYMENT,
    sweeping.LABEL_SANDBOX,
    LABEL_CREATE,
    LABEL_DAG,
    LABEL_ACQUISITION,
)
LABEL_CHARS_MAX: Final = 200

_REQUEST: Final = msgspec.json.Decoder(ListRequest)
_encode: Final = msgspec.json.Encoder().encode


class _Walk:
    """One reading of a provider's whole list. `ended`: the provider has said its last page."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.waiting: list[Listed] = []
        self.token = ""
        self.ended = False
        self.complete = False

    async def next_page(self) -> list[Listed]:
        while len(self.waiting) < PAGE and not self.ended:
            page = await self.provider.list(self.token)
            self.waiting += [Listed(item.ref, _ours(item.labels)) for item in page.items]
            self.token = page.next_token
            self.ended = not page.next_token
            self.complete = page.complete
        items, self.waiting = self.waiting[:PAGE], self.waiting[PAGE:]
        return items

    @property
    def is_over(self) -> bool:
        return self.ended and not self.waiting


def _ours(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that we make, cut short: others may be of any number and length."""
    return {key: labels[key][:LABEL_CHARS_MAX] for key in LABELS if key in labels}


class Listings:
    """Answers requests for pages, one task each. `close` ends what is being answered."""

    def __init__(self, link: Link, providers: Mapping[str, Provider], deployment: str) -> None:
        self._link = link
        self._providers = {p.traits.authority: p for p in providers.values()}
        self._deployment = deployment
        self._walks: dict[str, _Walk] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, msg: Any) -> None:
        """Takes one request; the reply comes when the provider has answered."""
        if msg.reply:
            task = asyncio.get_running_loop().create_task(self._answer(msg.data, msg.reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._walks.clear()

    async def _answer(self, data: bytes, reply: str) -> None:
        try:
            request = _REQUEST.decode(data)
        except msgspec.DecodeError as error:
            self._say(reply, problem=f"malformed: {error}")
            return
        provider = self._providers.get(request.authority)
        if provider is None:
            self._say(reply, problem="another_authority")
            return
        walk = self._walks.pop(request.token, None) if request.token else _Walk(provider)
        if walk is None or walk.provider is not provider:
            self._say(reply, problem="walk_is_over")
            return
        items = await walk.next_page()
        token = "" if walk.is_over else self._keep(walk)
        self._say(
            reply,
            items=items,
            token=token,
            complete=walk.is_over and walk.complete,
            observes_gone=provider.traits.capabilities.observes_gone,
        )

    def _keep(self, walk: _Walk) -> str:
        while len(self._walks) >= WALKS_MAX:
            del self._walks[next(iter(self._walks))]
        token = secrets.token_hex(8)
        self._walks[token] = walk
        return token

    def _say(self, reply: str, **said: Any) -> None:
        self._link.publish(reply, _encode(ListReply(deployment=self._deployment, **said)))
