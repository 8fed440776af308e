"""A wrong command line of the simulator ends with 2 and the option's name, and runs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fencepost.simulator import __main__ as simulator
from fencepost.simulator import runs

NUMBERS = ["--seed", "--runs", "--events", "--from", "--steps", "--jobs"]
NO_ZERO = ["--runs", "--events", "--steps", "--jobs"]
OPTIONS = [
    '{"colour": 1}',
    "[]",
    "x",
    "",
    '{"steps": "3"}',
    '{"steps": 3.5}',
    '{"steps": 0}',
    '{"steps": -1}',
    '{"steps": 1000000000}',
    '{"steps": NaN}',
    '{"shards": 0}',
    '{"planners": 0}',
    '{"sandboxes": 0}',
    '{"trackers": 0}',
    '{"window": 0}',
    '{"safety_ms": 9223372036854775808}',
    '{"snapshot_every": 0}',
    '{"external_share": 1.5}',
    '{"command_share": -0.1}',
    '{"command_share": true}',
    '{"rates": {"owner_crash": 2}}',
    '{"rates": {"owner_crash": -1}}',
    '{"rates": {"nothing": 0.1}}',
    '{"rates": {"owner_crash": "0.1"}}',
    '{"rates": []}',
    "[" * 10_000,
]


def _refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_args: object, **_options: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(runs, "run", run)
    try:
        code: object = simulator.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2, words


@pytest.mark.parametrize("option", NUMBERS)
def test_a_number_that_is_none_is_refused_with_the_option(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = ["0"] if option in NO_ZERO else []
    for value in ["-1", "nan", "inf", "1.5", "", "x", str(2**63), "9" * 5_000, *zero]:
        _refused([f"{option}={value}"], monkeypatch)
        said = capsys.readouterr().err
        assert f"{option}: expected an integer from" in said


@pytest.mark.parametrize("text", OPTIONS, ids=range(len(OPTIONS)))
def test_options_out_of_their_bounds_are_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused(["--seed", "1", "--options", text], monkeypatch)
    assert "bad_options: --options: " in capsys.readouterr().err
    saved = tmp_path / "run.json"
    saved.write_text(f'{{"seed": 1, "options": {text}}}')
    _refused(["--replay", str(saved)], monkeypatch)
    assert "bad_file: " in capsys.readouterr().err


def test_right_ones_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = json.dumps({"steps": 3, "sandboxes": 1, "rates": {"owner_crash": 0.1}})
    assert simulator.main(["--seed", "1", "--options", options]) == 0
    assert simulator.main(["--from", "7", "--runs", "1", "--steps", "3", "--jobs", "1"]) == 0
    assert "1 runs" in capsys.readouterr().out
