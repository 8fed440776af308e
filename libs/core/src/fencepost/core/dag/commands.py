"""What clients ask of a DAG, as published on `fp.v1.cmd.dag.<dag>.<id>`; `do` says which."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from fencepost.core.steps import SandboxSpec


class _Command(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do"
):
    pass


class Open(_Command, frozen=True, kw_only=True, tag="open"):
    """Opens a DAG; a standalone task is a DAG of one. Repeats are the same DAG."""

    nodes: list[str] = []
    retry_of: str = ""


class Start(_Command, frozen=True, kw_only=True, tag="start"):
    node: str


class FinishNode(_Command, frozen=True, kw_only=True, tag="finish_node"):
    """`release`: slots that this node was the last to use."""

    node: str
    status: str = "succeeded"
    release: list[str] = []


class Acquire(_Command, frozen=True, kw_only=True, tag="acquire"):
    """
    Gets a fresh sandbox into a slot. The command's id is the acquisition's and the sandbox's.

    A slot that names a sandbox is refused, unless `replace`: then it moves in one append.
    """

    slot: str
    spec: SandboxSpec = SandboxSpec()
    replace: bool = False


class Adopt(_Command, frozen=True, kw_only=True, tag="adopt"):
    """Gets a sandbox that exists into a slot; the command's id is the acquisition's."""

    slot: str
    sandbox: str
    replace: bool = False


class ReleaseSlot(_Command, frozen=True, kw_only=True, tag="release"):
    slot: str


class Cancel(_Command, frozen=True, kw_only=True, tag="cancel"):
    """Closes the DAG and releases all that it holds; answered within `bound_ms`."""

    reason: str = "cancelled"
    bound_ms: int = 5_000


class Finish(_Command, frozen=True, kw_only=True, tag="finish"):
    status: str = "succeeded"


DagCommand: TypeAlias = Open | Start | FinishNode | Acquire | Adopt | ReleaseSlot | Cancel | Finish
