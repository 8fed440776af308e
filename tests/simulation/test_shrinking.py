"""A failure is shrunk to what a person can read, and a trace can be read back."""

import msgspec
import pytest
from fencepost.simulator import pictures, runs, trace
from fencepost.simulator.options import draw

from tests.simulation.mutants import MUTANTS
from tests.simulation.test_mutants import KILLED_AT, options_of

MUTANT = next(m for m in MUTANTS if m.name == "retry an external effect on the next disk")


def test_a_failure_is_shrunk_to_few_faults_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANT.apply(monkeypatch)
    seed = KILLED_AT.get(MUTANT.name, 0)
    while not (found := runs.run(seed, options_of(seed, MUTANT), tracing=True)).violations:
        seed += 1
    invariant = found.violations[0].invariant
    small = runs.shrink(seed, found.options, invariant)
    again = runs.run(seed, small, tracing=True)
    assert again.violations[0].invariant == invariant
    assert sum(again.faults.values()) < sum(found.faults.values())
    assert len(pictures.relevant(again.trace)) <= 80
    assert "VIOLATED" in {told.kind for told in trace.read_all(again.trace)}


def test_a_spared_fault_does_not_strike() -> None:
    options = draw(3, faults=("receipt_lost",))
    struck = runs.run(3, options).faults["receipt_lost"]
    assert struck
    all_spared = msgspec.structs.replace(options, spared=tuple(range(1, 1000)))
    assert runs.run(3, all_spared).faults == {}
    one_spared = msgspec.structs.replace(options, spared=(1,))
    assert runs.run(3, one_spared, tracing=True).trace != runs.run(3, options, tracing=True).trace


def test_every_line_of_a_trace_can_be_read_back() -> None:
    lines = runs.run(5, tracing=True).trace
    told = trace.read_all(lines)
    assert [trace.line(t.at_ms, t.number, t.kind, t.text) for t in told] == lines
    assert {"ledger", "effect", "receipt", "fault"} <= {t.kind for t in told}


def test_a_line_that_outgrew_its_columns_can_be_read_back() -> None:
    told = trace.Told(123_456_789_012, 98_765_432, "hold ends", "p0 shard 0 lost term")
    assert trace.read(trace.line(*told)) == told
    assert told.words[:2] == ["p0", "shard"]


def test_a_kind_that_would_not_fit_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="at most 10"):
        trace.line(1, 1, "eleven_long", "x")
