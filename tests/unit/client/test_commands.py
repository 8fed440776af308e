"""What a caller says is checked before anything is sent, and the wrong field is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fencepost.client import commands, ulid
from fencepost.client.arguments import tool_arguments
from fencepost.core import ids
from fencepost.core.errors import RefusedError
from fencepost.core.steps import StepCommand, canonical


def step_command(**options: Any) -> bytes:
    given: dict[str, Any] = {
        "compensation": None,
        "on_moved_epoch": "retry",
        "attempts_max": None,
        "deadline_ms": None,
        "effect": "workspace",
    }
    args = canonical({"path": "a", "content": "b"})
    return commands.step_command("box", "s1", "write_file", args, **{**given, **options})


def test_a_command_is_what_its_shard_decodes() -> None:
    compensation = commands.compensation_of({"kind": "command", "args": {"argv": ["true"]}})
    data = step_command(compensation=compensation, attempts_max=3, effect="external")
    found = msgspec.json.decode(data, type=StepCommand)
    assert (found.sandbox, found.step, found.tool) == ("box", "s1", "write_file")
    assert bytes(found.args) == canonical({"path": "a", "content": "b"})
    assert found.compensation is not None
    assert bytes(found.compensation.args) == b'{"argv":["true"]}'
    assert (found.attempts_max, found.effect, found.on_moved_epoch) == (3, "external", "retry")


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("attempts_max", 0, "out_of_range"),
        ("attempts_max", True, "out_of_range"),
        ("deadline_ms", 1, "out_of_range"),
        ("on_moved_epoch", "again", "bad_arguments"),
        ("effect", "none", "bad_arguments"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(option: str, value: Any, reason: str) -> None:
    with pytest.raises(RefusedError) as raised:
        step_command(**{option: value})
    assert (raised.value.reason, raised.value.field) == (reason, option)
    right = {
        "attempts_max": 1,
        "deadline_ms": 100,
        "on_moved_epoch": "reject",
        "effect": "external",
    }
    assert f'"{option}":'.encode() in step_command(**{option: right[option]})


@pytest.mark.parametrize(
    ("tool", "args", "reason", "field"),
    [
        ("bash", {}, "unknown_tool", "tool"),
        ("write_file", {"path": "a"}, "bad_arguments", "args.content"),
        ("write_file", {"path": "../a", "content": ""}, "bad_arguments", "args.path"),
        ("write_file", {"path": 7, "content": ""}, "bad_arguments", "args.path"),
        ("write_file", {"path": "a", "content": "", "more": 1}, "bad_arguments", "args.more"),
        ("run_command", {"argv": []}, "bad_arguments", "args.argv"),
    ],
)
def test_wrong_arguments_are_refused_by_their_field(
    tool: str, args: dict[str, Any], reason: str, field: str
) -> None:
    with pytest.raises(RefusedError) as raised:
        commands.require_arguments(tool, args)
    assert (raised.value.reason, raised.value.field) == (reason, field)
    commands.require_arguments("write_file", {"path": "a", "content": ""})


@pytest.mark.parametrize("value", ["", "a.b", "a b", "a\n", "x" * 65, "*", None, 7])
def test_what_is_no_id_is_refused(value: Any) -> None:
    with pytest.raises(RefusedError) as raised:
        commands.require_id("sandbox", value)
    assert (raised.value.reason, raised.value.field) == ("bad_id", "sandbox")
    assert commands.require_id("sandbox", "x" * 64) == "x" * 64


def test_s020_a_mutating_tool_without_a_compensation_is_refused() -> None:
    with pytest.raises(RefusedError) as raised:
        commands.require_compensation("run_command", None)
    assert (raised.value.reason, raised.value.field) == ("no_compensation", "compensation")
    commands.require_compensation("run_command", {"kind": "command"})
    commands.require_compensation("write_file", None)
    commands.require_compensation("run_migration", None)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"kind": "magic"}, "compensation.kind"),
        ({"kind": "command"}, "compensation.args"),
        ({"kind": "command", "args": {"argv": "x"}}, "compensation.args.argv"),
        ({"kind": "pre_image", "by": 1}, "compensation.by"),
    ],
)
def test_a_wrong_compensation_is_refused_by_its_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusedError) as raised:
        commands.compensation_of(given)
    assert raised.value.field == field


def test_ulids_carry_their_time_and_differ() -> None:
    minted = [ulid.mint() for _ in range(2_000)]
    assert len(set(minted)) == len(minted)
    assert all(ids.ulid_ms(value) is not None and ids.is_id(value) for value in minted)
    times = [ids.ulid_ms(value) or 0 for value in minted]
    assert times == sorted(times)


def typed(tool: str, *pairs: str, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"text": None, "file": None, "argv": []}
    return tool_arguments(tool, pairs=pairs, **{**given, **options})


def test_a_typed_value_is_text_unless_the_tool_takes_only_json_there() -> None:
    assert typed("write_file", "path=7", "content=true", "mode=420", "create_dirs=true") == {
        "path": "7",
        "content": "true",
        "mode": 420,
        "create_dirs": True,
    }


def test_a_typed_value_that_fits_nothing_stays_as_it_was_typed() -> None:
    found = typed("write_file", "path=a", "mode=x", "more=1=2")
    assert found == {"path": "a", "mode": "x", "more": "1=2"}


def test_a_command_stands_after_the_dashes_of_run_command_only() -> None:
    assert typed("run_command", argv=["ls", "-l"]) == {"argv": ["ls", "-l"]}
    with pytest.raises(RefusedError, match="takes no command"):
        typed("write_file", argv=["ls"])


def test_a_file_is_text_where_it_is_text_and_base64_where_not(tmp_path: Any) -> None:
    (tmp_path / "text").write_text("ä")
    (tmp_path / "bytes").write_bytes(b"\xff\x00")
    assert typed("apply_patch", file=str(tmp_path / "text")) == {"patch": "ä"}
    assert typed("write_file", file=str(tmp_path / "bytes")) == {"content_b64": "/wA="}
    with pytest.raises(RefusedError) as raised:
        typed("write_file", file=str(tmp_path / "missing"))
    assert raised.value.field == "--file"


@pytest.mark.parametrize("text", ["[1]", "{", "7"])
def test_json_arguments_are_an_object(text: str) -> None:
    with pytest.raises(RefusedError) as raised:
        typed("write_file", text=text)
    assert raised.value.field == "--json"
    assert typed("write_file", text='{"path": "a"}') == {"path": "a"}
