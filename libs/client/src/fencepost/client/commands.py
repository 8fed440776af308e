"""
What a caller says, checked and written as wire commands.

The same table of tools decides here and at the shard; here it only spares the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from fencepost.client import checks
from fencepost.core import ids, limits, tools
from fencepost.core.errors import RefusedError
from fencepost.core.steps import SandboxSpec, canonical, spec_problem

_encode = msgspec.json.Encoder().encode

Undo = str | Iterable[str] | Mapping[str, Any]
"""A caller's undo command: a shell line, an argv, or `run_command` arguments."""


def require_id(field: str, value: object) -> str:
    """The value, when it may stand as a subject's token."""
    if not ids.is_id(value):
        raise RefusedError(
            "bad_id",
            f"{field}: expected an id matching {ids.ID_PATTERN}, got {ascii(value)[:80]}",
            field=field,
            expected=ids.ID_PATTERN,
        )
    assert isinstance(value, str)
    return value


def require_arguments(tool: str, args: Mapping[str, Any]) -> None:
    """Raises `RefusedError` with the first fault's field, as the shard would."""
    checks.text("tool", tool)
    fault = tools.check(tool, args)
    if fault is not None:
        raise RefusedError(
            "unknown_tool" if fault.field == "tool" else "bad_arguments",
            f"{fault.field}: expected {fault.expected}: {fault.detail}",
            field=fault.field,
            expected=fault.expected,
        )


def command_arguments(command: Undo) -> dict[str, Any]:
    """`run_command` arguments of a shell line, an argv, or themselves."""
    if isinstance(command, str):
        return {"shell": command}
    if isinstance(command, Mapping):
        return checks.mapping("command", command)
    if isinstance(command, bytes | bytearray) or not isinstance(command, Iterable):
        checks.refused("command", "a shell line, an argv, or run_command arguments", command)
    return {"argv": list(command)}


def written(field: str, value: Mapping[str, Any]) -> bytes:
    """
    The exact bytes of a caller's object. Raises `RefusedError` for what JSON cannot carry.

    What is no JSON value at all, and text, numbers and depths that it cannot take.
    """
    try:
        return canonical(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RefusedError(
            "bad_arguments",
            f"{field}: expected values that JSON can carry: {ascii(str(error))[1:-1][:200]}",
            field=field,
            expected="JSON values",
        ) from error


def compensation_of(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Checks `{"kind": "pre_image"}` or `{"kind": "command", "args": {...}}`."""
    if given is None:
        return None
    kind = given.get("kind")
    if kind not in ("pre_image", "command"):
        raise RefusedError(
            "bad_arguments",
            f"compensation.kind: expected 'pre_image' or 'command', got {kind!r}",
            field="compensation.kind",
            expected="pre_image or command",
        )
    for name in given:
        if name not in ("kind", "args"):
            raise RefusedError(
                "bad_arguments",
                f"compensation.{name}: expected kind or args: unknown field",
                field=f"compensation.{name}",
                expected="kind or args",
            )
    if kind == "pre_image":
        return {"kind": kind}
    fault = tools.check_undo(given.get("args"))
    if fault is not None:
        raise RefusedError(
            "bad_arguments",
            f"{fault.field}: expected {fault.expected}: {fault.detail}",
            field=fault.field,
            expected=fault.expected,
        )
    return {"kind": kind, "args": msgspec.Raw(written("compensation.args", given["args"]))}


def require_compensation(tool: str, compensation: object) -> None:
    """Raises for a tool that is no step, and when nothing could take its effect back."""
    known = tools.TABLE.get(tool)
    if known is not None and not known.mutating:
        raise RefusedError(
            "read_only_tool",
            f"tool: {tool} changes nothing and needs no step: send it as a read",
            field="tool",
        )
    if compensation is None and known is not None and not known.pre_image:
        if tool == "run_migration":
            return
        raise RefusedError(
            "no_compensation",
            f"compensation: {tool} cannot be taken back by itself: say how it is undone",
            field="compensation",
            expected='{"kind": "command", "args": {"argv": [...]}}',
        )


def step_command(
    sandbox: str,
    step: str,
    tool: str,
    args: bytes,
    *,
    compensation: dict[str, Any] | None,
    on_moved_epoch: str,
    attempts_max: int | None,
    deadline_ms: int | None,
    commit_after: str = "receipt",
    effect: str,
) -> bytes:
    """Writes a step command; what is left at its default is left out."""
    command: dict[str, Any] = {
        "tool": tool,
        "args": msgspec.Raw(args),
        "sandbox": sandbox,
        "step": step,
    }
    if compensation is not None:
        command["compensation"] = compensation
    if on_moved_epoch != "retry":
        _one_of("on_moved_epoch", on_moved_epoch, ("retry", "reject"))
        command["on_moved_epoch"] = on_moved_epoch
    if attempts_max is not None:
        _in_range("attempts_max", attempts_max, 1, limits.ATTEMPTS_MAX)
        command["attempts_max"] = attempts_max
    if deadline_ms is not None:
        _in_range("deadline_ms", deadline_ms, limits.DEADLINE_MS_MIN, limits.DEADLINE_MS_MAX)
        command["deadline_ms"] = deadline_ms
    if commit_after != "receipt":
        _one_of("commit_after", commit_after, ("receipt", "heartbeat", "checkpoint"))
        command["commit_after"] = commit_after
    if effect != "workspace":
        _one_of("effect", effect, ("workspace", "external"))
        command["effect"] = effect
    return _encode(command)


def _one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        expected = " or ".join(allowed)
        raise RefusedError(
            "bad_arguments",
            f"{field}: expected {expected}, got {value!r}",
            field=field,
            expected=expected,
        )


def _in_range(field: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        expected = f"an integer from {low} to {high}"
        raise RefusedError(
            "out_of_range",
            f"{field}: expected {expected}, got {value!r}",
            field=field,
            expected=expected,
        )


def spec_of(spec: SandboxSpec | Mapping[str, Any] | None) -> SandboxSpec:
    """The spec of a sandbox; raises `RefusedError` naming the wrong field."""
    if spec is None:
        return SandboxSpec()
    given = spec if isinstance(spec, SandboxSpec) else checks.mapping("spec", spec)
    try:
        # A struct that was made by hand holds whatever it was given.
        plain = msgspec.to_builtins(given)
        found = msgspec.convert(plain, SandboxSpec)
        canonical(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RefusedError(
            "bad_arguments", f"spec: {ascii(str(error))[1:-1][:200]}", field="spec"
        ) from error
    if (wrong := spec_problem(found)) is not None:
        raise RefusedError(
            "out_of_range", f"{wrong[0]}: {wrong[1]}", field=wrong[0], expected=wrong[1]
        )
    return found


NOTHING_TO_UNDO: Final[dict[str, Any]] = {"kind": "command", "args": {"argv": ["true"]}}
"""The undo of a command whose caller declares that it changes nothing."""
