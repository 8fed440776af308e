"""The soak of `make soak`, as long as a build can wait for it: memory, doubled effects, `verify`."""

from __future__ import annotations

import pytest

from scripts import soak

STEPS = 3_000
BASE = 1_000


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.budget(90)
async def test_thousands_of_steps_under_reclaims_leave_a_clean_ledger_and_flat_memory() -> None:
    said: list[str] = []
    report = await soak.soak(steps=STEPS, reclaim_every=100, say=said.append)
    assert report.problems(base=BASE) == [], "\n".join(said)
    assert report.steps == STEPS
    assert report.reclaims >= 20
    assert report.retried > 0, "no reclaim met a step on its way"
    assert report.states["committed"] >= STEPS - report.reclaims


def test_growth_is_told_as_a_share_of_what_was_there_before() -> None:
    report = soak.Report(seed=1)
    report.rss_kib = {1_000: {"a": 100, "b": 200}, 3_000: {"a": 111, "b": 210}}
    assert report.growth(1_000) == {"a": 0.11, "b": 0.05}
    assert report.problems(1_000) == ["a grew by 11.0% from step 1000 on"]
    assert report.problems(1_000, growth_max=0.12) == []
