"""Every mutation is killed: a checker that could not see it would be a guarantee of nothing."""

import msgspec
import pytest
from fencepost.simulator import runs
from fencepost.simulator.options import BASE_RATES, SANDBOX_FAULTS, Options, draw

from tests.simulation.mutant import Mutant
from tests.simulation.mutants import MUTANTS

# Where each was killed last: looked at first, so that a run takes seconds. Not a promise.
KILLED_AT: dict[str, int] = {
    "keep the state after a lost term": 7,
    "judge what a checkpoint holds by its newest line alone": 6567,
    "let the journal of before a restore vouch for external effects": 7046,
    "make effects before the batch is accepted": 8,
    "compare only the step id": 10,
    "skip the generation in the join": 19,
    "skip the second marker reading in the join": 19,
    "skip the second marker reading under the tool": 5,
    "believe a reading of the disk that is out of date": 50,
    "call an unanswered attach a lost disk": 8,
    "take an older point of the disk for a blank one": 4,
    "keep the epoch of a restored disk": 1,
    "ignore a journal that went back between finding and marking": 5,
    "retry an external effect on the next disk": 7,
    "let an older snapshot vouch for external effects": 11,
    "retry after a cancel": 2,
    "start a carried attempt without its session's fence": 5,
    "hand out a fence where no epoch is live": 2,
    "forget that something is owed to a sandbox": 8,
    "settle an ambiguous create as if it had failed": 32,
    "take one call's failure for the end of its create id": 263,
    "let a second disk be made for a lost one that is not gone": 8,
    "a revocation that looks at the attempt alone": 264,
    "forget what was read of a disk when its marking comes to nothing": 90,
    "break the chain of what is sent again": 19,
    "ask for a create again at another authority": 22,
    "take what one authority lists of another for its own": 25,
    "say that an end was observed by who observes nothing": 183,
    "forget at a takeover which DAGs owe an answer": 180,
    "call a carried attempt that was undone one that never began": 103780,
    "ask an operator once, whoever was not there to hear it": 356,
    "know a batch again by owner, term and number alone": 1447,
}


def options_of(seed: int, mutant: Mutant) -> Options:
    drawn = draw(seed)
    dags = max(drawn.dags, 1) if mutant.dags else 0
    kept = BASE_RATES if mutant.dags else SANDBOX_FAULTS
    rates = {fault: rate for fault, rate in drawn.rates.items() if fault in kept}
    rates |= {fault: drawn.rates.get(fault, BASE_RATES[fault]) for fault in mutant.faults}
    return msgspec.structs.replace(
        drawn,
        dags=dags,
        checkpoints=drawn.checkpoints if mutant.checkpoints else 0,
        rates={**rates, **mutant.rates},
    )


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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_what_kills_a_mutant_passes_without_it(mutant: Mutant) -> None:
    seed = KILLED_AT.get(mutant.name, 0)
    assert runs.run(seed, options_of(seed, mutant)).violations == []


def test_the_notes_are_about_mutants_that_exist() -> None:
    assert set(KILLED_AT) <= {mutant.name for mutant in MUTANTS}
