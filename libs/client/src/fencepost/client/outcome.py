"""What came of a step."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from fencepost.client.errors import StepNotCommittedError, ToolFailedError

StepState: TypeAlias = Literal["committed", "compensated", "indeterminate"]


class LedgerPosition(NamedTuple):
    """Where an entry stands: its shard, its batch's sequence in the ledger, its number in it."""

    shard: int
    seq: int
    entry: int


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """
    How a step ended.

    `outcome` is the tool's own: a tool that ran and failed is *committed* with outcome `failed`.
    `evidence` says what shows that a compensated step left nothing behind. `attempts` counts the
    tries, `epoch` is the generation that accepted the write. An indeterminate step may have had
    its effect or not; it stays visible until an operator resolves it.
    """

    sandbox: str
    step: str
    state: StepState
    attempts: int = 0
    epoch: int = 0
    outcome: Literal["ok", "failed", ""] = ""
    raw_result: msgspec.Raw = msgspec.Raw(b"null")
    reason: str = ""
    detail: str = ""
    evidence: str = ""
    position: LedgerPosition | None = None

    @property
    def result(self) -> Any:
        """The tool's result, decoded anew at each call."""
        return msgspec.json.decode(self.raw_result)

    @property
    def is_committed(self) -> bool:
        return self.state == "committed"

    @property
    def is_ok(self) -> bool:
        """Committed, and the tool itself succeeded."""
        return self.state == "committed" and self.outcome != "failed"

    def require(self) -> StepOutcome:
        """Itself when ok; else raises `StepNotCommittedError` or `ToolFailedError`."""
        if self.state != "committed":
            raise StepNotCommittedError(self)
        if self.outcome == "failed":
            raise ToolFailedError(f"step {self.step}", self.result)
        return self
