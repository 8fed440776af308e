"""The edge of the HTTP API, without a database: who is admitted, what is refused and how."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fencepost.release_tracker import openapi, reading
from fencepost.release_tracker.api import ROUTES, Api
from fencepost.release_tracker.reading import Page
from fencepost.runtime.metrics import TrackerMetrics


class Snapshot:
    """Knows sandbox `here` with step `one`, in a projection that has come to 7."""

    async def position(self, shard: int) -> dict[str, int]:
        return {"shard": shard, "seq": 7}

    async def positions(self) -> list[dict[str, int]]:
        return [{"shard": 0, "seq": 7}]

    async def sandboxes(self, after: str, limit: int) -> Page:
        return Page([{"sandbox": "here", "after": after, "limit": limit}], None)

    async def sandbox(self, sandbox: str) -> dict[str, Any] | None:
        return {"sandbox": sandbox} if sandbox == "here" else None

    async def steps(self, sandbox: Any, state: Any, after: Any, limit: int) -> Page:
        return Page([{"sandbox": sandbox, "state": state, "after": after}], None)

    async def step(self, sandbox: str, step: str) -> dict[str, Any] | None:
        return {"step": step} if (sandbox, step) == ("here", "one") else None


class Reader:
    away = False

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Any]:
        if self.away:
            raise reading.UnavailableError("connection refused by db.internal:5432")
        yield Snapshot()


class Tasks:
    """Cancels what it is asked to, and remembers it."""

    def __init__(self) -> None:
        self.cancelled: list[tuple[str, ...]] = []

    async def cancel(self, dag: str, *, reason: str, bound_ms: int) -> dict[str, Any]:
        self.cancelled.append((dag, reason, str(bound_ms)))
        return {"ok": True, "cancelled": 1, "released": "confirmed"}

    async def cancel_node(self, dag: str, node: str, *, bound_ms: int) -> dict[str, Any]:
        self.cancelled.append((dag, node, str(bound_ms)))
        return {"ok": True, "cancelled": 1}

    async def show(self, dag: str) -> dict[str, Any] | None:
        return {"dag": dag} if dag == "here" else None


def client(
    *, token: str = "", read_token: str = "", base_url: str = "http://127.0.0.1:8000"
) -> httpx.AsyncClient:
    reader: Any = Reader()
    api: Any = Api(reader, shards=4, token=token, read_token=read_token, metrics=TrackerMetrics())
    api.tasks = Tasks()
    made = httpx.AsyncClient(transport=httpx.ASGITransport(app=api), base_url=base_url)
    made.reader = reader  # type: ignore[attr-defined]
    made.tasks = api.tasks  # type: ignore[attr-defined]
    return made


def assert_problem(answer: httpx.Response, status: int, field: str = "") -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["status"] == status
    assert body.get("field", "") == field
    assert {"type", "title", "detail", "reason", "instance"} <= set(body)
    return body


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/sandboxes?limit=0", "limit"),
        ("/v1/sandboxes?limit=501", "limit"),
        ("/v1/sandboxes?limit=ten", "limit"),
        ("/v1/sandboxes?limit=-1", "limit"),
        ("/v1/sandboxes?limit=%D9%A1", "limit"),
        ("/v1/sandboxes?cursor=x", "cursor"),
        ("/v1/sandboxes?cursor=bnVsbA", "cursor"),
        ("/v1/sandboxes?colour=red", "colour"),
        ("/v1/sandboxes?limit=1&limit=2", "limit"),
        ("/v1/steps?state=done", "state"),
        ("/v1/steps?sandbox=a.b", "sandbox"),
        ("/v1/steps?cursor=" + reading.encode_cursor("here"), "cursor"),
        ("/v1/steps?cursor=" + reading.encode_cursor(1 << 63, "here", "one"), "cursor"),
        ("/v1/steps?cursor=" + reading.encode_cursor(-1, "here", "one"), "cursor"),
        ("/v1/sandboxes/a.b", "sandbox"),
        ("/v1/sandboxes/here%2F", "sandbox"),
        ("/v1/sandboxes/" + "x" * 65, "sandbox"),
        ("/v1/sandboxes/here%0A", "sandbox"),
        ("/v1/steps/here/%F0%9F%98%80", "step"),
    ],
)
async def test_a_wrong_parameter_is_named(path: str, field: str) -> None:
    async with client() as http:
        body = assert_problem(await http.get(path), 400, field)
    assert field in body["detail"]
    assert body["expected"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/sandboxes",
        "/v1/sandboxes?limit=500",
        "/v1/sandboxes?cursor=" + reading.encode_cursor("here"),
        "/v1/steps?state=fenced&sandbox=here&limit=1",
        "/v1/steps?cursor=" + reading.encode_cursor(7, "here", "one"),
        "/v1/sandboxes/here",
        "/v1/steps/here/one",
    ],
)
async def test_right_ones_are_answered_with_what_they_are_as_of(path: str) -> None:
    async with client() as http:
        answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    as_of = answer.json()["as_of"]
    for one in as_of if isinstance(as_of, list) else [as_of]:
        assert one["seq"] == 7


async def test_an_absence_says_what_it_is_as_of() -> None:
    async with client() as http:
        for path, field in (("/v1/sandboxes/away", "sandbox"), ("/v1/steps/here/two", "step")):
            body = assert_problem(await http.get(path), 404, field)
            assert body["as_of"]["seq"] == 7
        assert "as_of" not in assert_problem(await http.get("/v1/nothing"), 404)


@pytest.mark.parametrize(
    "header",
    [None, "", "secret", "Basic secret", "Bearer", "Bearer ", "Bearer wrong", "Bearer secret2"],
)
async def test_a_token_admits_only_those_who_bring_it(header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    async with client(token="secret", base_url="http://tracker.example") as http:
        for path in ("/v1/sandboxes", "/v1/no_such_path", "/v1/sandboxes?limit=0"):
            answer = await http.get(path, headers=headers)
            assert_problem(answer, 401, "authorization")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "secret" not in answer.text.replace(header or "-", "")
        right = await http.get("/v1/sandboxes", headers={"authorization": "Bearer secret"})
        assert right.status_code == 200


@pytest.mark.parametrize("name", ["tracker.example", "127.0.0.1.example:80", "10.0.0.1"])
async def test_without_a_token_only_names_of_this_machine_are_served(name: str) -> None:
    async with client() as http:
        assert_problem(await http.get("/v1/sandboxes", headers={"host": name}), 403, "host")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost:8000", "[::1]:8000", "[::1]"])
async def test_and_those_are(name: str) -> None:
    async with client() as http:
        answer = await http.get("/v1/sandboxes", headers={"host": name})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_is_written(method: str) -> None:
    async with client() as http:
        answer = await http.request(method, "/v1/sandboxes/here", content=b"{}")
    assert_problem(answer, 405)
    assert answer.headers["allow"] == "GET, HEAD"


async def test_a_head_has_no_body() -> None:
    async with client() as http:
        answer = await http.head("/v1/sandboxes/here")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_a_database_that_is_away_is_told_without_its_address() -> None:
    async with client() as http:
        http.reader.away = True  # type: ignore[attr-defined]
        answer = await http.get("/v1/sandboxes")
    assert_problem(answer, 503)
    assert answer.headers["retry-after"] == "1"
    assert "db.internal" not in answer.text


async def test_the_document_names_exactly_the_routes() -> None:
    async with client(token="secret") as http:
        document = (await http.get("/openapi.json")).json()
    assert document == openapi.document()
    paths = {
        ("/" + "/".join(route.path), route.method): set(route.query)
        for route in ROUTES
        if not route.is_open
    }
    told = {
        (path, method.upper()): {one["name"] for one in told["parameters"] if one["in"] == "query"}
        for path, item in document["paths"].items()
        for method, told in item.items()
    }
    assert told == paths


def test_every_reference_of_the_document_leads_somewhere() -> None:
    document = openapi.document()
    seen: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                seen.append(value["$ref"].removeprefix("#/components/schemas/"))
            for part in value.values():
                walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)

    walk(document)
    assert set(seen) == set(document["components"]["schemas"])


async def test_a_cancel_says_what_is_to_be_cancelled() -> None:
    async with client() as http:
        answer = await http.post("/v1/tasks/here/cancel?reason=late&bound_ms=700")
        assert (answer.status_code, answer.json()["released"]) == (200, "confirmed")
        answer = await http.post("/v1/tasks/here/nodes/a%2Fb%20%F0%9F%98%80/cancel")
        assert answer.json() == {"ok": True, "cancelled": 1}
        assert (await http.post("/v1/tasks/here/nodes//cancel")).status_code == 200
        tasks = http.tasks  # type: ignore[attr-defined]
        assert tasks.cancelled == [
            ("here", "late", "700"),
            ("here", "a/b 😀", "5000"),
            ("here", "", "5000"),
        ]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/tasks/here/cancel?bound_ms=0", "bound_ms"),
        ("/v1/tasks/here/cancel?bound_ms=60001", "bound_ms"),
        ("/v1/tasks/here/cancel?force=1", "force"),
        ("/v1/tasks/a.b/cancel", "task"),
    ],
)
async def test_a_wrong_cancel_cancels_nothing(path: str, field: str) -> None:
    async with client() as http:
        assert_problem(await http.post(path), 400, field)
        assert not http.tasks.cancelled  # type: ignore[attr-defined]


async def test_s164_only_who_may_write_cancels() -> None:
    async with client(token="writer", read_token="reader") as http:
        for token, status in (("reader", 403), ("", 401), ("readers", 401), ("writer", 200)):
            headers = {"authorization": f"Bearer {token}"}
            answer = await http.post("/v1/tasks/here/cancel", headers=headers)
            assert answer.status_code == status, token
        reader = {"authorization": "Bearer reader"}
        assert (await http.get("/v1/sandboxes", headers=reader)).status_code == 200
        assert len(http.tasks.cancelled) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://evil.example", 403), ("null", 403), ("http://127.0.0.1:8000", 200)],
)
async def test_no_page_of_another_site_cancels_without_a_token(origin: str, status: int) -> None:
    async with client() as http:
        answer = await http.post("/v1/tasks/here/cancel", headers={"origin": origin})
        assert answer.status_code == status


async def test_a_proof_is_asked_of_the_owner_and_an_absence_is_proven() -> None:
    async with client() as http:
        http.reader.away = True  # type: ignore[attr-defined]
        assert (await http.get("/v1/tasks/here?proof=1")).json() == {"dag": "here", "as_of": None}
        assert_problem(await http.get("/v1/tasks/there?proof=1"), 404, "task")
        assert_problem(await http.get("/v1/tasks/here"), 503)
        assert_problem(await http.get("/v1/tasks/here?proof=yes"), 400, "proof")
        assert (await http.post("/v1/tasks/here/cancel")).status_code == 200


async def test_a_path_takes_its_own_method_only() -> None:
    async with client() as http:
        answer = await http.get("/v1/tasks/here/cancel")
        assert_problem(answer, 405)
        assert answer.headers["allow"] == "POST"
