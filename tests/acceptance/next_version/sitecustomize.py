"""
Makes every Python process that has this folder on its path one of the next version.

Whatever of ours it writes has a field that the present version does not know, and its machines
have a higher version. Python imports a module of this name at its start, if there is one.
"""

from __future__ import annotations

from typing import Any

import msgspec

FIELD = b'"of_the_next_version":{"deep":[1,null]}'
_Encoder = msgspec.json.Encoder


def _is_ours(value: Any) -> bool:
    if not isinstance(value, msgspec.Struct) or not type(value).__module__.startswith("fencepost."):
        return False
    # The frames into a sandbox are read by the toolhost that their own gateway carries there.
    return not (
        value.__struct_config__.array_like
        or value.__struct_config__.forbid_unknown_fields
        or type(value).__module__ == "fencepost.sandbox_gateway.frames"
    )


class Encoder:
    """As msgspec's, with one field more in every message, and in every message of a list."""

    def __init__(self, **options: Any) -> None:
        self._encode = _Encoder(**options).encode

    def encode(self, value: Any) -> bytes:
        if isinstance(value, list) and value and all(map(_is_ours, value)):
            return b"[" + b",".join(map(self.encode, value)) + b"]"
        data = self._encode(value)
        if not _is_ours(value):
            return data
        return data[:-1] + (b"," if len(data) > 2 else b"") + FIELD + b"}"


msgspec.json.Encoder = Encoder  # type: ignore[assignment,misc]
msgspec.json.encode = lambda value, **options: Encoder(**options).encode(value)

from fencepost.core.dag.machine import DagMachine  # noqa: E402 - the modules take the encoder above
from fencepost.core.sandbox.machine import SandboxMachine  # noqa: E402

SandboxMachine.version += 1
DagMachine.version += 1
