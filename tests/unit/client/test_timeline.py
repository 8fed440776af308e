"""Every entry of the ledger has words, and they name what matters."""

from __future__ import annotations

import typing

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
