"""Errors that only a client meets; the rest are `fencepost.core.errors`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fencepost.core.errors import FencepostError, UnknownError

if TYPE_CHECKING:
    from fencepost.client.outcome import StepOutcome


class NoServerError(FencepostError):
    """No server is named, or none answers at the address."""


class OutcomeUnknownError(UnknownError):
    """
    The step's outcome did not come in time. It may still commit.

    Ask again with the same step id: `Client.wait(sandbox, step)`, or send the same call again
    under it. Another step id would be another call.
    """

    def __init__(self, sandbox: str, step: str, waited_s: float) -> None:
        super().__init__(f"step {step} of {sandbox}: no outcome within {waited_s:g} s; ask again")
        self.sandbox = sandbox
        self.step = step


class StepNotCommittedError(FencepostError):
    """The step ended otherwise than committed; `outcome` says how and why."""

    def __init__(self, outcome: StepOutcome) -> None:
        super().__init__(
            f"step {outcome.step} of {outcome.sandbox} is {outcome.state}: {outcome.reason}"
            + (f" ({outcome.detail})" if outcome.detail else "")
        )
        self.outcome = outcome


class ToolFailedError(FencepostError):
    """The tool ran and failed: a true answer of the live generation, not a fault of ours."""

    def __init__(self, tool: str, result: Any, detail: str = "") -> None:
        super().__init__(f"{tool} failed: {detail or result}")
        self.tool = tool
        self.result = result
