"""What a session makes of providers that announce, that fail, and that say nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fencepost.core.facts import Ref
from fencepost.providers.protocol import Notice
from fencepost.sandbox_gateway import notices
from fencepost.sandbox_gateway.notices import Notices


class Provider:
    """Announces all that it is asked about, each time; `failures`: what it raises before that."""

    def __init__(self, name: str, *failures: Exception) -> None:
        self._name = name
        self._failures = list(failures)
        self.asked = 0
        self.traits = SimpleNamespace(names=lambda ref: ref.provider == name)

    async def notices(self, refs: Collection[Ref]) -> Sequence[Notice]:
        self.asked += 1
        if self._failures:
            raise self._failures.pop(0)
        return [Notice(ref=ref, grace_ms=1_000) for ref in refs]


def attached(name: str) -> Any:
    ref = Ref(provider=name, authority="here", native_id=name, instance="i1")
    return SimpleNamespace(sandbox=name, session=f"{name}-1", ref=ref, marked=SimpleNamespace())


async def heard(monkeypatch: pytest.MonkeyPatch, *providers: Provider) -> list[str]:
    """Who was announced when each of the providers had been asked five times."""
    monkeypatch.setattr(notices, "LOOK_S", 0.0)
    told: list[str] = []
    here = {name: attached(name) for name in ("a", "b")}
    named = cast("Any", dict(zip("ab", providers, strict=True)))
    running = asyncio.ensure_future(
        Notices(
            named, attached=here, announce=lambda attachment, _ms: told.append(attachment.sandbox)
        ).run()
    )
    async with asyncio.timeout(30):
        while not running.done() and min(each.asked for each in providers) < 5:
            await asyncio.sleep(0.001)
    assert not running.done(), "it looks for as long as the session lasts"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return told


async def test_each_is_announced_once_however_often_its_provider_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sorted(await heard(monkeypatch, Provider("a"), Provider("b"))) == ["a", "b"]


async def test_a_provider_that_fails_ends_neither_its_own_notices_nor_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = Provider("a", OSError("no such folder"), OSError("no such folder"), KeyError("x"))
    assert await heard(monkeypatch, failing, Provider("b")) == ["b", "a"]
