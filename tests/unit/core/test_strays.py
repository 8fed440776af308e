"""The shard's side of a sweep: it decides, on its own state, what comes of a proposal."""

from typing import Any

import msgspec
import pytest
from fencepost.core import facts, limits
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import orders
from fencepost.core.shard_messages import Hold, Unhold
from fencepost.core.steps import SandboxSpec

from tests.factories import GATEWAY, SANDBOX, Bench, kinds, only, ref


def stray(bench_or_name: str = SANDBOX, **over: Any) -> facts.Stray:
    fields = {"ref": ref("i9", native_id="late"), "create_id": "sbx.9", **over}
    return facts.Stray(sandbox=bench_or_name, **fields)


def gone(proposal: facts.Stray) -> facts.Gone:
    return facts.Gone(sandbox=proposal.sandbox, gateway=GATEWAY, ref=proposal.ref)


def answered(proposal: facts.Stray, answer: Any) -> facts.StopAnswered:
    return facts.StopAnswered(
        sandbox=proposal.sandbox, gateway=GATEWAY, ref=proposal.ref, answer=answer
    )


def stops(bench: Bench) -> list[Any]:
    return [f.order for f in bench.effects() if isinstance(f.order, orders.StopOrder)]


def held(dag: str = "dag", acquisition: str = "acq") -> Bench:
    """A sandbox that a DAG holds, live."""
    bench = Bench()
    bench.see_gateway()
    bench.take(Hold(dag=dag, acquisition=acquisition, sandbox=SANDBOX, spec=SandboxSpec()))
    bench.tick()
    bench.assigned()
    bench.attach()
    return bench


@pytest.mark.parametrize("known", [False, True])
def test_s183_s210_what_nothing_vouches_for_is_stopped_until_it_is_gone(known: bool) -> None:
    bench = Bench()
    bench.see_gateway()
    if known:
        bench.live()
    proposal = stray()
    assert kinds(bench.take(proposal)) == ["stray_found"]
    assert [(o.ref, o.sandbox) for o in stops(bench)] == [(proposal.ref, SANDBOX)]
    assert bench.take(proposal) == []  # proposed by another sweeper as well
    for answer in ("timeout", "refused", "accepted", "not_found"):
        assert bench.take(answered(proposal, answer)) == []
    assert len(stops(bench)) == 1
    bench.restart()
    bench.see_gateway()
    assert len(stops(bench)) == 1
    assert kinds(bench.take(gone(proposal))) == ["stray_gone"]
    assert stops(bench) == []
    assert bench.take(gone(proposal)) == []
    if known:
        assert bench.sandbox().live


def test_a_stray_is_ordered_stopped_at_once() -> None:
    bench = Bench()
    bench.see_gateway()
    before = len(bench.owed)
    bench.take(stray())
    assert [type(f.order) for f in bench.owed[before:]] == [orders.StopOrder]


def test_where_gone_cannot_be_seen_an_accepted_stop_is_the_evidence() -> None:
    bench = Bench()
    proposal = stray(observes_gone=False)
    bench.take(proposal)
    assert bench.take(answered(proposal, "unreachable")) == []
    assert only(bench.take(answered(proposal, "accepted"))).evidence == "stop_accepted"


def test_the_latecomer_of_a_sandbox_that_is_gone_for_good_is_a_stray() -> None:
    bench = Bench().live()
    bench.command("release", "r", {})
    bench.gone()
    assert bench.sandbox().gone
    assert kinds(bench.take(stray())) == ["stray_found"]


@pytest.mark.parametrize("instance", ["i1", "i9"])
def test_what_is_under_the_current_native_id_is_vouched_for(instance: str) -> None:
    bench = Bench().live()
    own = bench.sandbox().ref
    assert own is not None
    proposal = stray(ref=msgspec.structs.replace(own, instance=instance))
    assert bench.take(proposal) == []
    # The control: one name differs.
    other = stray(ref=msgspec.structs.replace(own, instance=instance, authority="elsewhere"))
    assert kinds(bench.take(other)) == ["stray_found"]


@pytest.mark.parametrize(("create_id", "found"), [("sbx", []), ("", []), ("x", ["stray_found"])])
def test_what_an_open_create_made_is_vouched_for(create_id: str, found: list[str]) -> None:
    bench = Bench()
    bench.see_gateway()
    bench.create()
    bench.tick()
    assert list(bench.sandbox().creates) == ["sbx"]
    assert kinds(bench.take(stray(create_id=create_id))) == found


def test_an_ambiguous_create_keeps_vouching_until_it_is_settled() -> None:
    bench = Bench()
    bench.see_gateway()
    bench.create()
    bench.tick()
    failed = facts.CreateFailed(
        sandbox=SANDBOX, create_id="sbx", gateway=GATEWAY, reason="no answer", ambiguous=True
    )
    bench.take(failed)
    assert bench.take(stray(create_id="sbx")) == []
    bench.command("release", "r", {})
    bench.see_gateway()
    bench.tick(2_000)
    assert bench.take(stray(create_id="sbx")) == []
    bench.take(msgspec.structs.replace(failed, ambiguous=False, settled=True))
    assert bench.sandbox().gone
    assert kinds(bench.take(stray(create_id="sbx"))) == ["stray_found"]


def test_nothing_is_created_under_a_strays_name_while_it_runs() -> None:
    bench = Bench()
    bench.see_gateway()
    bench.take(stray(create_id="sbx"))
    assert only(bench.create()).reason == "sandbox_exists"
    hold = Hold(dag="d", acquisition="a", sandbox=SANDBOX, spec=SandboxSpec())
    assert [(t.phase, t.reason) for t in bench.take(hold)] == [("refused", "sandbox_exists")]
    bench.take(gone(stray(create_id="sbx")))
    assert "created" in kinds(bench.create())


def test_an_assignment_of_what_is_being_stopped_is_passed_over() -> None:
    bench = Bench()
    bench.see_gateway()
    bench.create()
    bench.tick()
    proposal = stray(create_id="x")
    bench.take(proposal)
    assert bench.assigned(ref=proposal.ref) == []
    assert kinds(bench.assigned()) == ["assigned"]


def test_the_sandboxs_own_stop_and_that_of_its_stray_are_told_apart() -> None:
    bench = Bench().live()
    bench.take(stray())
    bench.command("release", "r", {})
    own = bench.sandbox().ref
    assert {o.ref for o in stops(bench)} == {own, stray().ref}
    bench.take(gone(stray()))
    assert not bench.sandbox().gone
    assert {o.ref for o in stops(bench)} == {own}
    bench.gone()
    assert bench.sandbox().gone


def test_strays_have_a_bound_and_wait_for_a_later_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STRAYS_PER_SHARD_MAX", 2)
    bench = Bench()
    names = [stray(name) for name in ("a", "b", "c")]
    assert [len(bench.take(one)) for one in names] == [1, 1, 0]
    bench.take(gone(names[0]))
    assert kinds(bench.take(names[2])) == ["stray_found"]


@pytest.mark.parametrize("name", ["with space", ""])
def test_what_names_no_sandbox_of_this_shard_is_passed_over(name: str) -> None:
    assert Bench().take(stray(name)) == []
    elsewhere = Bench(shard=1, shards=64)
    assert elsewhere.take(stray(SANDBOX)) == []


# --- holders that no DAG has ----------------------------------------------------------------------


def orphaned(**over: Any) -> facts.Orphaned:
    fields = {
        "sandbox": SANDBOX,
        "dag": "dag",
        "acquisition": "acq",
        "evidence": "unknown_dag",
        **over,
    }
    return facts.Orphaned(**fields)


def test_s131_an_orphaned_holder_lets_go_once_and_the_sandbox_is_stopped_once() -> None:
    bench = held()
    entries = bench.take(orphaned())
    assert kinds(entries) == ["holder_removed", "releasing", "told"]
    assert entries[0].reason == "orphaned: unknown_dag"
    assert len(stops(bench)) == 1
    assert bench.take(orphaned()) == []  # the second sweep
    assert len(stops(bench)) == 1
    bench.gone()
    assert bench.sandbox().gone
    assert bench.take(orphaned()) == []


@pytest.mark.parametrize("over", [{"dag": "other"}, {"acquisition": "acq2"}, {"sandbox": "sby"}])
def test_a_holder_that_is_not_the_one_named_keeps_its_sandbox(over: dict[str, str]) -> None:
    bench = held()
    assert bench.take(orphaned(**over)) == []
    assert bench.sandbox().live


def test_an_orphan_beside_another_holder_or_a_claim_is_not_stopped() -> None:
    bench = held()
    bench.take(Hold(dag="dag2", acquisition="acq2", sandbox=SANDBOX))
    assert kinds(bench.take(orphaned())) == ["holder_removed", "told"]
    assert (stops(bench), bench.sandbox().live) == ([], True)
    bench.take(Unhold(dag="dag2", acquisition="acq2", sandbox=SANDBOX))
    assert len(stops(bench)) == 1
    claimed = Bench().live()
    claimed.take(Hold(dag="dag", acquisition="acq", sandbox=SANDBOX))
    assert kinds(claimed.take(orphaned())) == ["holder_removed", "told"]
    assert (stops(claimed), claimed.sandbox().live) == ([], True)


def test_a_page_of_the_shard_leaves_out_what_is_gone_and_ends() -> None:
    bench = Bench()
    bench.see_gateway()
    for n in range(5):
        bench.create(f"s{n}")
    bench.command("release", "r", {}, "s1")
    bench.tick()
    bench.take(stray("zz"))
    pages, after = [], 0
    while after is not None:
        page = bench.machine.view_sweep(bench.state, after, 2)
        assert len(page.rows) <= 2
        pages.append(page)
        after = page.next
    names = [row.sandbox for page in pages for row in page.rows]
    expected = [name for name, one in bench.state.sandboxes.items() if not one.gone]
    assert names == expected
    assert [len(page.strays) for page in pages] == [1, 0, 0]


def test_a_page_fits_into_one_message_however_many_hold() -> None:
    bench = Bench(pure=False)
    for n in range(150):
        name = f"s{n:03}".ljust(64, "x")
        spec = SandboxSpec()
        bench.take(Hold(dag="d" * 60, acquisition="a" * 60, sandbox=name, spec=spec))
        for other in range(limits.HOLDERS_PER_SANDBOX_MAX - 1):
            dag = f"{other:02}".ljust(64, "d")
            bench.take(Hold(dag=dag, acquisition=dag[::-1], sandbox=name))
    names, after = [], 0
    while after is not None:
        page = bench.machine.view_sweep(bench.state, after)
        assert page.rows
        assert len(msgspec.json.encode(page)) < limits.NATS_PAYLOAD_BYTES_MAX
        names += [row.sandbox for row in page.rows]
        after = page.next
    assert names == list(bench.state.sandboxes)


def test_strays_survive_in_bytes() -> None:
    bench = Bench()
    bench.take(stray())
    state = bench.machine.decode_state(bench.machine.encode_state(bench.state))
    assert state.strays == bench.state.strays
    assert only(bench.of_kind(e.StrayFound)).ref == stray().ref
