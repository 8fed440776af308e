"""The tracker as people run it: a process, its command line, its HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import httpx
import pytest
from fencepost.client.processes import free_port
from fencepost.release_tracker import migrations, openapi

from tests.integration.release_tracker.conftest import SHARDS, Stack, eventually
from tests.integration.release_tracker.planner import Shard, Workload, write_file

TOKEN = "a-token-for-tests"


class Process:
    def __init__(self, nats_url: str, dsn: str) -> None:
        self.port = free_port()
        self.env = {
            **os.environ,
            "FENCEPOST_NATS_URL": nats_url,
            "FENCEPOST_POSTGRES_DSN": dsn,
            "FENCEPOST_SHARDS": str(SHARDS),
            "FENCEPOST_HTTP_HOST": "127.0.0.1",
            "FENCEPOST_HTTP_PORT": str(self.port),
            "FENCEPOST_HTTP_TOKEN": TOKEN,
        }

    async def start(self, *args: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fencepost.release_tracker",
            *args,
            env=self.env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE if args else asyncio.subprocess.STDOUT,
        )

    async def run(self, *args: str) -> tuple[int | None, str, str]:
        """Runs one command; returns its exit code, standard output and standard error."""
        process = await self.start(*args)
        out, error = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, out.decode(), error.decode()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[httpx.AsyncClient]:
        process = await self.start()
        told = asyncio.create_task(process.stdout.read())  # type: ignore[union-attr]
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{self.port}",
                headers={"authorization": f"Bearer {TOKEN}"},
            ) as http:

                async def answers() -> bool:
                    if process.returncode is not None:
                        raise AssertionError(told.result().decode() if told.done() else "ended")
                    try:
                        return (await http.get("/healthz")).status_code == 200
                    except httpx.TransportError:
                        return False

                await eventually(answers)
                yield http
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 20) == 0, (await told).decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            output = (await told).decode()
            assert TOKEN not in output
            assert "Traceback" not in output, output


@pytest.fixture
def process(stack: Stack, nats_server: Any) -> Process:
    return Process(nats_server.url, stack.dsn)


async def get(http: httpx.AsyncClient, path: str, **query: Any) -> Any:
    answer = await http.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def pages(http: httpx.AsyncClient, path: str, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        page = await get(http, path, **query)
        found += page["items"]
        if page["next"] is None:
            return found
        assert page["items"]
        query["cursor"] = page["next"]


def assert_described(value: Any, schema: dict[str, Any]) -> None:
    """Holds an answer against the document: no member that it does not name."""
    schemas = openapi.document()["components"]["schemas"]
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if isinstance(value, list):
        if "items" in schema:
            for part in value:
                assert_described(part, schema["items"])
        return
    if isinstance(value, dict) and "properties" in schema:
        unknown = set(value) - set(schema["properties"])
        assert not unknown, unknown
        for name, part in value.items():
            assert_described(part, schema["properties"][name])


async def seen(http: httpx.AsyncClient, workload: Workload) -> None:
    heads = [{"shard": shard.shard, "seq": shard.head} for shard in workload.shards if shard.head]

    async def reached() -> bool:
        answer = await http.get("/v1/sandboxes", params={"limit": 1})
        return answer.status_code == 200 and answer.json()["as_of"] == heads

    await eventually(reached)


async def settled(http: httpx.AsyncClient) -> None:
    """Waits until the tracker owns its dag shards and has projected that, too."""

    async def is_ready() -> bool:
        ready = (await http.get("/readyz")).text == "ready\n"
        text = (await http.get("/metrics")).text
        lags = re.findall(r"fencepost_projection_lag_sequences{.*} (\S+)", text)
        return ready and lags == ["0.0", "0.0"]

    await eventually(is_ready)


async def test_it_serves_what_it_projected(stack: Stack, process: Process) -> None:
    workload = Workload(stack.log, 23, shards=SHARDS, sandboxes=7)
    async with process.serving() as http:
        await workload.open()
        await workload.run(200)
        await seen(http, workload)

        sandboxes = await pages(http, "/v1/sandboxes", limit=2)
        assert [one["sandbox"] for one in sandboxes] == sorted(workload.names)
        schemas = openapi.document()["components"]["schemas"]
        for one in sandboxes:
            whole = await get(http, f"/v1/sandboxes/{one['sandbox']}")
            shard = workload.of(one["sandbox"])
            assert whole["as_of"] == {"shard": shard.shard, "seq": shard.head}
            assert one.items() <= whole.items()
            assert_described(whole, schemas["Sandbox"])
            state = shard.state.sandboxes[one["sandbox"]]
            assert {held["dag"] for held in whole["holders"]} == set(state.holders)
            assert {kept["claim"] for kept in whole["claims"]} == set(state.claims)

        steps = await pages(http, "/v1/steps", limit=7)
        places = [(one["admitted_seq"], one["sandbox"], one["step"]) for one in steps]
        assert places == sorted(places)
        assert len(set(places)) == len(places) > 50
        for state in ("committed", "compensated", "pending"):
            some = await pages(http, "/v1/steps", state=state, limit=50)
            assert some == [one for one in steps if one["state"] == state]
        name = workload.names[0]
        assert await pages(http, "/v1/steps", sandbox=name, limit=3) == [
            one for one in steps if one["sandbox"] == name
        ]
        for one in steps[:20]:
            whole = await get(http, f"/v1/steps/{one['sandbox']}/{one['step']}")
            assert one.items() <= whole.items()
            assert_described(whole, schemas["Step"])
            assert whole["attempts"][0]["attempt"] == one["attempt"]
            alone = await http.get(f"/v1/steps/{one['step']}")
            among = {other["sandbox"] for other in steps if other["step"] == one["step"]}
            if len(among) == 1:
                assert alone.json() == whole
            else:
                assert alone.status_code == 409
                assert set(alone.json()["sandboxes"]) == among
            assert (whole["result"] is not None) == (one["outcome"] != "")


async def test_one_step_is_told_with_result_refusals_and_what_never_became_one(
    stack: Stack, process: Process
) -> None:
    workload = Workload(stack.log, 1, shards=SHARDS, sandboxes=1)
    await workload.open()
    shard, name = workload.of("box-0"), "box-0"
    sandbox = shard.state.sandboxes[name]
    for _ in range(4):
        await shard.turn(*shard.attachments(sandbox))
    secret = {"spec": {"options": {"password": "hunter2"}}}
    await shard.turn(shard.command("create", other := _beside(shard), "c2", secret))
    await shard.turn(shard.command("step", name, "one", write_file(1)))
    await shard.turn(shard.receipt(sandbox, "one", sandbox.steps["one"], epoch=9))
    await shard.turn(shard.receipt(sandbox, "one", sandbox.steps["one"]))
    await shard.turn(shard.command("step", name, "two", {"tool": "no_such", "args": {}}))
    async with process.serving() as http:
        await seen(http, workload)
        one = await get(http, f"/v1/steps/{name}/one")
        assert (one["state"], one["outcome"]) == ("committed", "ok")
        assert one["result"] == {"bytes": 3, "text": "\0é"}
        (refusal,) = one["refusals"]
        assert (refusal["kind"], refusal["reason"], refusal["epoch"]) == (
            "receipt",
            "future_epoch",
            9,
        )
        two = await get(http, f"/v1/steps/{name}/two")
        assert (two["state"], two["reason"]) == ("refused", "unknown_tool")
        assert two["refusals"][0]["field"] == "tool"
        assert (await http.get(f"/v1/steps/{name}/three")).status_code == 404
        whole = await http.get(f"/v1/sandboxes/{other}")
        assert whole.status_code == 200
        assert "hunter2" not in whole.text
        for row in await stack.fetch("SELECT sandboxes::text AS all FROM sandboxes"):
            assert "hunter2" not in row["all"]


def _beside(shard: Shard) -> str:
    from fencepost.core import ids

    return next(
        name
        for n in range(1, 1000)
        if ids.shard_of(name := f"other-{n}", shard.shards) == shard.shard
    )


async def test_probes_and_metrics_need_no_token_and_the_rest_does(
    stack: Stack, process: Process
) -> None:
    workload = Workload(stack.log, 2, shards=SHARDS, sandboxes=2)
    await workload.open()
    async with process.serving() as http:
        await seen(http, workload)
        del http.headers["authorization"]

        async def ready() -> bool:
            return (await http.get("/readyz")).status_code == 200

        await eventually(ready)
        assert (await http.get("/v1/sandboxes")).status_code == 401
        assert (await http.get("/openapi.json")).json() == openapi.document()

        async def measured() -> bool:
            text = (await http.get("/metrics")).text
            return 'fencepost_projection_lag_sequences{family="sandbox"} 0.0' in text

        await eventually(measured)
        text = (await http.get("/metrics")).text
        for shard in workload.shards:
            head = f'{{family="sandbox",shard="{shard.shard}"}} {float(shard.head)}'
            assert f"fencepost_projected_sequence{head}" in text
        assert re.search(r'fencepost_http_requests_total\{status="401"\} 1', text)


async def test_it_starts_without_postgres_and_says_so(
    stack: Stack, process: Process, unused_tcp_port_of: int
) -> None:
    process.env["FENCEPOST_POSTGRES_DSN"] = f"postgresql://x@127.0.0.1:{unused_tcp_port_of}/x"
    async with process.serving() as http:

        async def told() -> bool:
            answer = await http.get("/readyz")
            return answer.status_code == 200 and "projection: PostgreSQL" in answer.text

        await eventually(told)
        answer = await http.get("/v1/sandboxes")
        assert answer.status_code == 503
        assert answer.json()["reason"] == "projection_unavailable"


@pytest.fixture
def unused_tcp_port_of() -> int:
    return free_port()


async def test_rebuild_makes_the_same_again_with_and_without_a_tracker_beside_it(
    stack: Stack, process: Process
) -> None:
    workload = Workload(stack.log, 29, shards=SHARDS, sandboxes=5)
    await workload.open()
    await workload.run(120)
    code, out, error = await process.run("rebuild")
    assert code == 0, error
    assert "projected up to" in out
    assert len(await stack.fetch("SELECT 1 FROM steps")) > 20
    async with process.serving() as http:
        await seen(http, workload)
        await settled(http)
        before = await stack.dump()
        connection = await stack.connect()
        await connection.execute("UPDATE steps SET reason = 'other hands'")
        await connection.close()
        assert await stack.dump() != before
        code, out, error = await process.run("rebuild")
        assert code == 0, error
        await seen(http, workload)
        await settled(http)
        assert await stack.dump() == before


async def test_rebuild_of_a_broken_ledger_ends_with_the_reason(
    stack: Stack, process: Process
) -> None:
    workload = Workload(stack.log, 31, shards=SHARDS, sandboxes=2)
    await workload.open()
    shard = workload.shards[0]
    await shard.append([], prev=shard.head + 5)
    code, _, error = await process.run("rebuild")
    assert code == 1
    assert "shard 0: a gap" in error.splitlines()[-1]


async def test_migrations_are_applied_once_and_never_changed(
    stack: Stack, process: Process
) -> None:
    code, out, error = await process.run("migrate")
    assert code == 0, error
    assert out.splitlines() == [f"applied {one.name}" for one in stack.scripts]
    assert (await process.run("migrate"))[:2] == (0, "nothing to apply\n")
    connection = await stack.connect()
    try:
        later = [
            *stack.scripts,
            migrations.Migration(3, "pre", "0003_pre_x", "CREATE TABLE x (a int)"),
            migrations.Migration(3, "post", "0003_post_x", "DROP TABLE x"),
        ]
        done = await asyncio.gather(*(_migrate(stack.dsn, later, ("pre",)) for _ in range(4)))
        # Four at once, and once each; the post waits until it is asked for.
        assert sorted(done) == [[], [], [], ["0003_pre_x"]]
        assert await migrations.migrate(connection, later) == ["0003_post_x"]
        changed = [stack.scripts[0]._replace(sql="SELECT 1"), *stack.scripts[1:]]
        with pytest.raises(migrations.MigrationError, match="other contents"):
            await migrations.migrate(connection, changed)
        broken = [*later, migrations.Migration(4, "pre", "0004_pre_y", "CREATE TABLE y (a int); X")]
        with pytest.raises(asyncpg.PostgresSyntaxError):
            await migrations.migrate(connection, broken)
        assert await connection.fetchval("SELECT to_regclass('y')") is None
    finally:
        await connection.close()


async def _migrate(
    dsn: str, scripts: list[migrations.Migration], phases: tuple[migrations.Phase, ...]
) -> list[str]:
    connection = await asyncpg.connect(dsn)
    try:
        return await migrations.migrate(connection, scripts, phases=phases)
    finally:
        await connection.close()


@pytest.mark.parametrize("args", [("migrate", "now"), ("rebuild", "all"), ("serve",)])
async def test_a_wrong_command_line_is_told_how(process: Process, args: tuple[str, ...]) -> None:
    code, _, error = await process.run(*args)
    assert code == 2
    assert error.startswith("usage:")
