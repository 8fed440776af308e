"""Every fault class alone and in pairs: a plan that leaves nothing out, and a table of what met."""

import itertools

import msgspec
import pytest
from fencepost.simulator import __main__ as command
from fencepost.simulator import batches, pairs
from fencepost.simulator.options import ENABLERS, FAULTS


def test_the_plan_has_every_class_and_every_pair_once_a_round() -> None:
    jobs = pairs.plan(2, first=1_000)
    planned = [job.strikes for job in jobs]
    wanted = [(fault,) for fault in FAULTS] + list(itertools.combinations(FAULTS, 2))
    assert planned == wanted * 2
    assert len({job.seed for job in jobs}) == len(jobs)


def test_parts_share_the_plan_out_without_a_rest() -> None:
    whole = pairs.plan(1)
    parts = [pairs.plan(1, part=part, parts=7) for part in range(1, 8)]
    assert sorted(job.seed for part in parts for job in part) == [job.seed for job in whole]


def test_what_a_class_needs_comes_with_it() -> None:
    assert set(ENABLERS) <= set(FAULTS)
    assert {name for names in ENABLERS.values() for name in names} <= set(FAULTS)
    job = next(job for job in pairs.plan(1) if job.strikes == ("snapshot_torn", "disk_full"))
    assert job.faults == ("snapshot_torn", "disk_full", "owner_crash")


def test_s023_pairs_strike_together_and_violate_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Another part of them each time that somebody gives another number here.
    assert command.main(["--pairs", "--part", "7/400", "--json"]) == 0
    last = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])
    assert last["planned"] == last["seeds"] == len(pairs.plan(1, part=7, parts=400))
    assert len(last["never_together"]) < last["planned"] // 2
    assert last["coverage"]["owner_crash"]["I8"] >= 1


def test_the_page_of_pairs_says_what_never_struck() -> None:
    jobs = [job for job in pairs.plan(1) if job.strikes in (("receipt_lost",), ("disk_full",))]
    summary = batches.run_many(jobs)
    summary.together["never+ever"] = 0
    page = batches.guarantees(summary)
    assert "--pairs --runs 1" in page
    assert "`never+ever`." in page


@pytest.mark.parametrize(
    "words",
    [
        ["--part", "1/2"],
        ["--pairs", "--part", "3/2"],
        ["--pairs", "--part", "0/2"],
        ["--pairs", "--part", "one"],
        ["--pairs", "--faults", "none"],
        ["--pairs", "--seed", "3"],
    ],
)
def test_a_wrong_plan_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert "--pairs" in capsys.readouterr().err
