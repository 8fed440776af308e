"""Every tool's arguments: what is taken, and the field that is named when it is not."""

from typing import Any

import pytest
from fencepost.core import limits, tools

BLOB = {"$blob": "sha256:" + "0" * 64, "size": 5}
RUN = {"argv": ["ls"]}

TAKEN: list[tuple[str, Any]] = [
    ("write_file", {"path": "a", "content": ""}),
    ("write_file", {"path": "a/b", "content_b64": "", "mode": 0o777, "create_dirs": True}),
    ("write_file", {"path": "a", "content_ref": BLOB}),
    ("write_file", {"path": "a", "symlink_to": "b"}),
    ("write_file", {"path": "x" * 255, "content": ""}),
    ("write_file", {"path": "..a/b..", "content": ""}),
    ("apply_patch", {"patch": "x"}),
    ("apply_patch", {"patch_b64": "x"}),
    ("apply_patch", {"patch_ref": BLOB}),
    ("delete_path", {"path": "a", "recursive": True, "missing_ok": False}),
    ("run_command", {"argv": ["a", ""], "cwd": "b", "env": {"A": "b"}, "stdin": "x"}),
    ("run_command", {"shell": "a | b", "timeout_ms": 1, "output_max_bytes": 0}),
    ("run_migration", {"name": "m", "up": RUN, "down": {"shell": "x"}, "timeout_ms": 5}),
    ("read_file", {"path": "a", "offset": 0, "limit": limits.MIB, "encoding": "base64"}),
    ("list_dir", {"path": ".", "recursive": True, "limit": 1}),
    ("search", {"pattern": "x", "path": "a", "glob": "*", "limit": 100_000}),
    ("stat", {"path": "a"}),
]

REFUSED: list[tuple[str, Any, str]] = [
    ("nope", {}, "tool"),
    ("", {}, "tool"),
    ("write_file", None, "args"),
    ("write_file", [], "args"),
    ("write_file", {}, "args.path"),
    ("write_file", {"path": "a"}, "args.content"),
    ("write_file", {"path": "a", "content": "", "symlink_to": "b"}, "args.content"),
    ("write_file", {"path": "a", "content": 7}, "args.content"),
    ("write_file", {"path": "a", "content": None}, "args.content"),
    ("write_file", {"path": "", "content": ""}, "args.path"),
    ("write_file", {"path": 7, "content": ""}, "args.path"),
    ("write_file", {"path": "/a", "content": ""}, "args.path"),
    ("write_file", {"path": "a/../b", "content": ""}, "args.path"),
    ("write_file", {"path": "..", "content": ""}, "args.path"),
    ("write_file", {"path": "a\0b", "content": ""}, "args.path"),
    ("write_file", {"path": "x" * 256, "content": ""}, "args.path"),
    ("write_file", {"path": "ü" * 128, "content": ""}, "args.path"),
    ("write_file", {"path": "a/" * 2049, "content": ""}, "args.path"),
    ("write_file", {"path": "a", "content": "", "mode": 0o1000}, "args.mode"),
    ("write_file", {"path": "a", "content": "", "mode": -1}, "args.mode"),
    ("write_file", {"path": "a", "content": "", "mode": True}, "args.mode"),
    ("write_file", {"path": "a", "content": "", "mode": 7.0}, "args.mode"),
    ("write_file", {"path": "a", "content": "", "create_dirs": 1}, "args.create_dirs"),
    ("write_file", {"path": "a", "content_ref": "x"}, "args.content_ref"),
    ("write_file", {"path": "a", "content_ref": {**BLOB, "x": 1}}, "args.content_ref"),
    ("write_file", {"path": "a", "content_ref": {**BLOB, "$blob": "x"}}, "args.content_ref.$blob"),
    ("write_file", {"path": "a", "content_ref": {**BLOB, "$blob": 7}}, "args.content_ref.$blob"),
    ("write_file", {"path": "a", "content_ref": {**BLOB, "size": -1}}, "args.content_ref.size"),
    (
        "write_file",
        {"path": "a", "content_ref": {**BLOB, "size": limits.CONTENT_BYTES_MAX + 1}},
        "args.content_ref.size",
    ),
    ("write_file", {"path": "a", "content_ref": {**BLOB, "size": True}}, "args.content_ref.size"),
    ("apply_patch", {}, "args.patch"),
    ("apply_patch", {"patch": "a", "patch_b64": "b"}, "args.patch"),
    ("apply_patch", {"patch": "a", "path": "b"}, "args.path"),
    ("delete_path", {"recursive": True}, "args.path"),
    ("delete_path", {"path": "a", "missing_ok": "no"}, "args.missing_ok"),
    ("run_command", {}, "args.argv"),
    ("run_command", {"argv": ["a"], "shell": "b"}, "args.argv"),
    ("run_command", {"argv": []}, "args.argv"),
    ("run_command", {"argv": "a"}, "args.argv"),
    ("run_command", {"argv": ["a", 7]}, "args.argv"),
    ("run_command", {"argv": ["a\0"]}, "args.argv"),
    ("run_command", {**RUN, "env": {"A": 1}}, "args.env"),
    ("run_command", {**RUN, "env": []}, "args.env"),
    ("run_command", {**RUN, "cwd": "/"}, "args.cwd"),
    ("run_command", {**RUN, "timeout_ms": 0}, "args.timeout_ms"),
    (
        "run_command",
        {**RUN, "output_max_bytes": limits.INLINE_BYTES_MAX + 1},
        "args.output_max_bytes",
    ),
    ("run_migration", {"name": "m", "up": RUN}, "args.down"),
    ("run_migration", {"up": RUN, "down": RUN}, "args.name"),
    ("run_migration", {"name": "m", "up": {}, "down": RUN}, "args.up.argv"),
    ("run_migration", {"name": "m", "up": "x", "down": RUN}, "args.up"),
    ("run_migration", {"name": "m", "up": {**RUN, "cwd": "a"}, "down": RUN}, "args.up.cwd"),
    ("read_file", {}, "args.path"),
    ("read_file", {"path": "a", "limit": limits.MIB + 1}, "args.limit"),
    ("list_dir", {"path": "a", "limit": 0}, "args.limit"),
    ("search", {"path": "a"}, "args.pattern"),
    ("stat", {"path": "a", "follow": True}, "args.follow"),
]


@pytest.mark.parametrize(("name", "args"), TAKEN)
def test_good_arguments_are_taken(name: str, args: Any) -> None:
    assert tools.check(name, args) is None


@pytest.mark.parametrize(("name", "args", "field"), REFUSED)
def test_bad_arguments_are_refused_by_field(name: str, args: Any, field: str) -> None:
    fault = tools.check(name, args)
    assert fault is not None
    assert fault.field == field
    assert fault.expected


def test_every_tool_has_both_kinds_of_examples() -> None:
    assert {name for name, _ in TAKEN} == set(tools.TABLE)
    assert {name for name, _, _ in REFUSED} >= set(tools.TABLE)


def test_s010_what_is_not_known_to_be_read_only_is_mutating() -> None:
    read_only = {name for name in tools.TABLE if tools.classify(name) == "read_only"}
    assert read_only == {"read_file", "list_dir", "search", "stat"}
    for name in ("run_command", "bash", "mcp:anything", "", "READ_FILE"):
        assert tools.classify(name) == "mutating"


def test_an_undo_is_a_commands_arguments() -> None:
    assert tools.check_undo(RUN) is None
    for wrong in ({}, [], None, {"argv": [], "shell": "x"}, {"path": "a"}):
        fault = tools.check_undo(wrong)
        assert fault is not None
        assert fault.field.startswith("compensation.args")
