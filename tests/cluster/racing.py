"""Appenders that race for one head of the ledger, and whether each head was taken once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fencepost.core.errors import UnknownError
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link
from fencepost.runtime.ports import AppendRefused, AppendUnknown, Valid

SUBJECT = "fp.v1.ledger.toy.1"
PAUSE_S = 0.02


class Race:
    """
    Each racer names what it believes to be the last message, and appends on that condition.

    Afterwards every message must follow the one that it names, and what was acknowledged be there.
    """

    def __init__(self) -> None:
        self.acknowledged: dict[int, str] = {}
        self.twice: list[int] = []
        self.refused = 0
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, urls: list[str]) -> None:
        self._tasks = [
            asyncio.create_task(self._run(url, f"racer-{number}"))
            for number, url in enumerate(urls)
        ]

    async def stop(self) -> None:
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _run(self, url: str, name: str) -> None:
        link = await Link.connect(url, name=name)
        log = JetStreamLog(link)
        head = count = 0
        while not self._stopping.is_set():
            count += 1
            message = {"id": f"{name}.{count}", "prev": head}
            try:
                seq = await log.append(SUBJECT, msgspec.json.encode(message), head)
            except (AppendRefused, AppendUnknown) as error:
                self.refused += isinstance(error, AppendRefused)
                got = await log.last(SUBJECT)
                head = got.seq if isinstance(got, Valid) else head
                await asyncio.sleep(PAUSE_S)
            else:
                if seq in self.acknowledged:
                    self.twice.append(seq)
                self.acknowledged[seq] = f"{name}.{count}"
                head = seq
        await link.close()

    async def problems(self, link: Link) -> list[str]:
        """Reads what is stored and compares it with what was acknowledged."""
        stored: dict[int, Any] = {}
        async with asyncio.timeout(60):
            while not stored:
                try:
                    async for seq, payload in JetStreamLog(link).read(SUBJECT, 1):
                        stored[seq] = msgspec.json.decode(payload)
                except UnknownError:
                    stored = {}
        found = [f"{seq} was acknowledged to two" for seq in self.twice]
        last = 0
        for seq, message in stored.items():
            if message["prev"] != last:
                found.append(f"{seq} was decided on {message['prev']}, and {last} was before it")
            last = seq
        for seq, name in self.acknowledged.items():
            if stored.get(seq, {}).get("id") != name:
                found.append(f"{seq} was acknowledged to {name}, there is {stored.get(seq)}")
        return found
