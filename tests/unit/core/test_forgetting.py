"""Sandboxes that are gone leave the state, and their ids are never a new sandbox's."""

import pytest
from fencepost.core import limits
from fencepost.core.errors import UnknownError
from fencepost.core.machine import Place
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import life
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.core.sandbox.state import SandboxShard
from fencepost.core.steps import SandboxSpec

MACHINE = SandboxMachine()
ULIDS = [f"01ARZ3NDEKTSV4RRFFQ69G5F{n:02d}" for n in range(20)]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GONE_REMEMBERED_PER_SHARD", 2)
    monkeypatch.setattr(limits, "GONE_NAMES_PER_SHARD", 3)


def shard_after(names: list[str]) -> SandboxShard:
    """A shard in which each of these sandboxes was made and released, one after the other."""
    state = MACHINE.initial(0, 1)
    for name in names:
        for entry in (
            e.Created(sandbox=name, spec=SandboxSpec(), create_id=name),
            e.Claimed(sandbox=name, claim="operator", reason=""),
            e.Unclaimed(sandbox=name, claim="operator"),
            e.Releasing(sandbox=name, reason="no_claim"),
            e.CreateFailedEntry(
                sandbox=name, create_id=name, reason="never_requested", ambiguous=False
            ),
            e.GoneEntry(sandbox=name, instance="", evidence="never_requested"),
        ):
            MACHINE.evolve(state, entry, Place(0, 0), 1)
    return state


def reason_of_create(state: SandboxShard, name: str) -> str:
    values = MACHINE.decode("commands", f"fp.v1.in.0.create.{name}.c1", b"{}")
    entries = MACHINE.decide(state, MACHINE.new_hints(), values[0], 1)
    return getattr(entries[0], "reason", "") if isinstance(entries[0], e.Refused) else "created"


@pytest.mark.usefixtures("few")
def test_the_latest_gone_sandboxes_stay_and_the_older_leave_their_names() -> None:
    state = shard_after(["a", "b", "c", "d"])

    assert sorted(state.sandboxes) == ["c", "d"]
    assert list(state.forgotten) == ["a", "b"]
    view = MACHINE.view_sandbox(state, "a")
    assert view is not None
    assert view["state"] == "gone"
    assert MACHINE.view_sandbox(state, "never") is None


@pytest.mark.usefixtures("few")
def test_a_forgotten_id_is_never_a_new_sandboxs() -> None:
    state = shard_after(["a", "b", "c", "d"])

    assert reason_of_create(state, "a") == "sandbox_exists"
    assert reason_of_create(state, "c") == "sandbox_exists"
    assert reason_of_create(state, "fresh") == "created"


@pytest.mark.usefixtures("few")
def test_a_step_of_a_forgotten_sandbox_is_refused_and_never_called_unknown() -> None:
    state = shard_after(["a", "b", "c", "d"])
    body = b'{"tool": "delete_path", "args": {"path": "x"}}'
    refused = {}
    for name in ("a", "never"):
        value = MACHINE.decode("commands", f"fp.v1.in.0.step.{name}.s1", body)[0]
        refused[name] = MACHINE.decide(state, MACHINE.new_hints(), value, 1)[0].reason

    assert refused == {"a": "sandbox_released", "never": "unknown_sandbox"}
    with pytest.raises(UnknownError):
        MACHINE.view_step(state, "a", "s1")
    assert MACHINE.view_step(state, "never", "s1") is None


@pytest.mark.usefixtures("few")
def test_ids_older_than_the_forgotten_are_told_by_their_time() -> None:
    state = shard_after(ULIDS[:8])

    assert len(state.forgotten) == 3
    assert state.forgotten_floor_ms > 0
    assert not state.names_used_up
    assert reason_of_create(state, ULIDS[0]) == "sandbox_exists"
    assert reason_of_create(state, "02ARZ3NDEKTSV4RRFFQ69G5F00") == "created"
    assert reason_of_create(state, "by-hand") == "created"


@pytest.mark.usefixtures("few")
def test_once_a_name_is_wholly_forgotten_new_ids_must_be_ulids() -> None:
    state = shard_after([f"n{number}" for number in range(8)])

    assert state.names_used_up
    assert reason_of_create(state, "n0") == "sandbox_exists"
    assert reason_of_create(state, "02ARZ3NDEKTSV4RRFFQ69G5F00") == "created"


@pytest.mark.usefixtures("few")
def test_what_is_still_owed_keeps_a_sandbox() -> None:
    state = shard_after([])
    for entry in (
        e.Created(sandbox="kept", spec=SandboxSpec(), create_id="kept"),
        e.HolderAdded(sandbox="kept", dag="d", acquisition="kept"),
        e.HolderRemoved(sandbox="kept", dag="d", acquisition="kept"),
        e.Releasing(sandbox="kept", reason="no_holder"),
        e.CreateFailedEntry(
            sandbox="kept", create_id="kept", reason="never_requested", ambiguous=False
        ),
        e.GoneEntry(sandbox="kept", instance="", evidence="never_requested"),
    ):
        MACHINE.evolve(state, entry, Place(0, 0), 1)

    assert state.sandboxes["kept"].gone
    assert not state.ended
    told = e.ToldEntry(
        sandbox="kept", dag="d", acquisition="kept", phase="gone", evidence="never_requested"
    )
    MACHINE.evolve(state, told, Place(0, 0), 1)
    assert list(state.ended) == ["kept"]


def test_what_ended_is_never_looked_at_for_what_time_makes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = shard_after(["a", "b"])
    spec = SandboxSpec()
    MACHINE.evolve(state, e.Created(sandbox="c", spec=spec, create_id="c"), Place(9, 0), 1)
    looked: list[str] = []
    monkeypatch.setattr(life, "overdue", lambda _hints, box, _now_ms: looked.append(box.id) or [])

    MACHINE.decide(state, MACHINE.new_hints(), MACHINE.tick(), 1)

    assert sorted(state.sandboxes) == ["a", "b", "c"]
    assert looked == ["c"]
