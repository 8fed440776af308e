"""What a person gets of a run: a drawing, steps through a trace, and the command to have it again."""

import io
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from fencepost.simulator import __main__ as command
from fencepost.simulator import drawing, pictures, progress, runs, showing, stepping, trace
from fencepost.simulator.batches import Summary
from fencepost.simulator.options import draw
from rich.console import Console

from tests.simulation.mutants import MUTANTS

ALARMED = next(m for m in MUTANTS if m.name == "retry an external effect on the next disk")

# Few faults and steps: a run is short, and what is left to shrink is little.
FEW = ["--faults", "sandbox_preempted,receipt_lost", "--steps", "20"]

LATE = [
    trace.line(0, 0, "session", "gw0-1"),
    trace.line(1, 1, "command", "create", "sb0", "c-sb0"),
    trace.line(2, 2, "ledger", "1@0", "term_opened", "term=1", "owner=p0"),
    trace.line(3, 3, "owned", "p0", "shard 0 term 1"),
    trace.line(4, 4, "ledger", "2@0", "created", "sandbox=sb0", "create_id=sb0"),
    trace.line(5, 5, "effect", "p0", "CreateOrder", "create/sb0/gw0-1/0", "to", "gw0-1"),
    trace.line(6, 6, "boots", "n1.b1", "for", "sb0"),
    trace.line(7, 7, "ledger", "3@0", "epoch_opened", "sandbox=sb0", "epoch=1"),
    trace.line(8, 8, "command", "step", "sb0", "s1"),
    trace.line(9, 9, "ledger", "4@0", "fenced", "sandbox=sb0", "step=s1", "attempt=s1.1"),
    trace.line(10, 10, "effect", "p0", "Dispatch", "s1.1/sb0/1", "to", "gw0-1"),
    trace.line(11, 11, "wrote", "th1@n1.b1", "s1", "held 1"),
    trace.line(12, 12, "receipt", "th1@n1.b1", "s1.1", "applied", "held 1"),
    trace.line(13, 13, "fault", "sandbox_preempted"),
    trace.line(13, 13, "vanishes", "n1.b1"),
    trace.line(14, 14, "ledger", "5@0", "epoch_closed", "sandbox=sb0", "epoch=1"),
    trace.line(15, 15, "ledger", "6@0", "epoch_opened", "sandbox=sb0", "epoch=2"),
    trace.line(
        16, 16, "ledger", "7@0", "receipt_refused", "sandbox=sb0", "step=s1", "attempt=s1.1"
    ),
]
BROKEN = [
    *LATE[:-1],
    trace.line(16, 16, "VIOLATED", "I1", "s1 committed on a closed epoch 1"),
    trace.line(16, 16, "ledger", "7@0", "committed", "sandbox=sb0", "step=s1", "attempt=s1.1"),
]


def _picture(lines: list[str], **options: int) -> drawing.Picture:
    return pictures.of_trace(lines, title="a title", **options)


def _arrow(picture: drawing.Picture, tone: str) -> drawing.Arrow:
    (found,) = [arrow for arrow in picture.arrows if arrow.tone == tone]
    return found


def test_an_epoch_is_a_band_from_its_opening_to_its_end() -> None:
    picture = _picture(LATE)
    epochs = {b.label: (b.lane, b.first, b.last) for b in picture.bands if b.tone == "epoch"}
    assert epochs == {"epoch 1": ("sb0", 7, 15), "epoch 2": ("sb0", 16, 17)}
    (disk,) = [b for b in picture.bands if b.tone == "disk"]
    assert (disk.lane, disk.first, disk.last) == ("sb0", 6, 14)
    (term,) = [b for b in picture.bands if b.tone == "term"]
    assert (term.lane, term.label, term.last) == ("p0", "term 1", 17)


def test_a_late_receipt_is_an_arrow_that_crosses_into_the_next_epoch() -> None:
    arrow = _arrow(_picture(LATE), "refused")
    assert (arrow.start, arrow.end) == (("sb0", 12), ("p0", 17))
    assert _arrow(_picture(BROKEN), "receipt").start == ("sb0", 12)


def test_a_dispatch_goes_from_its_owner_to_the_write_that_it_caused() -> None:
    orders = {a.start: a.end for a in _picture(LATE).arrows if a.tone == "order"}
    assert orders == {("p0", 5): ("sb0", 6), ("p0", 10): ("sb0", 11)}


def test_a_lost_receipt_ends_on_its_way() -> None:
    lines = [*LATE[:13], trace.line(12, 13, "fault", "receipt_lost"), *LATE[15:]]
    picture = _picture(lines)
    assert _arrow(picture, "lost").start == ("sb0", 12)
    assert [a for a in picture.arrows if a.tone in ("receipt", "refused")] == []


def test_a_fault_stands_where_it_struck() -> None:
    (fault,) = [row for row in _picture(LATE).rows if row.tone == "fault"]
    assert (fault.lane, fault.text) == ("sb0", "fault sandbox_preempted")


def test_a_violation_is_marked_at_its_instant_with_all_its_text() -> None:
    picture = _picture(BROKEN)
    (row,) = [row for row in picture.rows if row.tone == "violation"]
    assert row.text == "I1 violated: s1 committed on a closed epoch 1"
    assert row.lane == "sb0"
    page = drawing.page(picture, again="the command")
    assert page.count("I1 violated: s1 committed on a closed epoch 1") == 2  # on top, and there
    assert 'id="violated"' in page


def test_a_picture_is_bounded_around_the_violation() -> None:
    calm = [trace.line(20 + n, 20 + n, "phase", "nothing") for n in range(1000)]
    picture = _picture([*LATE[:-1], *calm, *BROKEN[-2:], *calm], rows_max=40)
    assert len(picture.rows) == 40
    assert "violation" in {row.tone for row in picture.rows}
    assert "earlier events" in picture.left_out
    assert "later events" in picture.left_out
    # What began before the window is drawn from its upper edge.
    assert {b.label: b.first for b in picture.bands}["epoch 2"] == -1
    ET.fromstring(drawing.svg(picture))


def test_other_sandboxes_and_steps_are_left_out_of_a_violation() -> None:
    other = [
        trace.line(9, 9, "command", "step", "sb1", "s2"),
        trace.line(9, 9, "ledger", "9@1", "fenced", "sandbox=sb1", "step=s2", "attempt=s2.1"),
        trace.line(9, 9, "ledger", "9@0", "fenced", "sandbox=sb0", "step=s3", "attempt=s3.1"),
    ]
    lines = [*BROKEN[:9], *other, *BROKEN[9:]]
    assert pictures.relevant(lines) == BROKEN
    assert "sb1" not in {lane.key for lane in _picture(lines).lanes}
    calm = [*LATE[:9], *other, *LATE[9:]]  # without a violation nothing is more to the point
    assert pictures.relevant(calm) == calm


def test_a_dag_is_a_column_and_its_violation_stands_in_it() -> None:
    dag = [
        trace.line(9, 9, "command", "dag", "d0", "q1", '{"do":"open","nodes":[]}'),
        trace.line(10, 10, "ledger", "1@dag0", "term_opened", "term=1", "owner=t0"),
        trace.line(11, 11, "ledger", "2@dag0", "opened", "dag=d0"),
        trace.line(12, 12, "ledger", "9@0", "holder_added", "sandbox=sb0", "dag=d0"),
        trace.line(13, 13, "ledger", "2@dag1", "opened", "dag=d1"),
        trace.line(14, 14, "swept", "sw0", "sim", "held=1"),
        trace.line(15, 15, "swept", "sw0", "sim", "proposed=1"),
        trace.line(16, 16, "ledger", "3@dag0", "answered", "dag=d0", "verdict=confirmed"),
        trace.line(16, 16, "VIOLATED", "I4", "d0 answered confirmed while n1.b1 runs"),
    ]
    picture = _picture([*LATE[:9], *dag])
    bands = [(b.lane, b.label) for b in picture.bands if b.tone == "dag"]
    assert sorted(bands) == [("dag d0", "confirmed"), ("dag d0", "open"), ("dag d1", "open")]
    (row,) = [row for row in picture.rows if row.tone == "violation"]
    assert row.lane == "dag d0"
    texts = [row.text for row in picture.rows]
    assert "swept sw0 sim proposed=1" in texts
    assert "swept sw0 sim held=1" not in texts
    assert "opened dag=d1  [2@dag1]" not in texts


def test_one_native_id_under_two_authorities_is_two_things() -> None:
    lines = [
        *LATE[:9],
        trace.line(9, 9, "boots", "n1.b1~other", "for", "foreign1"),
        trace.line(10, 10, "vanishes", "n1.b1~other"),
        trace.line(11, 11, "restarts", "n1.b2"),
    ]
    picture = _picture(lines)
    disks = [(b.label, b.lane, b.first, b.last) for b in picture.bands if b.tone == "disk"]
    assert ("n1.b1", "sb0", 6, 11) in disks
    assert ("n1.b2", "sb0", 11, 11) in disks
    assert ("n1.b1~other", "foreign1", 9, 10) in disks


def test_a_whole_run_can_be_drawn_and_nothing_is_fetched() -> None:
    picture = _picture(runs.run(7, tracing=True).trace, rows_max=100_000)
    drawn = drawing.svg(picture)
    ET.fromstring(drawn)
    page = drawing.page(picture)
    assert not re.search(r"<script|<link|<img|@import|https?://(?!www\.w3\.org/2000/svg)", page)


def test_what_a_history_says_is_only_text_in_the_page() -> None:
    lines = [*LATE, trace.line(17, 17, "VIOLATED", "I1", 's1 <script>alert("x")</script> & so')]
    page = drawing.page(_picture(lines), again="<b>")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    ET.fromstring(drawing.svg(_picture(lines)))


# --- stepping


def test_one_steps_through_a_trace_by_keys() -> None:
    keys = iter(["n", "n", "b", "f", "f", "g", "g", "v", "0", "x", "q"])
    asked = iter(["16", "nonsense"])
    out = io.StringIO()
    console = Console(file=out, width=120)
    stepping.step_through(BROKEN, console, key=lambda: next(keys), ask=lambda _: next(asked))
    shown = re.findall(r"line (\d+) of 19", out.getvalue())
    assert [int(n) for n in shown] == [1, 2, 3, 2, 14, 14, 18, 18, 18, 1, 1]
    assert "no fault after this" in out.getvalue()
    assert "an event's number is wanted, not 'nonsense'" in out.getvalue()


def test_it_is_told_what_stands_at_a_line() -> None:
    at = stepping.Stepping(LATE)
    at.go(12)
    assert at.standing() == {
        "p0 shard 0": "owns, term 1",
        "sandbox sb0": "epoch 1 open",
        "step s1": "fenced s1.1",
    }
    at.move(100)
    assert at.standing()["sandbox sb0"] == "epoch 2 open"
    assert at.at == at.last


# --- the command


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line of one run that fails."""
    ALARMED.apply(monkeypatch)
    for seed in range(40):
        options = draw(seed, faults=("sandbox_preempted", "receipt_lost"), steps=20)
        if runs.run(seed, options).violations:
            return ["--from", str(seed), "--runs", "1", *FEW]
    pytest.fail("no seed fails")


def test_a_failure_prints_all_that_is_needed_to_have_it_again(
    failing: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved, drawn = tmp_path / "failure.json", tmp_path / "failure.html"
    assert command.main([*failing, "--save", str(saved), "--draw", str(drawn)]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^seed \d+: I3 violated: ", said, re.MULTILINE)
    assert re.search(r"^shrunk: I3 violated: ", said, re.MULTILINE)
    assert len(said.splitlines()) < 140
    assert f"--replay {saved}" in said
    assert "I3 violated" in drawn.read_text()
    # The whole run again keeps what was asked for.
    whole = re.search(r"the whole run again: +(.*)", said)
    assert whole is not None
    assert " ".join(FEW) in whole[1]
    assert command.main(whole[1].split()[3:]) == 1  # without `python -m fencepost.simulator`
    capsys.readouterr()
    # And so it is, printed in full where nobody can press a key.
    assert command.main(["--replay", str(saved)]) == 1
    assert "VIOLATED   I3" in capsys.readouterr().out
    # Without a file the options are in the command.
    found = showing.load(saved)
    options = re.search(r"--options '(.*)'", showing.command_of(found.seed, found.options))
    assert options is not None
    assert showing.parse_options(options[1]) == found.options


def test_a_run_is_had_again_from_the_options_in_its_command(
    failing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(failing[1])
    drawn = draw(seed, faults=("sandbox_preempted", "receipt_lost"), steps=20)
    words = shlex.split(showing.command_of(seed, drawn))[3:]
    words.remove("--trace")
    assert command.main([*words, "--trace", "--json"]) == 1
    assert "VIOLATED   I3" in capsys.readouterr().out


def test_a_calm_seed_can_be_drawn_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "calm.html"
    assert command.main(["--seed", "3", "--steps", "5", "--draw", str(drawn)]) == 0
    assert "nothing violated" in drawn.read_text()
    assert f"drawn: {drawn}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("written", "said"),
    [(None, "No such file"), ("{", "bad_file"), ('{"seed": 1}', "options"), ("[]", "bad_file")],
)
def test_what_cannot_be_replayed_is_refused(
    written: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    if written is not None:
        saved.write_text(written)
    assert command.main(["--replay", str(saved)]) == 2
    assert said in capsys.readouterr().err


def test_a_saved_run_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved.json"
    small = draw(1, faults=(), steps=2)
    saved.write_bytes(msgspec.json.encode(showing.Saved(1, small)))
    assert command.main(["--replay", str(saved)]) == 0
    assert "committed sandbox=" in capsys.readouterr().out


def test_options_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "1", "--options", '{"shards": "two"}']) == 2
    assert "--options: Expected `int`, got `str`" in capsys.readouterr().err


# --- progress


def test_progress_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--runs", "1", "--faults", "none"]) == 0
    assert capsys.readouterr().err == ""


def test_progress_tells_events_rate_violations_and_the_time_that_is_left() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with progress.bar(console, runs=10) as tell:
        tell(Summary(seeds=0, events=0))
        tell(Summary(seeds=5, events=12_345, violations={"I1": 2}))
    said = out.getvalue()
    assert "50%" in said
    assert "12,345 events" in said
    assert "2 violations" in said
    assert "/s" in said
