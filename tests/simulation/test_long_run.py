"""A long run is made in parts, and its parts make one sum."""

from pathlib import Path

import msgspec
import pytest
from fencepost.core.errors import RefusedError
from fencepost.simulator import __main__ as command
from fencepost.simulator import batches, longrun
from fencepost.simulator.options import FAULTS

from tests.simulation.mutants import MUTANTS

CALM = ("receipt_delayed",)


def _begun(path: Path, *, first: int = 0) -> longrun.State:
    return longrun.load(path, first=first, faults=CALM, steps=5)


def test_a_run_in_parts_has_the_sum_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    longrun.go_on(_begun(path), path, events=1, jobs=1, chunk=3)
    again = _begun(path)
    assert again.next_seed == 3
    longrun.go_on(again, path, events=again.summary.events + 1, jobs=1, chunk=3)
    found = _begun(path)
    whole = batches.run_many([batches.Job(seed, CALM, 5) for seed in range(6)])
    whole.seconds = found.summary.seconds
    assert found.summary == whole
    assert [part.seeds for part in found.parts] == [(0, 2), (3, 5)]
    assert sum(part.events for part in found.parts) == whole.events


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    longrun.go_on(_begun(path), path, events=1, jobs=1, chunk=2)
    before = path.read_bytes()
    longrun.go_on(_begun(path), path, events=1, jobs=1, chunk=2)
    assert path.read_bytes() == before


def test_a_stop_in_a_chunk_leaves_the_former_chunks(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    stopped = 0

    def stop(summary: batches.Summary) -> None:
        nonlocal stopped
        if summary.seeds == 3:
            stopped += 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        longrun.go_on(_begun(path), path, events=10**9, jobs=1, tell=stop, chunk=2)
    assert stopped == 1
    assert _begun(path).next_seed == 2
    assert _begun(path).summary.seeds == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_state_of_other_options_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    longrun.go_on(_begun(path), path, events=1, jobs=1, chunk=1)
    assert _begun(path).next_seed == 1  # the same options are
    with pytest.raises(RefusedError, match="--from 0"):
        _begun(path, first=7)
    with pytest.raises(RefusedError, match="receipt_delayed"):
        longrun.load(path, first=0, faults=None, steps=5)


@pytest.mark.parametrize("written", ["", "{}", '{"v": 2}', "[1]"])
def test_a_file_that_is_no_state_is_refused_and_kept(
    written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state.json"
    path.write_text(written)
    assert command.main(["--events", "10", "--resume", str(path)]) == 2
    assert "bad_state" in capsys.readouterr().err
    assert path.read_text() == written


def test_the_page_says_what_was_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "state.json", tmp_path / "long-run.md"
    monkeypatch.setattr(longrun, "CHUNK_SEEDS", 3)
    arguments = ["--events", "1", "--faults", "none", "--steps", "1", "--resume", str(path)]
    assert command.main([*arguments, "--report", str(page), "--json"]) == 0
    said = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])
    written = page.read_text()
    assert f"| events | {said['events']:,} |" in written
    assert f"| runs | {said['seeds']:,}, seeds 0 to 2 |" in written
    assert "| violations | 0 |" in written
    assert all(f"| `{fault}` | 0 | 0 |" in written for fault in FAULTS)


def test_a_violation_is_counted_kept_and_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(longrun, "CHUNK_SEEDS", 1)
    mutant = next(m for m in MUTANTS if m.name == "forget a position")
    mutant.apply(monkeypatch)
    path, page = tmp_path / "state.json", tmp_path / "long-run.md"
    arguments = ["--events", "1", "--resume", str(path), "--report", str(page)]
    assert command.main(arguments) == 1
    assert "seed 0: I8 violated" in capsys.readouterr().out
    state = longrun.load(path, first=0, faults=None, steps=None)
    assert {(one.seed, one.invariant) for one in state.failed} == {(0, "I8")}
    assert state.summary.failures == []
    assert "| 0 | I8 |" in page.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume", "x"], "--resume goes with --events"),
        (["--events", "1", "--resume", "x", "--fresh"], "--resume and --fresh"),
        (["--fresh", "--from", "3"], "--fresh and --from"),
        (["--options", "{}"], "--options goes with --seed"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
