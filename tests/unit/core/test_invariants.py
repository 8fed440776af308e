"""The auditor finds each kind of broken history, and nothing wrong with a good one."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fencepost.core.invariants import ShardAuditor, Violation
from fencepost.core.machine import TermOpened
from fencepost.core.sandbox import entries as e

from tests.factories import Bench, external

Batch = dict[str, Any]
replace = msgspec.structs.replace


def history() -> list[Batch]:
    """A good ledger with something of everything."""
    bench = Bench().live()
    for name in ("s1", "s2", "x1", "x2", "u1"):
        bench.step(name, external() if name.startswith("x") else None)
    bench.answer("s1")
    bench.reattach()
    bench.answer("s2")
    bench.answer("x1", verdict="indeterminate", outcome="")
    bench.cancel("x2")
    bench.answer("x2")
    bench.cancel("u1")
    bench.answer("u1", verdict="already_done")
    bench.answer("u1")
    bench.step("s3")
    bench.answer("s3", nonce="N0")
    bench.cold()
    bench.recover()
    bench.answer("s3")
    bench.command("resolve", "x1", {"as": "committed", "who": "me", "note": ""})
    bench.restart()
    bench.command("release", "r", {})
    bench.gone()
    return recorded(bench)


def recorded(bench: Bench) -> list[Batch]:
    term, found = 0, []
    for seq, now_ms, entries in bench.batches:
        term += sum(type(x) is TermOpened for x in entries)
        found.append(
            {
                "seq": seq,
                "prev": seq - 1,
                "term": term,
                "owner": f"owner{term}",
                "now_ms": now_ms,
                "entries": list(entries),
            }
        )
    return found


def audit(batches: list[Batch]) -> list[Violation]:
    auditor = ShardAuditor("sandbox", 3)
    found = [violation for batch in batches for violation in auditor.take(**batch)]
    found += auditor.finish()
    assert auditor.summary()["violations"] == len(found)
    return found


def at(batches: list[Batch], kind: type, nth: int = 0, **wanted: Any) -> tuple[Batch, int]:
    places = [
        (batch, index)
        for batch in batches
        for index, entry in enumerate(batch["entries"])
        if type(entry) is kind and all(getattr(entry, n) == v for n, v in wanted.items())
    ]
    return places[nth]


def change(kind: type, nth: int = 0, where: Any = None, **fields: Any) -> Callable[..., None]:
    def apply(batches: list[Batch]) -> None:
        batch, index = at(batches, kind, nth, **(where or {}))
        batch["entries"][index] = replace(batch["entries"][index], **fields)

    return apply


def change_receipt(**fields: Any) -> Callable[..., None]:
    def apply(batches: list[Batch]) -> None:
        batch, index = at(batches, e.Committed)
        entry = batch["entries"][index]
        batch["entries"][index] = replace(entry, receipt=replace(entry.receipt, **fields))

    return apply


def drop(kind: type, nth: int = 0, **where: Any) -> Callable[..., None]:
    def apply(batches: list[Batch]) -> None:
        batch, index = at(batches, kind, nth, **where)
        del batch["entries"][index]

    return apply


def again(kind: type, nth: int = 0, **where: Any) -> Callable[..., None]:
    def apply(batches: list[Batch]) -> None:
        batch, index = at(batches, kind, nth, **where)
        batch["entries"].insert(index + 1, batch["entries"][index])

    return apply


def frame(nth: int, **fields: Any) -> Callable[..., None]:
    return lambda batches: batches[nth].update(fields)


def before(kind: type, entry: Any) -> Callable[..., None]:
    def apply(batches: list[Batch]) -> None:
        batch, index = at(batches, kind)
        batch["entries"].insert(index, entry)

    return apply


CLOSED = e.EpochClosed(sandbox="sbx", epoch=1, reason="lease_expired")
BROKEN: list[tuple[str, Callable[..., None], str]] = [
    ("a missing batch", lambda batches: batches.pop(4), "I8"),
    ("a wrong predecessor", frame(5, prev=3), "I8"),
    ("a sequence that goes back", frame(5, seq=2), "I8"),
    ("time that goes back", frame(5, now_ms=1), "I8"),
    ("an older term's batch", frame(-1, term=1), "I8"),
    ("a term that nobody opened", frame(5, term=9), "I8"),
    ("another owner in the same term", frame(5, owner="thief"), "I8"),
    ("a term that skips one", change(TermOpened, 1, term=3), "I8"),
    ("a term opened in the middle", lambda b: b[3]["entries"].append(b[0]["entries"][0]), "I8"),
    ("a sandbox made twice", again(e.Created), "S-15"),
    ("a sandbox made never", drop(e.Created), "S-15"),
    ("an epoch that skips one", change(e.EpochOpened, 1, epoch=5), "I8"),
    ("an epoch that is used again", change(e.EpochOpened, 1, epoch=1), "I8"),
    ("an epoch opened over an open one", drop(e.EpochClosed), "I8"),
    ("an epoch under its former nonce", change(e.EpochOpened, 1, nonce="N1"), "I1"),
    ("a session that nobody marked", change(e.Attached, session="S9"), "I1"),
    ("a session of another gateway", change(e.Attached, gateway="gw9"), "I1"),
    ("an attachment without a marking", drop(e.Marking), "I1"),
    ("a marking of another nonce", change(e.Marking, nonce="N9"), "I1"),
    ("an epoch closed twice", again(e.EpochClosed), "I1"),
    ("a commit after the epoch was closed", before(e.Committed, CLOSED), "I1"),
    ("a commit without a session", before(e.Committed, e.Detached(sandbox="sbx", session="S1", reason="x")), "I1"),
    ("a receipt of another epoch", change_receipt(epoch=2), "I1"),
    ("a receipt whose epoch is true", change_receipt(epoch=True), "I1"),
    ("a receipt of another session", change_receipt(session="S9"), "I1"),
    ("a receipt of another nonce", change_receipt(nonce="N9"), "I1"),
    ("a receipt of another instance", change_receipt(instance="i9"), "I1"),
    ("a receipt of another fence", change_receipt(no=99), "I1"),
    ("a receipt of another tool", change_receipt(tool="stat"), "I1"),
    ("a receipt of other arguments", change_receipt(digest="sha256:0"), "I1"),
    ("a receipt of another direction", change_receipt(direction="undo"), "I1"),
    ("a receipt of another step", change_receipt(step="s9"), "I1"),
    ("a receipt of another sandbox", change_receipt(sandbox="s9"), "I1"),
    ("a receipt of another attempt", change_receipt(attempt="s1.9"), "I1"),
    ("a receipt that is not whole", change_receipt(outcome=""), "I1"),
    ("a receipt that refused", change_receipt(verdict="refused"), "I1"),
    ("another gateway's commit", change(e.Committed, gateway="gw9"), "I1"),
    ("another attempt's commit", change(e.Committed, attempt="s1.9"), "I1"),
    ("a commit twice", again(e.Committed), "S-15"),
    ("a commit of nothing", drop(e.Fenced, step="s1"), "S-15"),
    ("a compensation twice", again(e.Compensated, step="u1"), "S-15"),
    ("a step begun twice", again(e.Fenced, step="s1"), "S-15"),
    ("a fence number used twice", change(e.Fenced, 1, no=1), "I8"),
    ("a fence for another session", change(e.Fenced, session="S9"), "I1"),
    ("a fence for another epoch", change(e.Fenced, epoch=9), "I1"),
    ("an attempt that skips one", change(e.Fenced, where={"attempt": "s2.2"}, ordinal=3), "S-15"),
    ("an attempt of another name", change(e.Fenced, where={"attempt": "s2.2"}, attempt="s2.7"), "S-15"),
    ("an attempt that ended with none after", drop(e.Fenced, attempt="s2.2"), "S-15"),
    ("an undo that was not revoked first", drop(e.Fenced, step="u1", direction="revoke"), "S-15"),
    ("never applied without a revocation", drop(e.Revoked), "S-203"),
    ("undone without an undo", drop(e.Fenced, step="u1", direction="undo"), "S-15"),
    ("carried on the same session", change(e.Compensated, where={"evidence": "lost_with_epoch"}, evidence="carried", final=True), "S-15"),
    ("lost with an open epoch", change(e.Compensated, where={"evidence": "carried", "step": "s2"}, evidence="lost_with_epoch"), "S-15"),
    ("an external effect that is said to be lost", change(e.Compensated, where={"evidence": "carried", "step": "x1"}, evidence="lost_with_epoch"), "I3"),
    ("an apply after a cancel", before(e.Committed, e.Cancelled(sandbox="sbx", step="s2", attempt="s2.1", reason="x")), "S-191"),
    ("a resolution of what is no question", drop(e.Indeterminate), "S-15"),
    ("a release of what is held", drop(e.Unclaimed), "I6"),
    ("a release twice", again(e.Releasing), "S-15"),
    ("a holder of what is released", lambda b: at(b, e.Releasing)[0]["entries"].append(e.HolderAdded(sandbox="sbx", dag="d", acquisition="a")), "I6"),
    ("a stop of what is held", before(e.Committed, e.StopAnsweredEntry(sandbox="sbx", instance="i1", answer="accepted")), "I6"),
    ("a rebuild while releasing", lambda b: at(b, e.Releasing)[0]["entries"].append(e.RebuildIntended(sandbox="sbx", create_id="sbx.2", epoch=3)), "I4"),
    ("a create that nobody intended", change(e.AssignedEntry, create_id="other"), "I5"),
    ("a disk that is gone under an open epoch", drop(e.EpochClosed, 1), "I1"),
    ("something of a sandbox that is gone", lambda b: b[-1]["entries"].append(CLOSED), "S-15"),
    ("other arguments than the digest's", lambda b: _other_args(b), "I1"),
    ("an unknown kind", lambda b: b[-1]["entries"].append(msgspec.Raw(b"{}")), "I8"),
]  # fmt: skip


def _other_args(batches: list[Batch]) -> None:
    batch, index = at(batches, e.Fenced)
    entry = batch["entries"][index]
    spec = replace(entry.spec, args=msgspec.Raw(b"{}"))
    batch["entries"][index] = replace(entry, spec=spec)


def test_a_good_ledger_has_nothing_wrong() -> None:
    batches = history()
    assert audit(batches) == []
    auditor = ShardAuditor("sandbox", 3)
    for batch in batches:
        auditor.take(**batch)
    summary = auditor.summary()
    assert summary["steps"] == {"committed": 4, "compensated": 2}
    assert (summary["sandboxes"], summary["epochs"], summary["terms"]) == (1, 2, 2)
    assert summary["receipts_refused"] == 1
    assert summary["entries"] == sum(len(b["entries"]) for b in batches)


@pytest.mark.parametrize(
    ("damage", "invariant"), [pytest.param(*rest, id=name) for name, *rest in BROKEN]
)
def test_s014_s015_s214_a_broken_ledger_is_told(damage: Callable[..., Any], invariant: str) -> None:
    batches = history()
    damage(batches)
    found = audit(batches)
    assert invariant in {violation.invariant for violation in found}, found
    assert all(v.shard == 3 and v.detail for v in found)


def test_an_external_effect_fenced_again_without_proof_is_told() -> None:
    """The next attempt after an attempt whose end proves nothing."""
    batches = history()
    batch, index = at(batches, e.Compensated, evidence="carried", step="x2")
    batch["entries"][index] = replace(batch["entries"][index], evidence="resolved")
    assert "I3" in {violation.invariant for violation in audit(batches)}


@pytest.mark.parametrize(
    "fields", [{"disk": "restored"}, {"evidence": "other_instance"}, {"recovering": True}]
)
def test_an_external_effect_that_an_older_journal_vouches_for_is_told(
    fields: dict[str, Any],
) -> None:
    bench = Bench().live()
    bench.step("x1", external())
    bench.warm()
    bench.answer("x1")
    batches = recorded(bench)
    at(batches, e.Compensated, evidence="carried", step="x1")
    assert audit(batches) == []
    change(e.EpochOpened, 1, **fields)(batches)
    assert "I3" in {violation.invariant for violation in audit(batches)}


def test_steps_that_are_still_fenced_when_their_sandbox_is_gone_are_told() -> None:
    batches = history()
    batch, index = at(batches, e.Releasing)
    spec = at(batches, e.Fenced)[0]["entries"][0].spec
    late = e.Fenced(
        sandbox="sbx",
        step="z1",
        attempt="z1.1",
        ordinal=1,
        no=99,
        epoch=2,
        session="S3",
        spec=spec,
    )
    batch["entries"].insert(index, late)
    assert "I9" in {violation.invariant for violation in audit(batches)}


def test_of_another_family_the_frames_alone_are_judged() -> None:
    auditor = ShardAuditor("another", 0)
    opened = [TermOpened(term=1, owner="o", shards=1, hash="h", machine=1)]
    kwargs = {"term": 1, "owner": "o", "now_ms": 5}
    assert auditor.take(seq=4, prev=0, entries=opened, **kwargs) == []
    assert auditor.take(seq=9, prev=4, entries=["anything"], **kwargs) == []
    assert [v.invariant for v in auditor.take(seq=12, prev=4, entries=[], **kwargs)] == ["I8"]
