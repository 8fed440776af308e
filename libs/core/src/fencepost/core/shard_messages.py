"""
What the two families tell each other. Ordered and counted once per sender by the runtime.

`hold` and `unhold` go from a DAG's shard to a sandbox's, `told` the other way.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from fencepost.core.facts import Ref
from fencepost.core.steps import SandboxSpec


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag="hold"):
    """The DAG intends to hold this sandbox; with a spec it is a fresh one, to be made."""

    dag: str
    acquisition: str
    sandbox: str
    spec: SandboxSpec | None = None


class Unhold(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag="unhold"):
    """The DAG lets go; whoever is last releases."""

    dag: str
    acquisition: str
    sandbox: str
    reason: str = ""


class Told(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="what", tag="told"
):
    """
    How an acquisition stands, as the sandbox's shard knows it.

    `releasing` carries the reason why it is not gone yet (`pending_stop`, `stop_accepted`,
    `stop_refused`, ..., `shared`, `retained`), `gone` the evidence that it is.
    """

    dag: str
    acquisition: str
    sandbox: str
    phase: Literal["refused", "requested", "assigned", "ready", "releasing", "gone"]
    reason: str = ""
    evidence: str = ""
    epoch: int = 0
    ref: Ref | None = None


ShardMessage: TypeAlias = Hold | Unhold | Told
