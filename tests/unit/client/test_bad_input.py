"""Bad input of the command ends it with a word on what was wrong, and never with a trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fencepost.client import cli


def ended(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["fencepost", *arguments])
    monkeypatch.setattr(cli, "_log_to_stderr", lambda: None)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert isinstance(raised.value.code, int)
    return raised.value.code


@pytest.mark.parametrize(
    "arguments",
    [
        ["sim", "--seed", "1", "--steps", "3", "--draw", "{none}/x.html"],
        ["sim", "--runs", "1", "--steps", "3", "--report", "{none}/r.md"],
        ["sim", "--events", "10", "--resume", "{folder}"],
        ["deploy", "nats", "--out", "{file}"],
        ["deploy", "nats", "--out", "{file}/below"],
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    given = {"none": tmp_path / "none", "folder": tmp_path, "file": tmp_path / "file"}
    told = [argument.format(**given) for argument in arguments]
    assert ended(told, monkeypatch) == cli.REFUSED
    said = capsys.readouterr().err
    assert "unusable_file" in said
    assert str(tmp_path) in said
