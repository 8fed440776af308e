"""What the benchmarks compute from what they measured."""

from __future__ import annotations

import asyncio
import os

import pytest

from bench import rig


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_a_percentile_is_the_smallest_value_that_the_share_does_not_exceed(
    share: float, expected: float
) -> None:
    assert rig.percentile([1.0, 2.0, 3.0, 4.0], share) == expected


def test_the_median_of_rounds_keeps_the_number_in_flight() -> None:
    rows: list[rig.Measurement] = [
        {"in_flight": 64, "steps_s": 100.0},
        {"in_flight": 64, "steps_s": 900.0},
        {"in_flight": 64, "steps_s": 300.0},
    ]
    assert rig.medians(rows) == {"in_flight": 64, "steps_s": 300.0}


async def test_a_closed_loop_keeps_as_many_steps_running_as_asked() -> None:
    running, most = 0, 0

    async def step(_lane: int, _number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1

    row = await rig.measure(step, in_flight=5, seconds=0.1, warm_up_seconds=0.01)
    assert most == 5
    assert row["in_flight"] == 5
    assert row["p50_ms"] >= 2.0
    assert row["p99_ms"] >= row["p50_ms"]
    # The step that ends after the window does not count, so the rate is at most what was begun.
    assert row["steps_s"] * 0.1 <= row["steps"]


async def test_the_processor_time_of_every_process_is_told_by_role() -> None:
    async def step(_lane: int, _number: int) -> None:
        await asyncio.sleep(0.001)

    row = await rig.measure(
        step,
        in_flight=1,
        seconds=0.05,
        warm_up_seconds=0.0,
        processes=lambda: [("server", os.getpid())],
    )
    assert {"us_client", "us_server"} <= set(row)
    assert f"server {row['us_server']}" in rig.processor(row)


async def test_a_loop_in_which_no_step_ends_is_an_error_and_no_rate_of_zero() -> None:
    async def step(_lane: int, _number: int) -> None:
        await asyncio.sleep(0.05)

    with pytest.raises(RuntimeError, match="no step ended"):
        await rig.measure(step, in_flight=1, seconds=0.01, warm_up_seconds=0.0)
