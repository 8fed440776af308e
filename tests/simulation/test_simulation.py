"""The simulator over fixed seeds: nothing is violated, everything settles, equal seeds are equal."""

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from fencepost.simulator import __main__ as command
from fencepost.simulator import batches, checkers, ledger, runs
from fencepost.simulator.options import ENABLERS, FAULTS, draw
from fencepost.simulator.simulation import Simulation

SEEDS = range(24)


def test_s166_fixed_seeds_violate_nothing() -> None:
    summary = batches.run_many([batches.Job(seed) for seed in SEEDS])
    assert [(r.seed, r.violations) for r in summary.failures] == []
    assert summary.outcomes["committed"] > 200
    assert summary.outcomes["compensated"] > 50
    assert not {"pending", "fenced", "indeterminate"} & set(summary.outcomes)


def test_without_faults_every_step_commits() -> None:
    for seed in range(4):
        options = msgspec.structs.replace(draw(seed, faults=()), dags=0)
        report = runs.run(seed, options)
        assert report.violations == []
        assert report.faults == {}
        assert set(report.outcomes) == {"committed"}


def test_without_faults_every_dag_is_answered_in_time() -> None:
    for seed in range(4):
        options = msgspec.structs.replace(draw(seed, faults=()), dags=4)
        simulation = Simulation(seed, options)
        simulation.run()
        assert simulation.world.violations == []
        assert {view.verdict for view in simulation.auditor.dags.values()} <= {
            "confirmed",
            "nothing_held",
        }
        assert len(simulation.auditor.dags) == 4


def test_s024_every_fault_class_is_met_alone_and_violates_nothing() -> None:
    for fault in FAULTS:
        for seed in range(20):
            report = runs.run(seed, draw(seed, faults=(fault, *ENABLERS.get(fault, ()))))
            assert report.violations == [], (fault, seed)
            if fault in report.faults:
                break
        else:
            pytest.fail(f"{fault} is never met")


def test_every_promise_is_judged() -> None:
    summary = batches.run_many([batches.Job(seed) for seed in range(4)])
    judged = {kind.invariant for kind in checkers.ALL}
    assert {name for name, count in summary.checks.items() if count} == judged


def test_the_same_seed_is_the_same_run() -> None:
    first = runs.run(3, tracing=True)
    assert runs.run(3, tracing=True) == first
    # What is only watched is not changed by it.
    assert msgspec.structs.replace(first, trace=[]) == runs.run(3)
    assert runs.run(4, tracing=True).trace != first.trace


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_the_same_seed_is_the_same_run_under_another_hash_seed(hash_seed: str) -> None:
    program = (
        "import hashlib; from fencepost.simulator import runs\n"
        "trace = runs.run(7, tracing=True).trace\n"
        "print(len(trace), hashlib.sha256('\\n'.join(trace).encode()).hexdigest())"
    )

    def of(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
        )
        return done.stdout

    assert of(hash_seed) == of("0")


def test_one_fault_class_alone_is_met_alone() -> None:
    summary = batches.run_many([batches.Job(seed, ("gateway_pause",)) for seed in range(3)])
    assert set(summary.faults) == {"gateway_pause"}


def test_s023_preemption_and_a_late_receipt_together() -> None:
    faults = ("sandbox_preempted", "receipt_delayed")
    summary = batches.run_many([batches.Job(seed, faults) for seed in range(6)])
    assert summary.failures == []
    assert set(summary.faults) == set(faults)


def test_several_processes_give_the_same_sum_as_one() -> None:
    jobs = [batches.Job(seed) for seed in range(4)]
    one = batches.run_many(jobs)
    two = batches.run_many(jobs, processes=2)
    one.seconds = two.seconds = 0.0
    assert one == two


def test_the_command_says_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--runs", "2", "--faults", "channel_cut", "--json"]) == 0
    last = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])
    assert last["violations"] == 0
    assert last["seeds"] == 2
    assert last["events"] > 100
    assert last["events_per_s"] > 0


def test_an_unknown_fault_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--runs", "1", "--faults", "no_such_fault"])
    assert ended.value.code == 2
    assert "no_such_fault" in capsys.readouterr().err


def test_the_guarantees_page_names_every_promise_and_fault() -> None:
    page = batches.guarantees(batches.run_many([batches.Job(0)]))
    for kind in checkers.ALL:
        assert f"| {kind.invariant} | {kind.promises} |" in page
    for fault in FAULTS:
        assert f"`{fault}`" in page


def test_nothing_hangs_on_an_order_between_the_shards_of_different_ledgers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every shard gets sequences of its own, as it does where each has a stream of its own."""
    together = ledger.SimulatedLog._arrived
    counted: set[int] = set()

    def apart(self: ledger.SimulatedLog, asked: Any) -> None:
        self._seq = self.head(asked.shard)
        counted.add(asked.shard)
        together(self, asked)

    monkeypatch.setattr(ledger.SimulatedLog, "_arrived", apart)
    for seed in range(8):
        assert runs.run(seed, draw(seed)).violations == []
    assert len(counted) > 1
