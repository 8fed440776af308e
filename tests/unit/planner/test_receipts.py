"""Receipts on their way in: the stamp is checked, the shape is strict, and none disappears."""

from __future__ import annotations

import msgspec
import pytest
from fencepost.contracts.messages import receipt_key, stamp
from fencepost.core.receipts import Marker, Receipt
from fencepost.planner.receipts import Receipts

MASTER = b"0123456789abcdef"


def receipt(**changes: object) -> bytes:
    whole = Receipt(
        sandbox="sb-1",
        step="s1",
        attempt="s1.1",
        direction="apply",
        no=1,
        verdict="applied",
        epoch=7,
        session="se",
        nonce="n",
        instance="i",
        after=Marker(epoch=7, session="se", nonce="n", instance="i"),
        tool="write_file",
        digest="sha256:0",
        journal_seq=3,
        outcome="ok",
    )
    return msgspec.json.encode({**msgspec.to_builtins(whole), **changes})


def stamped(data: bytes, *, gateway: str = "g1", sandbox: str = "sb-1", key: bytes = b"") -> bytes:
    made = stamp(
        key or receipt_key(MASTER, gateway, sandbox),
        gateway=gateway,
        sandbox=sandbox,
        at_ms=1,
        receipt=data,
    )
    return b"[" + msgspec.json.encode(made) + b"]"


class Undecodable(list[str]):
    pass


@pytest.fixture
def lost() -> Undecodable:
    return Undecodable()


@pytest.fixture
def receipts(lost: Undecodable) -> Receipts:
    return Receipts(MASTER, lost.append)


def test_a_whole_stamped_receipt_is_received(receipts: Receipts, lost: Undecodable) -> None:
    (got,) = receipts.decode(stamped(receipt()))
    assert got.mac_ok
    assert got.receipt is not None
    assert (got.receipt.epoch, got.step, got.attempt) == (7, "s1", "s1.1")
    assert lost == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("epoch", True), ("epoch", 7.0), ("epoch", "7"), ("epoch", None), ("journal_seq", 3.5)],
)
def test_a_number_that_only_equals_one_is_a_wrong_shape(
    receipts: Receipts, field: str, value: object
) -> None:
    (got,) = receipts.decode(stamped(receipt(**{field: value})))
    assert got.receipt is None
    assert field in got.problem
    assert (got.sandbox, got.step, got.attempt) == ("sb-1", "s1", "s1.1")


def test_a_receipt_that_is_no_object_is_received_as_a_problem(receipts: Receipts) -> None:
    for data in (b"null", b"7", b'"x"', b"[]", b"{}"):
        (got,) = receipts.decode(stamped(data))
        assert got.receipt is None
        assert got.problem
        assert got.mac_ok


def test_s008_a_receipt_nested_without_end_is_reported_not_raised(
    receipts: Receipts, lost: Undecodable
) -> None:
    deep = receipt().replace(b'"outcome":"ok"', b'"result":' + b"[" * 20_000 + b"]" * 20_000)
    assert receipts.decode(stamped(deep)) == []
    assert len(lost) == 1


def test_a_stamp_under_another_sandboxs_key_does_not_hold(receipts: Receipts) -> None:
    other = receipt_key(MASTER, "g1", "sb-2")
    (got,) = receipts.decode(stamped(receipt(), key=other))
    assert not got.mac_ok
    (good,) = receipts.decode(stamped(receipt(), key=receipt_key(MASTER, "g1", "sb-1")))
    assert good.mac_ok


def test_a_changed_byte_breaks_the_stamp(receipts: Receipts) -> None:
    data = stamped(receipt())
    (got,) = receipts.decode(data.replace(b'"epoch":7', b'"epoch":8'))
    assert not got.mac_ok


def test_a_stamp_that_is_no_ascii_does_not_hold_and_loses_no_other(receipts: Receipts) -> None:
    good = stamped(receipt())
    bad = good[1:-1].replace(b'"mac":"', '"mac":"é'.encode())
    first, second = receipts.decode(b"[" + bad + b"," + good[1:])
    assert not first.mac_ok
    assert second.mac_ok


def test_what_has_no_address_is_reported(receipts: Receipts, lost: Undecodable) -> None:
    assert receipts.decode(b"{") == []
    assert receipts.decode(b'[{"gateway":"g1"}]') == []
    assert len(lost) == 2
    good = stamped(receipt())[1:-1]
    assert len(receipts.decode(b'[{"gateway":"g1"},' + good + b"]")) == 1
    assert len(lost) == 3
