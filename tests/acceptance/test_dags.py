"""DAGs on real processes: what a cancel answers, over HTTP and by the client, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from fencepost.client import RefusedError, Verdict
from fencepost.client.client import Client
from fencepost.core import ids
from fencepost.core.errors import UnknownError

from tests.acceptance.conftest import RunningStack, StartStack

NAMES = ["token", "auth", "__class__", "items", "", "😀", "e\u0301", "\u00e9", "a.b *>\n", " "]


@pytest.fixture
async def dags(start_stack: StartStack) -> RunningStack:
    """One planner, one gateway, one tracker; no PostgreSQL: no cancel needs it."""
    return await start_stack(trackers=1)


@contextlib.asynccontextmanager
async def api(stack: RunningStack, token: str = "") -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    url = stack.services["tracker-1"].http_url
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        yield http


async def eventually(what: Callable[[], Awaitable[Any]], seconds: float = 60) -> Any:
    async with asyncio.timeout(seconds):
        while True:
            with contextlib.suppress(UnknownError):
                if found := await what():
                    return found
            await asyncio.sleep(0.05)


async def state_of(client: Client, sandbox: str) -> str:
    return str((await client.show(sandbox))["state"])


def running(stack: RunningStack, sandbox: str) -> list[int]:
    """The processes of a sandbox, by its folder in their command."""
    found = []
    for process in stack.processes():
        with contextlib.suppress(Exception):
            if sandbox in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


async def stops(client: Client, sandbox: str) -> int:
    """How many stops the ledger says were answered for a sandbox."""
    count = 0
    async for recorded in client.history(sandbox):
        for entry in recorded.entries:
            kind = type(entry).__struct_config__.tag
            count += kind == "stop_answered" and getattr(entry, "sandbox", "") == sandbox
    return count


async def test_s026_s044_s045_a_confirmed_cancel_stopped_once_and_left_nothing(
    dags: RunningStack,
) -> None:
    async with await dags.client() as client, api(dags) as http:
        dag = await client.open_dag("run", ["a", "b"])
        held = await client.acquire(dag, "box")
        assert held.epoch == 1
        assert (await client.write_file(held.sandbox, "x", "y")).is_ok
        assert running(dags, held.sandbox)
        answer = await http.post("/v1/tasks/run/cancel")
        assert answer.status_code == 200
        assert answer.json() == {
            "ok": True,
            "cancelled": 2,
            "released": "confirmed",
            "evidence": "observed_gone",
        }
        assert not running(dags, held.sandbox)
        assert await stops(client, held.sandbox) <= 1
        assert await state_of(client, held.sandbox) == "gone"
    assert (await dags.verify()).is_clean


async def test_s028_s033_s034_s036_s145_a_refused_stop_is_unconfirmed_until_it_is_gone(
    dags: RunningStack,
) -> None:
    async with await dags.client() as client, api(dags) as http:
        await client.open_dag("run", ["a", "b"])
        held = await client.acquire("run", "box")
        await client.fault(held.sandbox, {"do": "refuse_stops", "times": 3})
        first = await http.post("/v1/tasks/run/cancel", params={"bound_ms": 700})
        # Status and the other fields are those of a release that went well (S-145).
        assert first.status_code == 200
        body = first.json()
        assert (body["ok"], body["cancelled"]) == (True, 2)
        assert (body["released"], body["reason"]) == ("unconfirmed", "stop_refused")
        (left,) = body["outstanding"]
        assert (left["slot"], left["sandbox"]) == ("box", held.sandbox)
        second = await http.post("/v1/tasks/run/cancel", params={"bound_ms": 300})
        assert second.json()["released"] == "unconfirmed"
        async with asyncio.timeout(60):
            async for verdict in client.releases("run", from_start=True):
                if verdict.released == "confirmed":
                    break
                assert verdict.released == "unconfirmed"
        assert not running(dags, held.sandbox)
        # Not a latch, and not fooled by what the first one emptied (S-36).
        third = (await http.post("/v1/tasks/run/cancel")).json()
        assert (third["released"], third["evidence"]) == ("confirmed", "observed_gone")
        assert await stops(client, held.sandbox) >= 2  # refused, accepted: repeats are no news
    assert (await dags.verify()).is_clean


async def test_s027_what_the_provider_no_longer_knows_is_gone(dags: RunningStack) -> None:
    async with await dags.client() as client:
        await client.open_dag("run")
        held = await client.acquire("run", "box", {"rebuild": False})
        await client.reclaim(held.sandbox, wait=False)
        verdict = await client.cancel_dag("run", bound_s=20)
        assert (verdict.released, verdict.outstanding) == ("confirmed", 0)
        assert not running(dags, held.sandbox)


async def test_s031_one_of_three_fails_and_all_are_tried(dags: RunningStack) -> None:
    async with await dags.client() as client:
        await client.open_dag("run")
        held = [await client.acquire("run", slot) for slot in ("one", "two", "three")]
        await client.fault(held[1].sandbox, {"do": "refuse_stops", "times": 100})
        verdict = await client.cancel_dag("run", bound_s=2.0)
        assert (verdict.released, verdict.reason) == ("unconfirmed", "stop_refused")
        assert verdict.outstanding == 1
        assert not running(dags, held[0].sandbox) + running(dags, held[2].sandbox)
        (left,) = (await client.show_dag("run"))["outstanding"]
        assert left["slot"] == "two"
        await client.fault(held[1].sandbox, {"do": "refuse_stops", "times": 0})
        assert await eventually(lambda: _confirmed(client, "run"))


async def test_s032_s062_nothing_held_is_a_standalone_task_that_never_acquired(
    dags: RunningStack,
) -> None:
    async with await dags.client() as client, api(dags) as http:
        await client.open_dag("alone")
        assert (await http.post("/v1/tasks/alone/cancel")).json() == {
            "ok": True,
            "cancelled": 0,
            "released": "nothing_held",
        }
        again = await client.cancel_dag("alone")
        assert (again.released, again.outstanding) == ("nothing_held", 0)


async def test_s035_two_cancels_at_once_answer_from_one_state(dags: RunningStack) -> None:
    async with await dags.client() as client:
        await client.open_dag("run")
        held = await client.acquire("run", "box")
        await client.fault(held.sandbox, {"do": "refuse_stops", "times": 2})
        verdicts = await asyncio.gather(*(client.cancel_dag("run", bound_s=0.5) for _ in range(4)))
        assert {verdict.released for verdict in verdicts} == {"unconfirmed"}
        last = await eventually(lambda: _confirmed(client, "run"))
        assert last["outstanding"] == []
        assert not running(dags, held.sandbox)


async def _confirmed(client: Client, dag: str) -> dict[str, Any] | None:
    view = await client.show_dag(dag)
    return view if view["released"] == "confirmed" else None


async def test_s046_s063_a_node_is_cancelled_without_a_word_on_releases(dags: RunningStack) -> None:
    async with await dags.client() as client, api(dags) as http:
        await client.open_dag("run", ["a", "b/c", *NAMES])
        held = await client.acquire("run", "box")
        assert (await http.post("/v1/tasks/run/nodes/a/cancel")).json() == {
            "ok": True,
            "cancelled": 1,
        }
        assert (await http.post("/v1/tasks/run/nodes/b%2Fc/cancel")).json()["cancelled"] == 1
        repeated = await http.post("/v1/tasks/run/nodes/a/cancel")
        assert repeated.json() == {"ok": True, "cancelled": 0}
        missing = await http.post("/v1/tasks/run/nodes/z/cancel")
        assert (missing.status_code, missing.json()["field"]) == (404, "node")
        assert await state_of(client, held.sandbox) == "live"
        shown = (await http.get("/v1/tasks/run", params={"proof": 1})).json()
        assert all(set(one) == {"node", "status"} for one in shown["nodes"])
        statuses = {one["node"]: one["status"] for one in (await client.show_dag("run"))["nodes"]}
        assert {name for name, status in statuses.items() if status == "cancelled"} == {"a", "b/c"}
        assert set(statuses) == {"a", "b/c", *NAMES}


async def test_s047_an_ended_root_is_not_torn_down_again(dags: RunningStack) -> None:
    async with await dags.client() as client, api(dags) as http:
        await client.open_dag("done", ["a"])
        await client.finish_dag("done")
        answer = await http.post("/v1/tasks/done/cancel")
        assert (answer.status_code, answer.json()) == (200, {"ok": True, "cancelled": 0})
        # One that has not ended is (the control).
        await client.open_dag("open", ["a"])
        assert (await http.post("/v1/tasks/open/cancel")).json()["released"] == "nothing_held"


async def test_s037_s162_a_release_by_a_node_counts_in_a_later_cancel(dags: RunningStack) -> None:
    async with await dags.client() as client:
        await client.open_dag("run", ["a", "b"])
        leaked = await client.acquire("run", "early")
        await client.acquire("run", "late")
        await client.fault(leaked.sandbox, {"do": "refuse_stops", "times": 2})
        await client.finish_node("run", "a", release=["early"])

        async def refused() -> bool:
            view = await client.show_dag("run")
            return any(item["reason"] == "stop_refused" for item in view["outstanding"])

        await eventually(refused)  # nobody asked, and it is in the ledger all the same
        verdict = await client.cancel_dag("run", bound_s=0.6)
        assert verdict.released == "unconfirmed"
        assert await eventually(lambda: _confirmed(client, "run"))


async def test_s038_nothing_is_acquired_behind_the_barrier(dags: RunningStack) -> None:
    async with await dags.client() as client:
        await client.open_dag("run")
        assert (await client.cancel_dag("run")).released == "nothing_held"
        with pytest.raises(RefusedError) as refused:
            await client.acquire("run", "box")
        assert refused.value.reason == "dag_closed"
        await client.open_dag("other")
        assert (await client.acquire("other", "box")).epoch == 1


async def test_s144_slots_of_any_name_are_told_and_held_apart(dags: RunningStack) -> None:
    async with await dags.client() as client, api(dags) as http:
        await client.open_dag("run", NAMES)
        for slot in NAMES:
            await client.acquire("run", slot, wait=False)
        shown = (await http.get("/v1/tasks/run", params={"proof": 1})).json()
        assert {item["slot"] for item in shown["outstanding"]} == set(NAMES)
        assert all(item["sandbox"] and item["since_ms"] for item in shown["outstanding"])
        with pytest.raises(RefusedError) as refused:
            await client.acquire("run", "x" * 10_000)
        assert (refused.value.reason, refused.value.field) == ("out_of_range", "slot")
        with pytest.raises(RefusedError) as taken:
            await client.acquire("run", "token")
        assert taken.value.reason == "slot_taken"
        verdict = await client.cancel_dag("run", bound_s=30)
        assert verdict.released in ("confirmed", "nothing_held")
        assert not running(dags, "sbx-")


async def test_s164_nobody_without_the_right_to_write_tears_anything_down(
    start_stack: StartStack,
) -> None:
    tokens = {"FENCEPOST_HTTP_TOKEN": "writer", "FENCEPOST_HTTP_READ_TOKEN": "reader"}
    stack = await start_stack(trackers=1, environment=tokens)
    async with await stack.client() as client:
        await client.open_dag("run")
        held = await client.acquire("run", "box")
        for token, status in (("reader", 403), ("", 401), ("writers", 401)):
            async with api(stack, token) as http:
                answer = await http.post("/v1/tasks/run/cancel")
                assert answer.status_code == status, answer.text
        async with api(stack, "reader") as http:
            shown = (await http.get("/v1/tasks/run", params={"proof": 1})).json()
        assert (shown["closed"], shown["outstanding"][0]["phase"]) == (False, "ready")
        async with api(stack, "writer") as http:
            unknown = await http.post("/v1/tasks/nobody/cancel")
            assert (unknown.status_code, unknown.json()["reason"]) == (404, "not_found")
            assert await state_of(client, held.sandbox) == "live"
            assert (await http.post("/v1/tasks/run/cancel")).json()["released"] == "confirmed"


async def test_s041_s042_s043_s187_a_cancel_is_answered_at_its_bound_with_no_owner_and_goes_on(
    dags: RunningStack,
) -> None:
    async with await dags.client() as client:
        await client.open_dag("run")
        held = await client.acquire("run", "box")
        dags.services["tracker-1"].kill()
        began = asyncio.get_running_loop().time()
        verdict = await client.cancel_dag("run", bound_s=1.0)
        took = asyncio.get_running_loop().time() - began
        assert (verdict.released, verdict.reason) == ("unconfirmed", "pending_shard")
        assert took < 10
        assert await state_of(client, held.sandbox) == "live"
        # Nobody of the run is there to ask again: the stored command alone drives it.
        dags.services["tracker-1"].start()
        assert await eventually(lambda: _confirmed(client, "run"))
        assert not running(dags, held.sandbox)
    assert (await dags.verify()).is_clean


async def test_a_cancel_with_no_planner_says_that_the_stop_is_pending(dags: RunningStack) -> None:
    async with await dags.client() as client, api(dags) as http:
        await client.open_dag("run", ["a"])
        held = await client.acquire("run", "box")
        dags.services["planner-1"].kill()
        answer = await http.post("/v1/tasks/run/cancel", params={"bound_ms": 800})
        body = answer.json()
        assert (answer.status_code, body["ok"], body["cancelled"]) == (200, True, 1)
        assert body["released"] == "unconfirmed"
        assert body["reason"] in ("pending_shard", "pending_stop")
        dags.services["planner-1"].start()
        assert await eventually(lambda: _confirmed(client, "run"))
        assert not running(dags, held.sandbox)


async def test_a_shared_sandbox_lives_until_the_last_holder_lets_go(dags: RunningStack) -> None:
    async with await dags.client() as client:
        await client.open_dag("first")
        await client.open_dag("second")
        held = await client.acquire("first", "box")
        await client.adopt("second", "theirs", held.sandbox)
        verdict = await client.cancel_dag("first", bound_s=0.5)
        assert (verdict.released, verdict.reason) == ("unconfirmed", "shared")
        assert set((await client.show(held.sandbox))["holders"]) == {"second"}
        assert (await client.write_file(held.sandbox, "x", "y")).is_ok
        assert (await client.cancel_dag("second")).released == "confirmed"
        assert await eventually(lambda: _confirmed(client, "first"))
        with pytest.raises(RefusedError):
            await client.open_dag("third")
            await client.adopt("third", "late", held.sandbox)
    assert (await dags.verify()).is_clean


async def test_s066_s067_a_retry_inherits_nothing(dags: RunningStack) -> None:
    async with await dags.client() as client:
        await client.open_dag("run")
        held = await client.acquire("run", "box")
        await client.fault(held.sandbox, {"do": "refuse_stops", "times": 2})
        await client.cancel_dag("run", bound_s=0.5)
        await client.open_dag("again", retry_of="run")
        original = await client.show_dag("run")
        assert [one["sandbox"] for one in original["outstanding"]] == [held.sandbox]
        assert original["retry_of"] == ""
        view = await client.show_dag("again")
        assert (view["retry_of"], view["outstanding"], view["held_ever"]) == ("run", [], 0)
        assert (await client.cancel_dag("again")).released == "nothing_held"
        assert (await client.show_dag("run"))["held_ever"] == 1


async def test_s065_a_second_tracker_takes_over_and_knows_all(dags: RunningStack) -> None:
    async with await dags.client() as client:
        await client.open_dag("run")
        held = await client.acquire("run", "box")
        second = dags.add("tracker")
        second.start()
        await second.ready()
        dags.services["tracker-1"].kill()
        view = await eventually(lambda: client.show_dag("run"))
        assert [item["sandbox"] for item in view["outstanding"]] == [held.sandbox]

        async def cancelled() -> Verdict | None:
            verdict = await client.cancel_dag("run")
            return verdict if verdict.released == "confirmed" else None

        assert await eventually(cancelled)
        assert not running(dags, held.sandbox)
    assert (await dags.verify()).is_clean


async def test_dags_are_listed_by_verdict_page_by_page(dags: RunningStack) -> None:
    async with await dags.client() as client, api(dags) as http:
        names = sorted(f"run-{number:02d}" for number in range(11))
        assert len({ids.shard_of(name, client.shards) for name in names}) > 1
        await asyncio.gather(*(client.open_dag(name) for name in names))
        for name in names[:3]:
            await client.cancel_dag(name)
        found: list[str] = []
        query: dict[str, Any] = {"proof": 1, "limit": 4}
        while True:
            page = (await http.get("/v1/dags", params=query)).json()
            found += [item["dag"] for item in page["items"]]
            if page["next"] is None:
                break
            query["cursor"] = page["next"]
        assert found == names
        page = (await http.get("/v1/dags?proof=1&released=nothing_held")).json()
        assert [item["dag"] for item in page["items"]] == names[:3]
        listed = [view["dag"] async for view in client.list_dags(released="nothing_held")]
        assert sorted(listed) == names[:3]
        told = await client.releases_so_far()
        assert sorted({verdict.dag for verdict in told}) == names[:3]


async def test_s144_without_postgres_dags_go_on_and_the_projection_catches_up(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(trackers=1, postgres=True)
    assert stack.postgres is not None
    async with await stack.client() as client, api(stack) as http:
        await client.open_dag("run", ["a"])
        held = await client.acquire("run", "token")
        await client.open_dag("other")
        await client.adopt("other", "box", held.sandbox)
        shown = await eventually(lambda: _projected(http, "run", "ready"))
        proven = (await http.get("/v1/tasks/run", params={"proof": 1})).json()
        assert [{**item} for item in shown["outstanding"]] == proven["outstanding"]
        assert shown["outstanding"][0]["slot"] == "token"
        receipt_key = stack.services["planner-1"].environment["FENCEPOST_RECEIPT_KEY"]
        assert receipt_key not in str(shown) + str(proven)
        stack.postgres.kill()
        await stack.postgres.child.wait(10)

        async def told() -> bool:
            answer = await http.get("/readyz")
            return answer.status_code == 200 and "projection: PostgreSQL" in answer.text

        await eventually(told)
        assert (await http.get("/v1/tasks/run")).status_code == 503
        cancelled = (await http.post("/v1/tasks/run/cancel", params={"bound_ms": 1000})).json()
        assert (cancelled["released"], cancelled["reason"]) == ("unconfirmed", "shared")
        last = await client.cancel_dag("other")
        assert last.released == "confirmed"
        await eventually(lambda: _confirmed(client, "run"))
        again = await type(stack.postgres).start(stack.data / "postgres", port=stack.postgres.port)
        try:

            async def caught_up() -> Any:
                answer = await http.get("/v1/dags", params={"released": "confirmed"})
                items = answer.json()["items"] if answer.status_code == 200 else []
                return [item["dag"] for item in items] == ["other", "run"]

            await eventually(caught_up)
            verdicts = (await http.get("/v1/tasks/run")).json()["verdicts"]
            assert verdicts[0]["released"] == "confirmed"
            assert {one["released"] for one in verdicts[1:]} == {"unconfirmed"}
        finally:
            await again.stop()


async def _projected(http: httpx.AsyncClient, dag: str, phase: str) -> dict[str, Any] | None:
    answer = await http.get(f"/v1/tasks/{dag}")
    if answer.status_code != 200:
        return None
    found: dict[str, Any] = answer.json()
    return found if [item["phase"] for item in found["outstanding"]] == [phase] else None


async def test_the_command_opens_feeds_cancels_and_follows_a_dag(dags: RunningStack) -> None:
    async def fencepost(*words: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fencepost.client", *words, "--url", dags.nats.url),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 90)
        assert process.returncode is not None
        return process.returncode, output.decode()

    assert await fencepost("dag", "open", "run", "--node", "a") == (0, "run\n")
    code, sandbox = await fencepost("dag", "acquire", "run", "[bold]token")
    assert code == 0, sandbox
    code, shown = await fencepost("sandbox", "show", sandbox.strip(), "--json")
    assert json.loads(shown)["holders"] == {"run": sandbox.strip()}
    code, again = await fencepost("dag", "acquire", "run", "[bold]token")
    assert (code, "slot_taken" in again) == (2, True)
    code, shown = await fencepost("dag", "show", "run")
    assert f"'[bold]token': {sandbox.strip()} ready, held" in shown
    code, output = await fencepost("dag", "cancel", "run", "--json")
    assert (code, json.loads(output)["released"]) == (0, "confirmed"), output
    code, output = await fencepost("dag", "list", "--released", "confirmed", "--json")
    assert [view["dag"] for view in json.loads(output)] == ["run"]
    code, output = await fencepost("releases", "run")
    assert output.splitlines()[-1] == "run  confirmed, evidence observed_gone"
    code, output = await fencepost("replay", "--dag", "run", "--json")
    kinds = [json.loads(line)["kind"] for line in output.splitlines()]
    assert (kinds[0], kinds[-1]) == ("opened", "answered")
    assert {"intended", "ready", "closed", "release_begun", "release_settled"} <= set(kinds)
    assert (await fencepost("dag", "cancel", "nobody"))[0] == 2
    code, output = await fencepost("verify", "--json")
    assert (code, json.loads(output)["dags"]) == (0, 1)
