import msgspec
import pytest
from fencepost.simulator import runs
from fencepost.simulator.options import BASE_RATES, draw

from tests.simulation.regressions import REGRESSIONS


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_seed_that_found_a_bug_finds_it_no_more(name: str) -> None:
    seed, faults = REGRESSIONS[name]
    drawn = draw(seed)
    rates = {**drawn.rates, **{f: drawn.rates.get(f, BASE_RATES[f]) for f in faults}}
    report = runs.run(seed, msgspec.structs.replace(drawn, rates=rates))
    assert report.violations == []
