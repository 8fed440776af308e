"""Every entry of the ledger has words, and they name what matters."""

from __future__ import annotations

import typing

import msgspec
from fencepost.client import timeline
from fencepost.core.machine import TermOpened
from fencepost.core.receipts import Change, Marker, Receipt
from fencepost.core.sandbox import entries as e


def test_every_kind_of_entry_has_words() -> None:
    kinds = set(typing.get_args(e.SandboxEntry))
    assert kinds - set(timeline._WORDS) == {TermOpened}, "a term is no sandbox's"


def test_a_refused_receipt_names_its_epoch_attempt_and_reason() -> None:
    words = timeline.words(
        e.ReceiptRefused(
            sandbox="box",
            step="s1",
            attempt="s1.1",
            reason="late_attempt",
            epoch=7,
            verdict="applied",
        )
    )
    assert words == "receipt of epoch 7 for s1.1 (applied) refused: late_attempt"


def test_a_commit_names_its_epoch_and_what_changed() -> None:
    marker = Marker(epoch=8, session="x", nonce="n", instance="i")
    receipt = Receipt(
        sandbox="box",
        step="s1",
        attempt="s1.2",
        direction="apply",
        no=3,
        verdict="applied",
        epoch=8,
        session="x",
        nonce="n",
        instance="i",
        after=marker,
        tool="write_file",
        digest="sha256:00",
        journal_seq=1,
        outcome="failed",
        changes=[
            Change(path=f"f{n}", before=None, after="sha256:0123456789abcdef") for n in range(5)
        ],
    )
    words = timeline.words(
        e.Committed(sandbox="box", step="s1", attempt="s1.2", receipt=receipt, gateway="gw")
    )
    assert words == (
        "s1.2 committed: receipt of epoch 8; the tool failed;"
        " f0 0123456789ab, f1 0123456789ab, f2 0123456789ab and 2 more"
    )


def test_recoveries_are_told_in_words_with_what_matters() -> None:
    key = (1, 2, "s3")
    told: dict[e.SandboxEntry, str] = {
        e.CheckpointAsked(sandbox="box", checkpoint="c1", reason="asked"): "c1 asked for",
        e.CheckpointingEntry(sandbox="box", checkpoint="c1", reason="asked"): "new fences wait",
        e.CheckpointedEntry(
            sandbox="box",
            checkpoint="c1",
            manifest="sha256:0",
            epoch=1,
            journal_seq=9,
            line=1,
            reason="every_steps",
            files=20_000,
            size_bytes=200 << 20,
            sent_bytes=1536,
        ): "checkpoint c1 stored: 20000 files, 200.0 MiB, 1.5 KiB sent; journal 9 (every_steps)",
        e.CheckpointFailedEntry(
            sandbox="box", checkpoint="c1", reason="no_space", detail="full"
        ): "checkpoint c1 failed: no_space (full); the former one stands",
        e.RestoredEntry(
            sandbox="box",
            checkpoint="c1",
            manifest="sha256:0",
            epoch=2,
            session="s",
            journal_seq=0,
            files=3,
            size_bytes=12,
        ): "checkpoint c1 restored: 3 files, 12 B; journal 0",
        e.RestoreFailedEntry(sandbox="box", checkpoint="c1", reason="missing"): (
            "checkpoint c1 not restored: missing"
        ),
        e.RecoveryStopped(
            sandbox="box",
            epoch=2,
            reason="effect_differs",
            step="s1",
            expected="ok:" + "1" * 64,
            found="failed:" + "2" * 64,
        ): "recovery stopped: effect_differs at s1; expected ok:111111111111, found"
        " failed:222222222222; a person decides",
        e.RecoveryDecided(sandbox="box", epoch=2, decision="tell", who="me", note="why"): (
            "recovery decided by me: tell; why"
        ),
        e.Recovered(sandbox="box", epoch=2, mode="replayed", replayed=3, checkpoint="c1"): (
            "whole again: 3 steps replayed on checkpoint c1"
        ),
        e.Recovered(sandbox="box", epoch=2, mode="told", told=2, kept=key, lost="c1"): (
            "goes on without 2 steps; 0 were replayed; checkpoint c1 is lost"
        ),
        e.Recovered(sandbox="box", epoch=2, mode="accepted", replayed=1, without="c1"): (
            "by an operator's word; 1 steps replayed; without checkpoint c1 this time"
        ),
        e.Preempted(sandbox="box", instance="i1", grace_ms=30_000): "take i1 away in 30 s",
    }
    for entry, words in told.items():
        assert words in timeline.words(entry)
    owed = e.OwedTold(
        sandbox="box",
        epoch=2,
        steps=[e.OwedName(f"s{n}", f"s{n}.1", "write_file") for n in range(7)],
        told=7,
        of=9,
        key=key,
        sum=0,
    )
    assert timeline.words(owed).startswith("7 of 9 owed steps are told and given up: s0 (write_")
    assert timeline.words(owed).endswith(" and 2 more")
    replayed = e.Replayed(
        sandbox="box",
        step="s1",
        attempt="s1.1",
        name="s1.1:r7",
        epoch=2,
        verdict="applied",
        effect="ok:1",
        journal_seq=1,
        no=7,
        of=3,
    )
    assert timeline.words(replayed) == "s1 applied again as s1.1:r7"
    skipped = msgspec.structs.replace(replayed, verdict="", accepted=True)
    assert "not applied again, by an operator's word" in timeline.words(skipped)
    replaying = e.Replaying(
        sandbox="box",
        step="s1",
        attempt="s1.1",
        name="s1.1:r7",
        no=7,
        epoch=2,
        session="s",
        key=key,
        tool="write_file",
        digest="sha256:0",
        args=msgspec.Raw(b"{}"),
        effect="ok:1",
        item=0,
    )
    assert timeline.words(replaying) == (
        "s1 write_file to be applied again: s1.1:r7 fenced under epoch 2"
    )
