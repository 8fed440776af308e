"""Every option of every command, with values that none of its kind takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fencepost.client import cli, command_line
from fencepost.client.checks import SECONDS_MAX
from typer.core import TyperCommand

NOT_UTF8 = "\udcff"
BAD = {
    "int": ["nan", "inf", "-1", "1.5", "1e400", str(2**63), "", " ", "x", NOT_UTF8],
    "float": ["nan", "inf", "-inf", "-1", "1e400", "", " ", "x", NOT_UTF8],
    "seconds": ["0", "-0.0", "1e-400", "1e10"],
    "address": ["", "ws://a", "http://a", "nats://a:0", "nats://a:99999", "a b", "::1", "a\x07"],
    "path": ["", NOT_UTF8],
    "text": [NOT_UTF8],
}
ARGUMENTS = {"repository": "/", "decision": "accept"}


def _walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from _walk(below, (*path, name))
    else:
        yield path, command


ROOT = typer.main.get_command(cli.app)
COMMANDS = dict(_walk(ROOT))


def _kind(option: Any) -> str:
    said = str(option.type_descriptor.annotation)
    if option.name in command_line.ADDRESSES:
        return "address"
    for kind, words in (("int", "int"), ("float", "float"), ("path", "Path")):
        if words in said:
            return kind
    return "flag" if "bool" in said else "text"


def _needed(command: Any, but: str = "") -> list[str]:
    """The least that this command takes."""
    found = []
    for one in command.params:
        if one.param_type_name == "argument":
            found.append(ARGUMENTS.get(one.name, "x"))
        elif one.required and one.name != but:
            found += [one.opts[0], "2" if _kind(one) == "int" else "x"]
    return found


def _cases() -> Iterator[tuple[list[str], str, list[str]]]:
    for path, command in COMMANDS.items():
        for option in command.params:
            if option.param_type_name != "option" or option.name == "help":
                continue
            bad = BAD.get(_kind(option), [])
            if option.name in command_line.SECONDS:
                bad = [*bad, *BAD["seconds"]]
            if option.name == "to":
                bad = bad[1:]  # the command's own refusal says more
            if bad:
                yield [*path, *_needed(command, option.name)], option.opts[0], bad


CASES = list(_cases())


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that would have run."""
    found: list[str] = []

    def invoke(self: Any, ctx: Any) -> None:
        del ctx
        found.append(self.name)

    monkeypatch.setattr(TyperCommand, "invoke", invoke)
    monkeypatch.setattr(cli, "app", ROOT)  # made once
    monkeypatch.setattr(cli, "_log_to_stderr", lambda: None)
    return found


def _ended(words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["fencepost", *words])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    return raised.value.code


def test_the_table_has_every_command() -> None:
    assert len(COMMANDS) > 30
    assert len(CASES) > 100
    assert all(isinstance(one, command_line.Checked) for one in COMMANDS.values())


@pytest.mark.parametrize(
    ("words", "option", "bad"), CASES, ids=[" ".join((*c[0][:2], c[1])) for c in CASES]
)
def test_a_value_that_none_of_its_kind_takes_is_refused_with_the_option(
    words: list[str],
    option: str,
    bad: list[str],
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for value in bad:
        assert _ended([*words, f"{option}={value}"], monkeypatch) == cli.REFUSED, value
        said = capsys.readouterr().err
        assert option in said, (value, said)
        assert not ran, value


@pytest.mark.parametrize("path", sorted(COMMANDS), ids=" ".join)
def test_the_least_that_a_command_takes_is_taken(
    path: tuple[str, ...], ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    assert _ended([*path, *_needed(COMMANDS[path])], monkeypatch) == cli.OK
    assert ran == [path[-1]]


@pytest.mark.parametrize("value", ["1e-3", "0.5", "60", str(SECONDS_MAX)])
def test_a_time_to_wait_for_is_taken(
    value: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _ended(["sandbox", "create", f"--timeout={value}"], monkeypatch) == cli.OK
    assert ran == ["create"]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["sandbox", "show", NOT_UTF8], "argument 3"),
        (["dag", "acquire", "d", "s", "--image", NOT_UTF8], "--image"),
        (["dag", "acquire", "d", "s", f"--image={NOT_UTF8}"], "--image"),
        (["sim", "--seed", NOT_UTF8], "--seed"),
    ],
)
def test_a_word_that_is_not_utf8_is_named(
    words: list[str],
    field: str,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _ended([*words, "--json"], monkeypatch) == cli.REFUSED
    output = capsys.readouterr()
    assert json.loads(output.out)["error"]["field"] == field
    assert "expected UTF-8" in output.err
    assert not ran


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["sandbox", "list", "--url", "ws://a"], "--url"),
        (["dag", "cancel", "d", "--bound", "nan"], "--bound"),
        (["up", "--planners", "0"], "--planners"),
        (["up", "--planners", "x"], "--planners"),
        (["sandbox", "show"], "SANDBOX"),
        (["sandbox", "list", "--colour"], ""),
        (["sandbox", "destroy"], ""),
    ],
)
def test_machines_are_told_what_was_wrong_too(
    words: list[str],
    field: str,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _ended([*words, "--json"], monkeypatch) == cli.REFUSED
    output = capsys.readouterr()
    said = json.loads(output.out)["error"]
    assert said["field"] == field
    assert said["detail"]
    assert output.err.strip()
    assert not ran


def test_an_empty_folder_is_no_name_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_log_to_stderr", lambda: None)
    assert _ended(["deploy", "nats", "--out", ""], monkeypatch) == cli.REFUSED
    assert "--out: expected a file or folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert _ended(["deploy", "nats", "--out", "."], monkeypatch) == cli.OK, "the control"
