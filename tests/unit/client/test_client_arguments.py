"""What the Python client is given is looked at before anything is sent."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fencepost.client.client import Client
from fencepost.client.dags import DagCalls
from fencepost.core import limits
from fencepost.core.errors import RefusedError
from fencepost.core.steps import SandboxSpec

NAN, INF = math.nan, math.inf
LONE = "\ud800"
TIMES: list[Any] = [NAN, INF, -INF, -1, 0, 1e300, True, "5", None, b"1", 10**400]
IDS: list[Any] = ["", "a.b", "a b", "*", ">", "é", "a\n", "a" * 65, b"a", 7, True, LONE]
TEXTS: list[Any] = [None, 7, b"x", LONE, "x" * 10_000, ["x"]]
NAMES: list[Any] = [None, 7, b"x", LONE, "x" * (limits.NAME_BYTES_MAX + 1)]
WHOLES: list[Any] = [-1, 2**63, 10**400, 1.0, NAN, True, "1", None]
OBJECTS: list[Any] = ["x", b"x", 7, [("a", 1)], {7: "x"}]
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]
VALUES: list[Any] = [{"x": object()}, {"x": LONE}, {"x": CYCLE}, {"x": DEEP}]
UNDO = {"kind": "command", "args": {"argv": ["true"]}}
FILE = {"path": "a", "content": ""}

# Method, arguments that are right, the one that is not, and what it is made.
CASES: list[tuple[str, dict[str, Any], str, list[Any]]] = [
    ("create_sandbox", {"name": "a"}, "name", IDS),
    ("create_sandbox", {"name": "a"}, "reason", TEXTS),
    ("create_sandbox", {"name": "a"}, "timeout_s", TIMES),
    ("create_sandbox", {"name": "a"}, "spec", OBJECTS),
    ("create_sandbox", {"name": "a"}, "spec.memory_mb", [{"memory_mb": v} for v in WHOLES]),
    ("create_sandbox", {"name": "a"}, "spec.processes", [{"processes": v} for v in (0, 1 << 17)]),
    ("create_sandbox", {"name": "a"}, "spec", [{"colour": 1}, {"image": LONE}, {"options": 1}]),
    ("create_sandbox", {"name": "a"}, "spec", [SandboxSpec(memory_mb="x")]),  # type: ignore[arg-type]
    ("reclaim", {"sandbox": "a"}, "sandbox", IDS),
    ("reclaim", {"sandbox": "a"}, "timeout_s", TIMES),
    ("release", {"sandbox": "a"}, "sandbox", IDS),
    ("release", {"sandbox": "a"}, "timeout_s", TIMES),
    ("show", {"sandbox": "a"}, "sandbox", IDS),
    ("submit", {"sandbox": "a", "tool": "write_file", "args": FILE}, "sandbox", IDS),
    ("submit", {"sandbox": "a", "tool": "write_file", "args": FILE}, "step", IDS),
    ("submit", {"sandbox": "a", "tool": "write_file", "args": FILE}, "tool", [None, 7, b"x", LONE]),
    ("submit", {"sandbox": "a", "tool": "write_file", "args": FILE}, "args", [*OBJECTS, *VALUES]),
    ("submit", {"sandbox": "a", "tool": "write_file", "args": FILE}, "compensation", OBJECTS),
    ("submit", {"sandbox": "a", "tool": "write_file", "args": FILE}, "on_moved_epoch", ["x", 7]),
    ("submit", {"sandbox": "a", "tool": "write_file", "args": FILE}, "attempts_max", WHOLES[:-1]),
    ("submit", {"sandbox": "a", "tool": "write_file", "args": FILE}, "deadline_ms", WHOLES[:-1]),
    ("submit", {"sandbox": "a", "tool": "write_file", "args": FILE}, "commit_after", ["x", 7]),
    ("submit", {"sandbox": "a", "tool": "write_file", "args": FILE}, "effect", ["x", None]),
    ("step", {"sandbox": "a", "tool": "write_file", "args": FILE}, "timeout_s", [NAN, INF, -1, "5"]),
    ("wait", {"sandbox": "a", "step": "s"}, "timeout_s", [NAN, INF, -1, "5"]),
    ("wait", {"sandbox": "a", "step": "s"}, "step", [*IDS, None]),
    ("write_file", {"sandbox": "a", "path": "a", "content": ""}, "content", [None, 7, LONE]),
    ("run_command", {"sandbox": "a", "command": "x", "undo": "x"}, "command", [None, 7, b"x"]),
    ("read", {"sandbox": "a", "tool": "stat", "args": {"path": "a"}}, "timeout_s", TIMES),
    ("read", {"sandbox": "a", "tool": "stat", "args": {"path": "a"}}, "epoch_min", WHOLES),
    ("cancel", {"sandbox": "a", "step": "s"}, "reason", TEXTS),
    ("cancel", {"sandbox": "a", "step": "s"}, "timeout_s", [NAN, INF, -1, "5"]),
    ("resolve", {"sandbox": "a", "step": "s", "as_": "committed", "who": "w", "note": ""}, "as_", ["x", None]),
    ("resolve", {"sandbox": "a", "step": "s", "as_": "committed", "who": "w", "note": ""}, "who", [*TEXTS, ""]),
    ("resolve", {"sandbox": "a", "step": "s", "as_": "committed", "who": "w", "note": ""}, "note", TEXTS),
    ("resolve", {"sandbox": "a", "step": "s", "as_": "committed", "who": "w", "note": ""}, "timeout_s", TIMES),
    ("fault", {"sandbox": "a", "order": {"do": "x"}}, "order", [*OBJECTS, *VALUES]),
    ("fault", {"sandbox": "a", "order": {"do": "x"}}, "timeout_s", TIMES),
    ("fault_ahead", {"sandbox": "a", "order": {"do": "x"}}, "order", [*OBJECTS, *VALUES]),
    ("claim", {"sandbox": "a"}, "claim", [*IDS, "operator"]),
    ("claim", {"sandbox": "a"}, "reason", TEXTS),
    ("claim", {"sandbox": "a"}, "timeout_s", TIMES),
    ("unclaim", {"sandbox": "a", "claim": "c"}, "claim", [*IDS, None]),
    ("checkpoint", {"sandbox": "a"}, "reason", TEXTS),
    ("recover", {"sandbox": "a", "decision": "tell", "who": "w"}, "decision", ["x", None]),
    ("recover", {"sandbox": "a", "decision": "tell", "who": "w"}, "who", [*TEXTS, ""]),
    ("open_dag", {}, "dag", IDS),
    ("open_dag", {}, "nodes", ["abc", b"abc", 7, None, {"a": 1}, ["x" * 1000] * 1000]),
    ("open_dag", {}, "nodes[0]", [[one] for one in NAMES]),
    ("open_dag", {}, "retry_of", [one for one in IDS if one]),
    ("open_dag", {}, "timeout_s", TIMES),
    ("start_node", {"dag": "d", "node": "n"}, "node", NAMES),
    ("start_node", {"dag": "d", "node": "n"}, "dag", [*IDS, None]),
    ("finish_node", {"dag": "d", "node": "n"}, "node", NAMES),
    ("finish_node", {"dag": "d", "node": "n"}, "status", TEXTS),
    ("finish_node", {"dag": "d", "node": "n"}, "release", ["abc", 7, None]),
    ("acquire", {"dag": "d", "slot": "s"}, "slot", NAMES),
    ("acquire", {"dag": "d", "slot": "s"}, "spec", OBJECTS),
    ("acquire", {"dag": "d", "slot": "s"}, "replace", [1, "x", None]),
    ("acquire", {"dag": "d", "slot": "s"}, "acquisition", IDS),
    ("acquire", {"dag": "d", "slot": "s"}, "timeout_s", TIMES),
    ("adopt", {"dag": "d", "slot": "s", "sandbox": "a"}, "slot", NAMES),
    ("adopt", {"dag": "d", "slot": "s", "sandbox": "a"}, "sandbox", [*IDS, None]),
    ("release_slot", {"dag": "d", "slot": "s"}, "slot", NAMES),
    ("cancel_dag", {"dag": "d"}, "bound_s", [*TIMES, 61, 1e-9]),
    ("cancel_dag", {"dag": "d"}, "reason", TEXTS),
    ("finish_dag", {"dag": "d"}, "status", [*TEXTS, "", "x" * 65]),
    ("show_dag", {"dag": "d"}, "dag", [*IDS, None]),
    ("releases_so_far", {}, "dag", IDS),
]  # fmt: skip


class Reached(Exception):
    """Something was about to be sent."""


class _Nowhere:
    """A link that nothing may be asked of."""

    def __getattr__(self, name: str) -> Any:
        raise Reached(name)


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client.__new__(Client)
    made.link = _Nowhere()  # type: ignore[assignment]
    made.shards, made.ledgers = 1, 1
    for inner in ("_waits", "_outbox", "_blobs"):
        setattr(made, inner, _Nowhere())
    return made


@pytest.mark.parametrize(
    ("method", "right", "field", "bad"),
    CASES,
    ids=[f"{c[0]}-{c[2]}-{n}" for n, c in enumerate(CASES)],
)
async def test_what_is_wrong_is_refused_with_its_field_and_nothing_is_sent(
    client: Client, method: str, right: dict[str, Any], field: str, bad: list[Any]
) -> None:
    name = field.partition(".")[0].partition("[")[0]
    for value in bad:
        with pytest.raises(RefusedError) as raised:
            await getattr(client, method)(**{**right, name: value})
        said = raised.value.field
        assert said in {field, name, "sandbox"} or said.startswith(
            (f"{name}.", f"args.{name}", "args")
        )
        str(raised.value).encode()
        assert len(str(raised.value)) < 600
    with pytest.raises(Reached):  # the control
        await getattr(client, method)(**right)


async def test_names_of_slots_may_be_any_text(client: Client) -> None:
    for slot in ("", " ", "a.b", "*", ">", "é\n\0", "🦊"):
        with pytest.raises(Reached):
            await client.acquire("d", slot)


@pytest.mark.parametrize("url", ["", "ws://a", "nats://a:0", b"nats://a", 7])
async def test_an_address_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(RefusedError) as raised:
        await Client.connect(url)
    assert raised.value.field == "url"


@pytest.mark.parametrize("wait_s", [NAN, INF, -1, "5", None])
async def test_a_wait_that_is_none_is_refused(wait_s: Any) -> None:
    with pytest.raises(RefusedError) as raised:
        await Client.connect("nats://127.0.0.1:1", wait_s=wait_s)
    assert raised.value.field == "wait_s"


def test_the_table_looks_at_all_calls() -> None:
    calls = {name for name in (*vars(Client), *vars(DagCalls)) if not name.startswith("_")}
    left = calls - {case[0] for case in CASES}
    assert left <= {
        *("connect", "close", "history", "list_sandboxes", "list_dags", "releases", "show_step"),
        *("apply_patch", "delete_path", "run_migration"),
        *("read_file", "list_dir", "search", "stat"),  # of `step` and `read`
        *("link", "shards", "ledgers"),
    }
