"""What the benchmark of several ledgers computes from what it measured."""

from __future__ import annotations

from bench import ledgers, rig


def _row(rate: float) -> rig.Measurement:
    return {"in_flight": 64, "steps_s": rate}


def test_a_ratio_is_of_neighbours_in_time() -> None:
    """A round on a busy machine is slow on both sides, and says as much as another."""
    rounds = [
        {1: _row(1000), 3: _row(1500)},
        {1: _row(100), 3: _row(200)},
        {1: _row(10), 3: _row(10)},
    ]
    one, three = ledgers.summary(rounds)
    assert (one["ledgers"], one["steps_s"], one["ratio"]) == (1, 100, 1.0)
    assert (three["ledgers"], three["steps_s"], three["ratio"]) == (3, 200, 1.5)
