"""The OpenAPI document of the HTTP API, written beside it; a test holds the two together."""

from __future__ import annotations

import functools
from typing import Any, Final

from fencepost.core import ids
from fencepost.release_tracker.reading import NESTED_MAX, PAGE_MAX

_STRING: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}
_BOOLEAN: Final = {"type": "boolean"}
_MS: Final = {"type": "integer", "description": "milliseconds of ledger time"}
_MS_OR_NULL: Final = {"type": ["integer", "null"], "description": "milliseconds of ledger time"}
_OR_NULL: Final = {"type": ["integer", "null"]}
_ID: Final = {"type": "string", "pattern": f"^{ids.ID_PATTERN}$"}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def _list(schema: str, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": _ref(schema), **more}


def _ref(schema: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _strings(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, _STRING)


def _integers(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, _INTEGER)


_AS_OF: Final = _object(
    _integers("shard", "seq"),
    description="the last batch of the shard, as a ledger sequence, that the answer takes in",
    required=["shard", "seq"],
)

_SANDBOX: Final = {
    **_strings("sandbox", "provider", "image", "authority", "native_id", "instance"),
    **_strings("session", "gateway", "reason", "stop_answer"),
    **_integers("shard", "memory_mb", "processes", "epoch", "journal_seq"),
    **_integers("committed", "compensated", "refused", "owed"),
    "state": {
        "type": "string",
        "enum": ["creating", "attaching", "live", "lost", "condemned", "releasing", "gone"],
    },
    "network": _BOOLEAN,
    "rebuild": _BOOLEAN,
    "open": {"type": "boolean", "description": "whether receipts of this epoch can commit"},
    "creates": {"type": "array", "items": _STRING, "description": "create ids not settled yet"},
    "created_at_ms": _MS,
    "changed_at_ms": _MS,
}

_STEP: Final = {
    **_strings("sandbox", "step", "tool", "digest", "effect", "on_moved_epoch", "attempt"),
    **_strings("reason", "detail", "evidence", "outcome", "resolved_by", "resolved_note"),
    **_integers("shard", "attempts_max", "tries", "epoch", "result_bytes", "admitted_seq"),
    "state": {
        "type": "string",
        "enum": ["pending", "fenced", "committed", "compensated", "indeterminate", "refused"],
        "description": "refused: a command that never became a step",
    },
    "cancelled": _BOOLEAN,
    "deadline_at_ms": _MS,
    "admitted_at_ms": _MS,
    "ended_at_ms": _MS_OR_NULL,
    "ended_seq": _OR_NULL,
    "ended_index": _OR_NULL,
}

_ATTEMPT: Final = {
    **_strings("attempt", "state", "direction", "session", "of", "reason", "detail", "error"),
    **_strings("evidence", "journal"),
    **_integers("ordinal", "no", "epoch"),
    "made_at_ms": _MS,
    "fenced_at_ms": _MS_OR_NULL,
    "ended_at_ms": _MS_OR_NULL,
}

_EPOCH: Final = {
    **_strings("disk", "evidence", "instance", "session", "gateway"),
    **_strings("closed_reason", "closed_evidence"),
    **_integers("epoch", "owed"),
    "opened_at_ms": _MS,
    "attached_at_ms": _MS_OR_NULL,
    "closed_at_ms": _MS_OR_NULL,
}

_REFUSAL: Final = {
    **_strings("command", "attempt", "reason", "field", "detail", "direction", "verdict"),
    **_strings("session", "gateway"),
    **_integers("epoch", "seq", "index"),
    "kind": {"type": "string", "enum": ["command", "receipt"]},
    "at_ms": _MS,
}

_PROBLEM: Final = {
    **_strings("type", "title", "detail", "instance", "reason", "field", "expected"),
    "status": _INTEGER,
    "as_of": _ref("AsOf"),
}

_NEXT: Final = {
    "type": ["string", "null"],
    "description": "the `cursor` of the next page; null on the last one",
}


def _schemas() -> dict[str, Any]:
    one, many = _ref("AsOf"), _list("AsOf")
    return {
        "AsOf": _AS_OF,
        "Problem": _object(_PROBLEM, required=["type", "title", "status", "detail", "reason"]),
        "SandboxSummary": _object(_SANDBOX, required=["sandbox", "state"]),
        "Sandbox": _object(
            {
                **_SANDBOX,
                "holders": _list("Holder"),
                "claims": _list("Claim"),
                "epochs": _list("Epoch", maxItems=NESTED_MAX),
                "open_steps": _object(_integers("pending", "fenced", "indeterminate")),
                "as_of": one,
            },
            required=["sandbox", "state", "as_of"],
        ),
        "Sandboxes": _object(
            {"items": _list("SandboxSummary"), "next": _NEXT, "as_of": many},
            required=["items", "next", "as_of"],
        ),
        "Holder": _object({**_strings("dag", "acquisition"), "since_ms": _MS}),
        "Claim": _object({**_strings("claim", "reason"), "since_ms": _MS}),
        "Epoch": _object(_EPOCH),
        "StepSummary": _object(_STEP, required=["sandbox", "step", "state"]),
        "Step": _object(
            {
                **_STEP,
                "result": {"description": "what the tool answered; null where it is not inline"},
                "attempts": _list("Attempt", maxItems=NESTED_MAX),
                "refusals": _list("Refusal", maxItems=NESTED_MAX),
                "as_of": one,
            },
            required=["sandbox", "step", "state", "as_of"],
        ),
        "Steps": _object(
            {
                "items": _list("StepSummary"),
                "next": _NEXT,
                "as_of": {"oneOf": [one, many], "description": "one where `sandbox` was given"},
            },
            required=["items", "next", "as_of"],
        ),
        "Attempt": _object(_ATTEMPT),
        "Refusal": _object(_REFUSAL),
    }


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _operation(summary: str, schema: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    problem = {"content": {"application/problem+json": {"schema": _ref("Problem")}}}
    responses: dict[str, Any] = {
        "200": {"description": "ok", "content": {"application/json": {"schema": _ref(schema)}}},
        "400": {"description": "a parameter is wrong; `field` names it", **problem},
        "401": {"description": "no token, or a wrong one", **problem},
        "403": {
            "description": "no token is set, and the name asked for is not loopback",
            **problem,
        },
        "503": {"description": "PostgreSQL gives no answer; ask again", **problem},
    }
    if any(parameter["in"] == "path" for parameter in parameters):
        responses["404"] = {"description": "not in the projection, as of `as_of`", **problem}
    return {"get": {"summary": summary, "parameters": list(parameters), "responses": responses}}


def _paths() -> dict[str, Any]:
    cursor = _parameter("cursor", "query", _STRING)
    limit = _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": PAGE_MAX})
    state = _parameter("state", "query", {**_STEP["state"], "enum": _STEP["state"]["enum"][:-1]})
    sandbox, step = _parameter("sandbox", "path", _ID), _parameter("step", "path", _ID)
    of_sandbox = _parameter("sandbox", "query", _ID)
    return {
        "/v1/sandboxes": _operation("Sandboxes by id", "Sandboxes", cursor, limit),
        "/v1/sandboxes/{sandbox}": _operation("One sandbox", "Sandbox", sandbox),
        "/v1/steps": _operation(
            "Steps in the order of their admission", "Steps", of_sandbox, state, cursor, limit
        ),
        "/v1/steps/{sandbox}/{step}": _operation("One step", "Step", sandbox, step),
    }


@functools.cache
def document() -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fencepost",
            "version": "1",
            "description": (
                "Read-only views of a projection of the ledger. `as_of` says how far it had come;"
                " the ledger may be further."
            ),
        },
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }
