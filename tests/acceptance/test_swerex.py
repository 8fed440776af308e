"""A SWE-ReX server is replaced at its own address, and its late 200 commits nothing."""

from pathlib import Path
from typing import Any

import pytest

from scripts.swerex_demo import story

pytestmark = [pytest.mark.slow]


async def test_the_replacement_behind_the_same_address_is_told_from_the_first(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    report = await story.play(tmp_path, said.append)
    assert report["plain"] == {"answers_differ": False, "file_present": False}
    fenced = report["fencepost"]
    assert (fenced["state"], fenced["epoch_before"], fenced["epoch"]) == ("committed", 1, 2)
    assert fenced["late_receipts_refused"] >= 1
    assert fenced["file_present"]
    assert fenced["verify"] == "clean"
    assert story.is_as_it_must_be(report)
    assert any("200 {}" in line for line in said)


def spoiled(report: dict[str, Any], half: str, **values: Any) -> dict[str, Any]:
    return {**report, half: {**report[half], **values}}


def test_a_story_that_went_wrong_is_not_told_as_right() -> None:
    right = {
        "plain": {"answers_differ": False, "file_present": False},
        "fencepost": {
            "epoch_before": 1,
            "state": "committed",
            "epoch": 2,
            "late_receipts_refused": 1,
            "file_present": True,
            "verify": "clean",
        },
    }
    assert story.is_as_it_must_be(right)
    for half, name, value in (
        ("plain", "file_present", True),
        ("plain", "answers_differ", True),
        ("fencepost", "epoch", 1),
        ("fencepost", "state", "fenced"),
        ("fencepost", "late_receipts_refused", 0),
        ("fencepost", "file_present", False),
        ("fencepost", "verify", ["I1"]),
    ):
        assert not story.is_as_it_must_be(spoiled(right, half, **{name: value}))
