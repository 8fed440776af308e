"""The OpenAPI document of the HTTP API, written beside it; a test holds the two together."""

from __future__ import annotations

import functools
from typing import Any, Final

from fencepost.core import ids, limits
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
    **_strings("session", "gateway", "reason", "stop_answer", "recovering", "checkpoint"),
    **_integers("shard", "memory_mb", "processes", "epoch", "journal_seq"),
    **_integers("committed", "compensated", "refused", "owed", "recovered"),
    "state": {
        "type": "string",
        "enum": [
            "creating",
            "attaching",
            "recovering",
            "live",
            "lost",
            "condemned",
            "releasing",
            "gone",
        ],
    },
    "network": _BOOLEAN,
    "rebuild": _BOOLEAN,
    "open": {"type": "boolean", "description": "whether receipts of this epoch can commit"},
    "creates": {"type": "array", "items": _STRING, "description": "create ids not settled yet"},
    "checkpoint_at_ms": _MS_OR_NULL,
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

_VERDICT: Final = {
    "released": {
        "type": ["string", "null"],
        "enum": ["confirmed", "unconfirmed", "nothing_held", None],
        "description": "the last verdict on the DAG's sandboxes; null while none was given",
    },
    **_strings("reason", "evidence"),
}

_DAG: Final = {
    **_strings("dag", "close_reason", "finished", "retry_of"),
    **_integers("shard", "outstanding_count", "held_ever", "gone", "abandoned", "nodes_count"),
    **_VERDICT,
    "closed": {"type": "boolean", "description": "nothing more is acquired for it"},
    "cancelled": {"type": "integer", "description": "nodes that a cancel ended"},
    "opened_at_ms": _MS,
    "closed_at_ms": _MS_OR_NULL,
    "answered_at_ms": _MS_OR_NULL,
}

_OUTSTANDING: Final = {
    **_strings("slot", "sandbox", "acquisition", "instance", "phase", "reason", "evidence"),
    "since_ms": _MS,
    "next_check_within_ms": {
        "type": ["integer", "null"],
        "description": "milliseconds; null where it waits for other holders",
    },
}

_CANCELLED: Final = {
    "ok": {"type": "boolean", "description": "the cancel is taken, whatever the release does"},
    "cancelled": {"type": "integer", "description": "nodes that it ended"},
    "released": {
        "type": "string",
        "enum": ["confirmed", "unconfirmed", "nothing_held"],
        "description": "left out where no release was attempted: a node, or an ended root",
    },
    **_strings("reason", "evidence"),
    "outstanding": {"type": "array", "items": {"$ref": "#/components/schemas/Outstanding"}},
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
        **_task_schemas(),
        "Refusal": _object(_REFUSAL),
    }


def _task_schemas() -> dict[str, Any]:
    proven = {"description": "null where the owner of the shard proved it"}
    node = {**_strings("node", "status"), "started_at_ms": _MS_OR_NULL, "ended_at_ms": _MS_OR_NULL}
    verdict = {
        **_VERDICT,
        **_strings("cancel"),
        **_integers("outstanding_count", "cancelled", "seq", "index"),
        "at_ms": _MS,
    }
    return {
        "DagSummary": _object(_DAG, required=["dag", "released"]),
        "Dags": _object(
            {"items": _list("DagSummary"), "next": _NEXT, "as_of": _list("AsOf", **proven)},
            required=["items", "next", "as_of"],
        ),
        "Task": _object(
            {
                **_DAG,
                "nodes": _list("Node"),
                "outstanding": _list("Outstanding"),
                "verdicts": _list("Verdict", maxItems=NESTED_MAX),
                "as_of": {"oneOf": [_ref("AsOf"), {"type": "null"}], **proven},
            },
            required=["dag", "released", "outstanding", "as_of"],
        ),
        "Node": _object(node),
        "Outstanding": _object(_OUTSTANDING),
        "Verdict": _object(verdict),
        "Cancelled": _object(_CANCELLED, required=["ok", "cancelled"]),
    }


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _operation(
    summary: str, schema: str, *parameters: dict[str, Any], method: str = "get"
) -> dict[str, Any]:
    problem = {"content": {"application/problem+json": {"schema": _ref("Problem")}}}
    responses: dict[str, Any] = {
        "200": {"description": "ok", "content": {"application/json": {"schema": _ref(schema)}}},
        "400": {"description": "a parameter is wrong; `field` names it", **problem},
        "401": {"description": "no token, or a wrong one", **problem},
        "403": {
            "description": (
                "a token that may only read; or no token is set, and the name asked for, or the"
                " page that asks, is not this machine's"
            ),
            **problem,
        },
        "503": {
            "description": "PostgreSQL, or the shard's owner, gives no answer; ask again",
            **problem,
        },
    }
    if any(parameter["in"] == "path" for parameter in parameters):
        responses["404"] = {
            "description": "not in the projection, as of `as_of`; or proven not to exist",
            **problem,
        }
    return {method: {"summary": summary, "parameters": list(parameters), "responses": responses}}


def _paths() -> dict[str, Any]:
    cursor = _parameter("cursor", "query", _STRING)
    limit = _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": PAGE_MAX})
    state = _parameter("state", "query", {**_STEP["state"], "enum": _STEP["state"]["enum"][:-1]})
    sandbox, step = _parameter("sandbox", "path", _ID), _parameter("step", "path", _ID)
    of_sandbox = _parameter("sandbox", "query", _ID)
    task, node = _parameter("task", "path", _ID), _parameter("node", "path", _STRING)
    released = _parameter(
        "released",
        "query",
        {"type": "string", "enum": ["confirmed", "unconfirmed", "nothing_held"]},
    )
    proof = _parameter("proof", "query", {"type": "integer", "enum": [0, 1]})
    bound = _parameter(
        "bound_ms",
        "query",
        {"type": "integer", "minimum": 1, "maximum": limits.CANCEL_BOUND_MS_MAX},
    )
    return {
        "/v1/sandboxes": _operation("Sandboxes by id", "Sandboxes", cursor, limit),
        "/v1/sandboxes/{sandbox}": _operation("One sandbox", "Sandbox", sandbox),
        "/v1/steps": _operation(
            "Steps in the order of their admission; of several ledgers, of their sequences there",
            "Steps",
            of_sandbox,
            state,
            cursor,
            limit,
        ),
        "/v1/steps/{step}": _operation("One step, by its id alone", "Step", step),
        "/v1/steps/{sandbox}/{step}": _operation("One step", "Step", sandbox, step),
        "/v1/dags": _operation("DAGs by id", "Dags", released, proof, cursor, limit),
        "/v1/tasks/{task}": _operation("One task: a DAG", "Task", task, proof),
        "/v1/tasks/{task}/cancel": _operation(
            "Cancel a root and release what it holds",
            "Cancelled",
            task,
            _parameter("reason", "query", _STRING),
            bound,
            method="post",
        ),
        "/v1/tasks/{task}/nodes/{node}/cancel": _operation(
            "Cancel one node", "Cancelled", task, node, bound, method="post"
        ),
    }


@functools.cache
def document() -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fencepost",
            "version": "1",
            "description": (
                "Views of a projection of the ledger, and cancels. `as_of` says how far the"
                " projection had come; the ledger may be further."
            ),
        },
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }
