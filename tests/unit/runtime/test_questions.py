"""Questions to an owner: each gets an answer, whatever it is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fencepost.runtime.questions import Questions

from tests.contracts import until
from tests.memory import MemoryBus


class _Question(msgspec.Struct):
    what: str


async def _view(data: bytes) -> Any:
    return {"what": msgspec.json.decode(data, type=_Question).what}


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'{"what": "all"}', None),
        (b"{", "refused"),
        (b'{"what": "all", "more": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "refused"),
    ],
    ids=["good", "torn", "nested without end"],
)
async def test_s008_each_question_is_answered(data: bytes, status: str | None) -> None:
    bus = MemoryBus()
    answers: list[Any] = []
    await bus.subscribe(
        "answers", lambda _subject, data, _reply: answers.append(msgspec.json.decode(data))
    )
    questions = Questions(bus, _view)
    questions.take("ask", data, "answers")
    await until(lambda: len(answers) == 1)
    assert answers[0].get("status") == status
    await questions.close()
