"""Every mutation is killed: a checker that could not see it would be a guarantee of nothing."""

from typing import Any

import msgspec
import pytest
from fencepost.simulator import runs
from fencepost.simulator.options import BASE_RATES, Options, draw

from tests.simulation.mutants import MUTANTS, Mutant

# Where each was killed last: looked at first, so that a run takes seconds. Not a promise.
KILLED_AT: dict[str, int] = {}


def options_of(seed: int, mutant: Mutant) -> Options:
    drawn = draw(seed)
    added = {fault: drawn.rates.get(fault, BASE_RATES[fault]) for fault in mutant.faults}
    return msgspec.structs.replace(drawn, rates={**drawn.rates, **added, **mutant.rates})


def killed_at(mutant: Mutant) -> int | None:
    first = KILLED_AT.get(mutant.name)
    for seed in ([] if first is None else [first]) + list(range(mutant.seeds)):
        if runs.run(seed, options_of(seed, mutant)).violations:
            return seed
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_simulator_kills(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    assert killed_at(mutant) is not None, f"survived {mutant.seeds} seeds"


@pytest.mark.parametrize("mutant", MUTANTS[:6], ids=lambda m: m.name)
def test_what_kills_a_mutant_passes_without_it(mutant: Mutant) -> None:
    seed: Any = KILLED_AT.get(mutant.name, 0)
    assert runs.run(seed, options_of(seed, mutant)).violations == []
