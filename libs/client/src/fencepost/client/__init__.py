"""The Python client, the `fencepost` command, and the embedded stack."""

from fencepost.client.client import Client, ReadResult, StepHandle
from fencepost.client.dags import Acquired
from fencepost.client.errors import (
    NoServerError,
    OutcomeUnknownError,
    StepNotCommittedError,
    ToolFailedError,
)
from fencepost.client.outcome import LedgerPosition, StepOutcome
from fencepost.core.errors import FencepostError, RefusedError, RetryLaterError, UnknownError
from fencepost.runtime.dags import Verdict

__all__ = [
    "Acquired",
    "Client",
    "FencepostError",
    "LedgerPosition",
    "NoServerError",
    "OutcomeUnknownError",
    "ReadResult",
    "RefusedError",
    "RetryLaterError",
    "StepHandle",
    "StepNotCommittedError",
    "StepOutcome",
    "ToolFailedError",
    "UnknownError",
    "Verdict",
]
