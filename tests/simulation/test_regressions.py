import pytest
from fencepost.simulator import runs

from tests.simulation.mutant import Mutant
from tests.simulation.mutants import MUTANTS
from tests.simulation.regressions import RAISED, REGRESSIONS
from tests.simulation.test_mutants import options_of

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_seed_that_found_a_bug_finds_it_no_more(name: str) -> None:
    seed, mutant = REGRESSIONS[name]
    assert runs.run(seed, options_of(seed, BY_NAME[mutant])).violations == []


@pytest.mark.parametrize("name", RAISED)
def test_a_seed_that_raised_raises_no_more(name: str) -> None:
    seed, rates = RAISED[name]
    options = options_of(seed, Mutant("none", "", "", "", "", rates=rates))
    assert runs.run(seed, options).violations == []


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_seed_finds_its_bug_where_it_is_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, mutant = REGRESSIONS[name]
    BY_NAME[mutant].apply(monkeypatch)
    assert runs.run(seed, options_of(seed, BY_NAME[mutant])).violations
