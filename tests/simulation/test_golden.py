"""
Fixed seeds have the traces that the repository says they have, under whatever runs this.

Whoever changes the world on purpose renews them: `make golden ARGS=--renew`.
"""

import re
import sys
from pathlib import Path

import pytest

from scripts import golden, make_drawing


@pytest.mark.parametrize("seed", golden.SEEDS)
def test_a_fixed_seed_has_the_trace_that_it_always_had(seed: int) -> None:
    assert golden.digest(seed) == golden.kept()[seed], (
        "the simulated world has changed: if it was meant to, `make golden ARGS=--renew`"
    )


def test_the_goldens_are_those_of_the_fixed_seeds() -> None:
    assert tuple(golden.kept()) == golden.SEEDS


def test_another_interpreter_is_held_to_the_same_traces() -> None:
    version, found = golden.under(sys.executable, golden.SEEDS[:1])
    assert version == ".".join(map(str, sys.version_info[:3]))
    assert golden.differing(found, {0: golden.kept()[0]}) == []


def test_another_trace_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(golden, "FILE", tmp_path / "golden.json")
    monkeypatch.setattr(golden, "SEEDS", (1,))
    golden.renew()
    kept = golden.kept()
    assert golden.differing(kept, kept) == []
    assert golden.differing({1: kept[1] + "0"}, kept) == [1]
    assert golden.differing({}, kept) == [1]


def test_the_drawing_in_the_documents_is_of_this_world() -> None:
    """It shows a receipt that comes after its disk was lost, refused in the next epoch."""
    drawn = make_drawing.draw()
    assert drawn == make_drawing.FILE.read_text(encoding="utf-8"), (
        "the simulated world has changed: if it was meant to, `make golden ARGS=--renew`"
    )
    assert "receipt_refused" in drawn
    assert {"epoch 1", "epoch 2"} <= set(re.findall(r">(epoch \d+)<", drawn))
