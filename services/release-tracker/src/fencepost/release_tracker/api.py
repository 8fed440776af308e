"""
The HTTP API: views of the projection, and cancels, as an ASGI application.

What is read from the projection says what it is as of, so that a reader knows how old it may be: an
absence there proves nothing about the ledger. With `proof` the owner of the shard is asked instead.
Routes are few and fixed, so the router is a table.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote

import msgspec
import structlog
from fencepost.core import ids, limits
from fencepost.core.errors import UnknownError
from fencepost.release_tracker import openapi, problems, reading
from fencepost.release_tracker.problems import ProblemError, bad_field
from fencepost.release_tracker.settings import is_loopback
from fencepost.release_tracker.tasks import Tasks, no_task
from fencepost.runtime.dags import BOUND_MS_DEFAULT
from fencepost.runtime.metrics import TrackerMetrics

LIMIT_DEFAULT: Final = 50
STATES: Final = ("pending", "fenced", "committed", "compensated", "indeterminate")
VERDICTS: Final = ("confirmed", "unconfirmed", "nothing_held")

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

logger = structlog.get_logger(__name__)

_ENCODER = msgspec.json.Encoder()


class _Route(NamedTuple):
    """
    `path` as segments; one in braces is a parameter: an id, except for a node's name, which is any
    text. `query` names what may be asked.
    """

    path: tuple[str, ...]
    answer: Callable[[Api, Mapping[str, str]], Awaitable[Any]]
    query: tuple[str, ...] = ()
    is_open: bool = False
    method: str = "GET"


class Api:
    """
    See the module. `token` "" admits everybody, but only under a name of this machine: a page in a
    browser could otherwise read all of it through a name of its own that leads to loopback.
    """

    def __init__(
        self,
        reader: reading.Reader,
        *,
        shards: int,
        token: str,
        metrics: TrackerMetrics,
        read_token: str = "",
    ) -> None:
        self._reader = reader
        self._shards = shards
        self._token = token.encode()
        self._read_token = read_token.encode()
        self.tasks: Tasks | None = None
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one HTTP request."""
        del receive  # nothing here takes a body
        headers = {name.lower(): value for name, value in scope["headers"]}
        path = scope["path"]
        extra: dict[str, str] = {}
        status, media_type = HTTPStatus.OK, "application/json"
        try:
            body = _ENCODER.encode(await self._answer(scope["method"], path, scope, headers))
        except ProblemError as problem:
            status, media_type, extra = problem.status, problems.MEDIA_TYPE, problem.headers
            body = _ENCODER.encode(problem.body(path))
        self._metrics.http_requests.labels(str(int(status))).inc()
        fields = {
            "content-type": media_type,
            "content-length": str(len(body)),
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            **extra,
        }
        await send(
            {
                "type": "http.response.start",
                "status": int(status),
                "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
            }
        )
        await send(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body}
        )

    async def _answer(
        self, method: str, path: str, scope: Scope, headers: Mapping[bytes, bytes]
    ) -> Any:
        routes, segments = _match(scope.get("raw_path") or path.encode())
        may_write = False
        if not any(route.is_open for route in routes):
            # Before anything is said about what exists.
            may_write = self._admit(headers)
        if not routes:
            raise ProblemError(HTTPStatus.NOT_FOUND, "no_such_path", f"there is no {path}")
        allowed = [route.method for route in routes]
        wanted = "GET" if method == "HEAD" else method
        if wanted not in allowed:
            allow = ", ".join("GET, HEAD" if one == "GET" else one for one in allowed)
            raise ProblemError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                "read_only" if "GET" in allowed else "wrong_method",
                f"{method}: this path takes {allow}",
                headers={"allow": allow},
            )
        route = routes[allowed.index(wanted)]
        if wanted != "GET" and not may_write:
            raise ProblemError(HTTPStatus.FORBIDDEN, "read_only_token", "this token may only read")
        values = _query(scope["query_string"], route.query)
        for name, value in segments.items():
            if name != "node" and not ids.is_id(value):
                raise bad_field(name, f"an id matching {ids.ID_PATTERN}", value)
        try:
            return await route.answer(self, values | segments)
        except reading.UnavailableError as error:
            logger.warning("read_failed", detail=str(error))
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "projection_unavailable",
                "the projection cannot be read now; steps and releases go on without it",
                headers={"retry-after": "1"},
            ) from error
        except UnknownError as error:
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "unknown",
                f"nothing can be proven now: {error}",
                headers={"retry-after": "1"},
            ) from error

    def _admit(self, headers: Mapping[bytes, bytes]) -> bool:
        """Tells whether whoever asks may change things; raises for one who may not even read."""
        if self._token:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() == b"bearer":
                if hmac.compare_digest(given.strip(), self._token):
                    return True
                if self._read_token and hmac.compare_digest(given.strip(), self._read_token):
                    return False
            raise ProblemError(
                HTTPStatus.UNAUTHORIZED,
                "unauthorized",
                "expected the header Authorization: Bearer <token>",
                field="authorization",
                headers={"www-authenticate": "Bearer"},
            )
        if not is_loopback(_bare(headers.get(b"host", b""))):
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                "not_loopback",
                "without a token only names of this machine are served",
                field="host",
            )
        origin = headers.get(b"origin")
        if origin is not None and not is_loopback(_bare(origin.rpartition(b"//")[2])):
            # A page of another site can send a form here, although it cannot read the answer.
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                "not_loopback",
                "without a token no page of another site is served",
                field="origin",
            )
        return True

    async def list_sandboxes(self, values: Mapping[str, str]) -> Any:
        limit = _limit(values)
        (after,) = _cursor(values, str) or ("",)
        async with self._reader.snapshot() as snapshot:
            page = await snapshot.sandboxes(after, limit)
            return {"items": page.items, "next": page.next, "as_of": await snapshot.positions()}

    async def show_sandbox(self, values: Mapping[str, str]) -> Any:
        sandbox = values["sandbox"]
        async with self._reader.snapshot() as snapshot:
            as_of = await snapshot.position(ids.shard_of(sandbox, self._shards))
            found = await snapshot.sandbox(sandbox)
        if found is None:
            raise _not_found("sandbox", f"sandbox {sandbox}", as_of)
        return {**found, "as_of": as_of}

    async def list_steps(self, values: Mapping[str, str]) -> Any:
        limit = _limit(values)
        sandbox, state = values.get("sandbox"), values.get("state")
        if sandbox is not None and not ids.is_id(sandbox):
            raise bad_field("sandbox", f"an id matching {ids.ID_PATTERN}", sandbox)
        if state is not None and state not in STATES:
            raise bad_field("state", f"one of {', '.join(STATES)}", state)
        after = _cursor(values, int, str, str) or (0, "", "")
        async with self._reader.snapshot() as snapshot:
            page = await snapshot.steps(sandbox, state, after, limit)
            as_of: Any = (
                await snapshot.positions()
                if sandbox is None
                else await snapshot.position(ids.shard_of(sandbox, self._shards))
            )
        return {"items": page.items, "next": page.next, "as_of": as_of}

    async def show_step(self, values: Mapping[str, str]) -> Any:
        sandbox, step = values["sandbox"], values["step"]
        async with self._reader.snapshot() as snapshot:
            as_of = await snapshot.position(ids.shard_of(sandbox, self._shards))
            found = await snapshot.step(sandbox, step)
        if found is None:
            raise _not_found("step", f"step {step} of sandbox {sandbox}", as_of)
        return {**found, "as_of": as_of}

    async def find_step(self, values: Mapping[str, str]) -> Any:
        """A step by its id alone. Ids are the clients': two sandboxes may have one of that id."""
        step = values["step"]
        async with self._reader.snapshot() as snapshot:
            sandboxes = await snapshot.sandboxes_of_step(step)
            as_of = await snapshot.positions()
        if not sandboxes:
            raise _not_found("step", f"step {step} in any sandbox", as_of)
        if len(sandboxes) > 1:
            raise ProblemError(
                HTTPStatus.CONFLICT,
                "ambiguous_step",
                f"several sandboxes have a step {step}: ask for /v1/steps/<sandbox>/{step}",
                extra={"sandboxes": sandboxes},
            )
        return await self.show_step({**values, "sandbox": sandboxes[0]})

    # Tasks.

    def _tasks(self) -> Tasks:
        if self.tasks is None:
            raise UnknownError("not started")
        return self.tasks

    async def list_dags(self, values: Mapping[str, str]) -> Any:
        limit = _limit(values)
        released = values.get("released")
        if released is not None and released not in VERDICTS:
            raise bad_field("released", f"one of {', '.join(VERDICTS)}", released)
        (after,) = _cursor(values, str) or ("",)
        if _flag(values, "proof"):
            items, last = await self._tasks().page(after, limit, released or "")
            return {
                "items": items,
                "next": None if last is None else reading.encode_cursor(last),
                "as_of": None,
            }
        async with self._reader.snapshot() as snapshot:
            page = await snapshot.dags(released, after, limit)
            as_of = await snapshot.positions(family="dag")
        return {"items": page.items, "next": page.next, "as_of": as_of}

    async def show_task(self, values: Mapping[str, str]) -> Any:
        task = values["task"]
        if _flag(values, "proof"):
            proven = await self._tasks().show(task)
            if proven is None:
                raise no_task(task)
            return {**proven, "as_of": None}
        async with self._reader.snapshot() as snapshot:
            as_of = await snapshot.position(ids.shard_of(task, self._shards), family="dag")
            found = await snapshot.dag(task)
        if found is None:
            raise _not_found("task", f"task {task}", as_of)
        return {**found, "as_of": as_of}

    async def cancel_task(self, values: Mapping[str, str]) -> Any:
        return await self._tasks().cancel(
            values["task"],
            reason=values.get("reason", "cancelled")[:200],
            bound_ms=_bound(values),
        )

    async def cancel_node(self, values: Mapping[str, str]) -> Any:
        return await self._tasks().cancel_node(
            values["task"], values["node"], bound_ms=_bound(values)
        )

    async def describe(self, values: Mapping[str, str]) -> Any:
        del values
        return openapi.document()


ROUTES: Final = (
    _Route(("v1", "sandboxes"), Api.list_sandboxes, ("cursor", "limit")),
    _Route(("v1", "sandboxes", "{sandbox}"), Api.show_sandbox),
    _Route(("v1", "steps"), Api.list_steps, ("sandbox", "state", "cursor", "limit")),
    _Route(("v1", "steps", "{step}"), Api.find_step),
    _Route(("v1", "steps", "{sandbox}", "{step}"), Api.show_step),
    _Route(("v1", "dags"), Api.list_dags, ("released", "proof", "cursor", "limit")),
    _Route(("v1", "tasks", "{task}"), Api.show_task, ("proof",)),
    _Route(
        ("v1", "tasks", "{task}", "cancel"),
        Api.cancel_task,
        ("reason", "bound_ms"),
        method="POST",
    ),
    _Route(
        ("v1", "tasks", "{task}", "nodes", "{node}", "cancel"),
        Api.cancel_node,
        ("bound_ms",),
        method="POST",
    ),
    _Route(("openapi.json",), Api.describe, is_open=True),
)


def _match(raw_path: bytes) -> tuple[list[_Route], dict[str, str]]:
    """
    The routes of a path, with its parameters.

    On the path as sent: an escaped slash is part of a parameter, never a separator.
    """
    parts = [unquote(part, errors="replace") for part in raw_path.decode("latin-1").split("/")[1:]]
    found = [
        route
        for route in ROUTES
        if len(parts) == len(route.path)
        and all(
            want == got or want.startswith("{") for want, got in zip(route.path, parts, strict=True)
        )
    ]
    if not found:
        return [], {}
    return found, {
        want.strip("{}"): got
        for want, got in zip(found[0].path, parts, strict=True)
        if want.startswith("{")
    }


def _bare(host: bytes) -> str:
    text = host.decode("latin-1")
    return text.rpartition(":")[0] if text.rpartition(":")[2].isdigit() else text


def _flag(values: Mapping[str, str], name: str) -> bool:
    given = values.get(name, "0")
    if given not in ("0", "1"):
        raise bad_field(name, "0 or 1", given)
    return given == "1"


def _bound(values: Mapping[str, str]) -> int:
    given = values.get("bound_ms", str(BOUND_MS_DEFAULT))
    largest = limits.CANCEL_BOUND_MS_MAX
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= largest):
        raise bad_field("bound_ms", f"an integer from 1 to {largest}", given)
    return int(given)


def _query(query: bytes, known: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name not in known:
            raise bad_field(name[:64], f"one of {', '.join(known)}" if known else "nothing", value)
        if name in found:
            raise bad_field(name, "one value", "several")
        found[name] = value
    return found


def _limit(values: Mapping[str, str]) -> int:
    given = values.get("limit", str(LIMIT_DEFAULT))
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= reading.PAGE_MAX):
        raise bad_field("limit", f"an integer from 1 to {reading.PAGE_MAX}", given)
    return int(given)


def _cursor(values: Mapping[str, str], *kinds: type) -> Any:
    given = values.get("cursor")
    if given is None:
        return None
    try:
        return reading.decode_cursor(given, *kinds)
    except ValueError as error:
        raise bad_field("cursor", "the `next` of the page before", given) from error


def _not_found(field: str, what: str, as_of: Any) -> ProblemError:
    return ProblemError(
        HTTPStatus.NOT_FOUND,
        "not_found",
        f"{what} is not in the projection, which may be behind the ledger",
        field=field,
        extra={"as_of": as_of},
    )
