"""
The tools: their class, their arguments, and how their effects are taken back.

A tool that is not in the table is refused at admission. A tool in the table is mutating unless it
says otherwise (S-10): only a known read-only tool takes the cheap path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from fencepost.core import limits


class ArgumentFault(NamedTuple):
    """What is wrong with one argument: where, and what would be taken."""

    field: str
    expected: str
    detail: str


Check: TypeAlias = Callable[[str, Any], ArgumentFault | None]


class Argument(NamedTuple):
    check: Check
    required: bool = False


class Tool(NamedTuple):
    """
    One tool. `pre_image`: the toolhost can restore what it replaced, so no compensation need be
    declared. `one_of`: exactly one of each of these groups of arguments must be there.
    """

    name: str
    mutating: bool
    pre_image: bool
    arguments: Mapping[str, Argument]
    one_of: tuple[tuple[str, ...], ...] = ()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _string(field: str, value: Any) -> ArgumentFault | None:
    if type(value) is not str:
        return ArgumentFault(field, "a string", f"got {_shown(value)}")
    return None


def _boolean(field: str, value: Any) -> ArgumentFault | None:
    if type(value) is not bool:
        return ArgumentFault(field, "true or false", f"got {_shown(value)}")
    return None


def _integer(low: int, high: int) -> Check:
    def check(field: str, value: Any) -> ArgumentFault | None:
        if type(value) is not int or not low <= value <= high:
            return ArgumentFault(field, f"an integer from {low} to {high}", f"got {_shown(value)}")
        return None

    return check


def _path(field: str, value: Any) -> ArgumentFault | None:
    """Checks the letters of a path; that it stays inside is the toolhost's, on the real tree."""
    expected = "a relative path inside the workspace"
    if type(value) is not str or value == "":
        return ArgumentFault(field, expected, f"got {_shown(value)}")
    if "\0" in value:
        return ArgumentFault(field, expected, "it contains a NUL")
    if value.startswith("/"):
        return ArgumentFault(field, expected, f"{_shown(value)} is absolute")
    parts = value.split("/")
    if ".." in parts:
        return ArgumentFault(field, expected, f"{_shown(value)} leaves the workspace by '..'")
    if len(value.encode("utf-8", "surrogatepass")) > 4096:
        return ArgumentFault(field, "a path of at most 4096 bytes", f"{len(value)} characters")
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
        return ArgumentFault(field, "names of at most 255 bytes", f"got {_shown(value)}")
    return None


def _blob(field: str, value: Any) -> ArgumentFault | None:
    expected = 'a content reference {"$blob": "sha256:<hex>", "size": <bytes>}'
    if type(value) is not dict or set(value) != {"$blob", "size"}:
        return ArgumentFault(field, expected, f"got {_shown(value)}")
    digest, size = value["$blob"], value["size"]
    if type(digest) is not str or not digest.startswith("sha256:") or len(digest) != 71:
        return ArgumentFault(f"{field}.$blob", expected, f"got {_shown(digest)}")
    if type(size) is not int or not 0 <= size <= limits.CONTENT_BYTES_MAX:
        return ArgumentFault(
            f"{field}.size", f"at most {limits.CONTENT_BYTES_MAX} bytes", f"got {_shown(size)}"
        )
    return None


def _argv(field: str, value: Any) -> ArgumentFault | None:
    if type(value) is not list or not value or any(type(item) is not str for item in value):
        return ArgumentFault(field, "a non-empty list of strings", f"got {_shown(value)}")
    if any("\0" in item for item in value):
        return ArgumentFault(field, "strings without NUL", f"got {_shown(value)}")
    return None


def _strings(field: str, value: Any) -> ArgumentFault | None:
    if type(value) is not dict or any(
        type(k) is not str or type(v) is not str for k, v in value.items()
    ):
        return ArgumentFault(field, "an object of strings", f"got {_shown(value)}")
    return None


def _command(field: str, value: Any) -> ArgumentFault | None:
    if type(value) is not dict:
        return ArgumentFault(field, "an object with `argv` or `shell`", f"got {_shown(value)}")
    return _check_fields(
        f"{field}.", value, {"argv": Argument(_argv), "shell": Argument(_string)}, _COMMAND_ONE_OF
    )


_COMMAND_ONE_OF: Final = (("argv", "shell"),)
_COMMAND_ARGUMENTS: Final[Mapping[str, Argument]] = {
    "argv": Argument(_argv),
    "shell": Argument(_string),
    "cwd": Argument(_path),
    "env": Argument(_strings),
    "stdin": Argument(_string),
    "timeout_ms": Argument(_integer(1, limits.DEADLINE_MS_MAX)),
    "output_max_bytes": Argument(_integer(0, limits.INLINE_BYTES_MAX)),
}

TABLE: Final[Mapping[str, Tool]] = {
    tool.name: tool
    for tool in (
        Tool(
            "write_file",
            mutating=True,
            pre_image=True,
            arguments={
                "path": Argument(_path, required=True),
                "content": Argument(_string),
                "content_b64": Argument(_string),
                "content_ref": Argument(_blob),
                "symlink_to": Argument(_string),
                "mode": Argument(_integer(0, 0o777)),
                "create_dirs": Argument(_boolean),
            },
            one_of=(("content", "content_b64", "content_ref", "symlink_to"),),
        ),
        Tool(
            "apply_patch",
            mutating=True,
            pre_image=True,
            arguments={
                "patch": Argument(_string),
                "patch_b64": Argument(_string),
                "patch_ref": Argument(_blob),
            },
            one_of=(("patch", "patch_b64", "patch_ref"),),
        ),
        Tool(
            "delete_path",
            mutating=True,
            pre_image=True,
            arguments={
                "path": Argument(_path, required=True),
                "recursive": Argument(_boolean),
                "missing_ok": Argument(_boolean),
            },
        ),
        Tool(
            "run_command",
            mutating=True,
            pre_image=False,
            arguments=_COMMAND_ARGUMENTS,
            one_of=_COMMAND_ONE_OF,
        ),
        Tool(
            "run_migration",
            mutating=True,
            pre_image=False,
            arguments={
                "name": Argument(_string, required=True),
                "up": Argument(_command, required=True),
                "down": Argument(_command, required=True),
                "timeout_ms": Argument(_integer(1, limits.DEADLINE_MS_MAX)),
            },
        ),
        Tool(
            "read_file",
            mutating=False,
            pre_image=False,
            arguments={
                "path": Argument(_path, required=True),
                "offset": Argument(_integer(0, 2**53)),
                "limit": Argument(_integer(0, limits.MIB)),
                "encoding": Argument(_string),
            },
        ),
        Tool(
            "list_dir",
            mutating=False,
            pre_image=False,
            arguments={
                "path": Argument(_path, required=True),
                "recursive": Argument(_boolean),
                "limit": Argument(_integer(1, 100_000)),
            },
        ),
        Tool(
            "search",
            mutating=False,
            pre_image=False,
            arguments={
                "pattern": Argument(_string, required=True),
                "path": Argument(_path),
                "glob": Argument(_string),
                "limit": Argument(_integer(1, 100_000)),
            },
        ),
        Tool(
            "stat",
            mutating=False,
            pre_image=False,
            arguments={"path": Argument(_path, required=True)},
        ),
    )
}

ToolClass: TypeAlias = Literal["mutating", "read_only"]


def classify(name: str) -> ToolClass:
    """Tells a tool's class; whatever is not known to be read-only is mutating (S-10)."""
    tool = TABLE.get(name)
    return "read_only" if tool is not None and not tool.mutating else "mutating"


def check(name: str, args: Any) -> ArgumentFault | None:
    """
    Checks a tool's name and arguments; None when they can be taken.

    The first fault only, with its field as a path from the command (`args.path`).
    """
    tool = TABLE.get(name)
    if tool is None:
        return ArgumentFault("tool", "one of " + ", ".join(TABLE), f"got {_shown(name)}")
    if type(args) is not dict:
        return ArgumentFault("args", "an object", f"got {_shown(args)}")
    return _check_fields("args.", args, tool.arguments, tool.one_of)


def check_undo(args: Any) -> ArgumentFault | None:
    """Checks the arguments of a caller's own undo command."""
    if type(args) is not dict:
        return ArgumentFault("compensation.args", "an object", f"got {_shown(args)}")
    return _check_fields("compensation.args.", args, _COMMAND_ARGUMENTS, _COMMAND_ONE_OF)


def _check_fields(
    prefix: str,
    args: dict[str, Any],
    arguments: Mapping[str, Argument],
    one_of: tuple[tuple[str, ...], ...],
) -> ArgumentFault | None:
    for name, value in args.items():
        argument = arguments.get(name)
        if argument is None:
            known = ", ".join(arguments)
            return ArgumentFault(f"{prefix}{name}", f"one of the fields {known}", "unknown field")
        fault = argument.check(f"{prefix}{name}", value)
        if fault is not None:
            return fault
    for name, argument in arguments.items():
        if argument.required and name not in args:
            return ArgumentFault(f"{prefix}{name}", "a value", "missing")
    for group in one_of:
        given = [name for name in group if name in args]
        if len(given) != 1:
            return ArgumentFault(
                f"{prefix}{group[0]}",
                "exactly one of " + ", ".join(group),
                "none given" if not given else "given: " + ", ".join(given),
            )
    return None
