"""A connection that records what is sent and answers what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fencepost.core.errors import UnknownError


class Message:
    """What a sink is handed: as much of a NATS message as the client looks at."""

    def __init__(self, subject: str, body: Any) -> None:
        self.subject = subject
        self.data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self.headers = None
        self.reply = ""


class Subscription:
    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    async def unsubscribe(self) -> None:
        self._ended()


class FakeLink:
    """`respond(subject, data)` gives the answer's body, or None for silence."""

    def __init__(self) -> None:
        self.published: list[tuple[str, bytes]] = []
        self.respond: Callable[[str, bytes], Any] = lambda _subject, _data: {"seq": 1}
        self.sinks: dict[str, Callable[[Any], None]] = {}
        self.back: list[Callable[[], None]] = []
        self._answers: dict[str, Callable[[Any], None]] = {}
        self._count = 0

    def expect(self, answer: Callable[[Any], None]) -> str:
        self._count += 1
        self._answers[str(self._count)] = answer
        return str(self._count)

    def forget(self, reply: str) -> None:
        self._answers.pop(reply, None)

    def publish(self, subject: str, data: bytes, reply: str = "") -> bool:
        self.published.append((subject, data))
        body = self.respond(subject, data)
        answer = self._answers.pop(reply, None) if body is not None else None
        if answer is not None:
            asyncio.get_running_loop().call_soon(answer, Message(subject, body))
        return True

    def answer(self, reply: str, body: Any) -> None:
        """Answers late, at the reply subject of the nth `expect`, counted from 1."""
        self._answers.pop(reply)(Message(reply, body))

    async def call(self, subject: str, data: bytes, *, timeout_s: float) -> Message:
        self.published.append((subject, data))
        body = self.respond(subject, data)
        if body is None:
            raise UnknownError(f"{subject}: no answer within {timeout_s:g} s")
        return Message(subject, body)

    async def subscribe_raw(self, subject: str, take: Callable[[Any], None]) -> Subscription:
        self.sinks[subject] = take
        return Subscription(lambda: self.sinks.pop(subject))

    def on_back(self, call: Callable[[], None]) -> None:
        self.back.append(call)

    def off_back(self, call: Callable[[], None]) -> None:
        self.back.remove(call)

    def event(self, sandbox: str, step: str, state: str, **body: Any) -> None:
        """Delivers a public event of a step to whoever subscribed to it."""
        sink = self.sinks[f"fp.v1.event.step.{sandbox}.*.{state}"]
        sink(Message(f"fp.v1.event.step.{sandbox}.{step}.{state}", body))
