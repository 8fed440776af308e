"""Errors of the HTTP API, as problem details (RFC 9457) that name the offending field."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

MEDIA_TYPE: Final = "application/problem+json"


class ProblemError(Exception):
    """Ends a request. `reason` is a stable word; `extra` are members beside the standard ones."""

    def __init__(
        self,
        status: HTTPStatus,
        reason: str,
        detail: str,
        *,
        field: str = "",
        expected: str = "",
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason
        self.detail = detail
        self.field = field
        self.expected = expected
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def body(self, instance: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "type": f"urn:fencepost:problem:{self.reason}",
            "title": self.status.phrase,
            "status": int(self.status),
            "detail": self.detail,
            "instance": instance,
            "reason": self.reason,
        }
        if self.field:
            found["field"] = self.field
        if self.expected:
            found["expected"] = self.expected
        return found | self.extra


def bad_field(field: str, expected: str, got: str) -> ProblemError:
    shown = got if len(got) <= 80 else f"{got[:77]}..."
    return ProblemError(
        HTTPStatus.BAD_REQUEST,
        "bad_parameter",
        f"{field}: expected {expected}, got {shown!r}",
        field=field,
        expected=expected,
    )
