"""
The HTTP API: read-only views of the projection, as an ASGI application.

Every answer says what it is as of, so that a reader knows how old it may be: an absence here proves
nothing about the ledger. Routes are few and fixed, so the router is a table.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote

import msgspec
import structlog
from fencepost.core import ids
from fencepost.release_tracker import openapi, problems, reading
from fencepost.release_tracker.problems import ProblemError, bad_field
from fencepost.release_tracker.settings import is_loopback
from fencepost.runtime.metrics import TrackerMetrics

LIMIT_DEFAULT: Final = 50
STATES: Final = ("pending", "fenced", "committed", "compensated", "indeterminate")

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

logger = structlog.get_logger(__name__)

_ENCODER = msgspec.json.Encoder()


class _Route(NamedTuple):
    """`path` as segments; one in braces is a parameter, an id. `query` names what may be asked."""

    path: tuple[str, ...]
    answer: Callable[[Api, Mapping[str, str]], Awaitable[Any]]
    query: tuple[str, ...] = ()
    is_open: bool = False


class Api:
    """
    See the module. `token` "" admits everybody, but only under a name of this machine: a page in a
    browser could otherwise read all of it through a name of its own that leads to loopback.
    """

    def __init__(
        self, reader: reading.Reader, *, shards: int, token: str, metrics: TrackerMetrics
    ) -> None:
        self._reader = reader
        self._shards = shards
        self._token = token.encode()
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
        route, segments = _match(scope.get("raw_path") or path.encode())
        if route is None or not route.is_open:
            # Before anything is said about what exists.
            self._admit(headers)
        if route is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, "no_such_path", f"there is no {path}")
        if method not in {"GET", "HEAD"}:
            raise ProblemError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                "read_only",
                f"{method}: this path is only read",
                headers={"allow": "GET, HEAD"},
            )
        values = _query(scope["query_string"], route.query)
        for name, value in segments.items():
            if not ids.is_id(value):
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

    def _admit(self, headers: Mapping[bytes, bytes]) -> None:
        if self._token:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token):
                return
            raise ProblemError(
                HTTPStatus.UNAUTHORIZED,
                "unauthorized",
                "expected the header Authorization: Bearer <token>",
                field="authorization",
                headers={"www-authenticate": "Bearer"},
            )
        host = headers.get(b"host", b"").decode("latin-1")
        bare = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if not is_loopback(bare):
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                "not_loopback",
                "without a token only names of this machine are served",
                field="host",
            )

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

    async def describe(self, values: Mapping[str, str]) -> Any:
        del values
        return openapi.document()


ROUTES: Final = (
    _Route(("v1", "sandboxes"), Api.list_sandboxes, ("cursor", "limit")),
    _Route(("v1", "sandboxes", "{sandbox}"), Api.show_sandbox),
    _Route(("v1", "steps"), Api.list_steps, ("sandbox", "state", "cursor", "limit")),
    _Route(("v1", "steps", "{sandbox}", "{step}"), Api.show_step),
    _Route(("openapi.json",), Api.describe, is_open=True),
)


def _match(raw_path: bytes) -> tuple[_Route | None, dict[str, str]]:
    """
    The route of a path, with its parameters.

    On the path as sent: an escaped slash is part of an id that is refused, never a separator.
    """
    parts = [unquote(part, errors="replace") for part in raw_path.decode("latin-1").split("/")[1:]]
    for route in ROUTES:
        if len(parts) == len(route.path) and all(
            want == got or want.startswith("{") for want, got in zip(route.path, parts, strict=True)
        ):
            return route, {
                want.strip("{}"): got
                for want, got in zip(route.path, parts, strict=True)
                if want.startswith("{")
            }
    return None, {}


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


def _not_found(field: str, what: str, as_of: Mapping[str, int]) -> ProblemError:
    return ProblemError(
        HTTPStatus.NOT_FOUND,
        "not_found",
        f"{what} is not in the projection, which may be behind the ledger",
        field=field,
        extra={"as_of": as_of},
    )
