"""What a person types for a tool, made into its arguments."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fencepost.client.blobs import CONTENT_FIELDS
from fencepost.core import limits, tools
from fencepost.core.errors import RefusedError


def tool_arguments(
    tool: str,
    *,
    pairs: Sequence[str],
    text: str | None,
    file: str | None,
    argv: Sequence[str],
) -> dict[str, Any]:
    """
    Puts together `--json`, `--arg name=value`, `--file` and what stands after `--`.

    A value is text, unless the tool's table takes no text there but takes it as JSON. `--file -`
    is standard input.
    """
    found: dict[str, Any] = _object(text) if text is not None else {}
    for pair in pairs:
        name, is_pair, value = pair.partition("=")
        if not is_pair or not name:
            raise RefusedError(
                "bad_arguments", f"--arg: expected name=value, got {pair!r}", field="--arg"
            )
        found[name] = _value(tool, name, value)
    if file is not None:
        found |= _content(tool, file)
    if argv:
        if tool != "run_command":
            raise RefusedError(
                "bad_arguments",
                f"{tool} takes no command after --; use --arg name=value",
                field="argv",
            )
        found["argv"] = list(argv)
    return found


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(sys.stdin.read() if text == "-" else text)
    except ValueError as error:
        raise RefusedError("bad_arguments", f"--json: {error}", field="--json") from error
    if not isinstance(found, dict):
        raise RefusedError("bad_arguments", "--json: expected an object", field="--json")
    return found


def _value(tool: str, name: str, value: str) -> Any:
    known = tools.TABLE.get(tool)
    argument = known.arguments.get(name) if known is not None else None
    if argument is None or argument.check(name, value) is None:
        return value
    try:
        decoded = json.loads(value)
    except ValueError:
        return value
    return decoded if argument.check(name, decoded) is None else value


def _content(tool: str, file: str) -> dict[str, Any]:
    names = CONTENT_FIELDS.get(tool)
    if names is None:
        raise RefusedError("bad_arguments", f"{tool} takes no --file", field="--file")
    try:
        if file != "-" and Path(file).stat().st_size > limits.CONTENT_BYTES_MAX:
            raise RefusedError(
                "too_large",
                f"--file: expected at most {limits.CONTENT_BYTES_MAX} bytes",
                field="--file",
            )
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise RefusedError("bad_arguments", f"--file: {error}", field="--file") from error
    try:
        return {names[0]: data.decode()}
    except UnicodeDecodeError:
        return {names[1]: base64.b64encode(data).decode()}
