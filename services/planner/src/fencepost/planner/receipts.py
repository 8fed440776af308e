"""
Turns what gateways publish as receipts into inputs: stamp checked, shape checked, none dropped.

A receipt of wrong shape is an input too, with the problem instead of the receipt: the shard says
so in its ledger, and the attempt stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec
from fencepost.contracts.messages import receipt_key, stamp_holds
from fencepost.core.receipts import Receipt, StampedReceipt
from fencepost.core.sandbox.inputs import ReceiptReceived

_STAMPED = msgspec.json.Decoder(list[msgspec.Raw])
_ONE = msgspec.json.Decoder(StampedReceipt, strict=True)
# Nested without end, a receipt ends the reader's stack before it ends its text.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_RECEIPT = msgspec.json.Decoder(Receipt, strict=True)


class _Named(msgspec.Struct):
    step: str = ""
    attempt: str = ""


_NAMED = msgspec.json.Decoder(_Named)


class Receipts:
    """Checks stamps under the deployment's master key."""

    def __init__(self, master: bytes, undecodable: Callable[[str], None]) -> None:
        self._key = lru_cache(maxsize=65_536)(
            lambda gateway, sandbox: receipt_key(master, gateway, sandbox)
        )
        self._undecodable = undecodable

    def decode(self, data: bytes) -> list[ReceiptReceived]:
        """Decodes a JSON array of stamped receipts; what has no address is counted and logged."""
        try:
            raws = _STAMPED.decode(data)
        except _UNREADABLE as error:
            self._undecodable(f"not a list of stamped receipts: {error}")
            return []
        received: list[ReceiptReceived] = []
        for raw in raws:
            try:
                stamped = _ONE.decode(raw)
            except _UNREADABLE as error:
                self._undecodable(f"not a stamped receipt: {error}")
                continue
            received.append(self._received(stamped))
        return received

    def _received(self, stamped: StampedReceipt) -> ReceiptReceived:
        mac_ok = stamp_holds(self._key(stamped.gateway, stamped.sandbox), stamped)
        try:
            receipt = _RECEIPT.decode(stamped.receipt)
        except _UNREADABLE as error:
            named = _named(bytes(stamped.receipt))
            return ReceiptReceived(
                sandbox=stamped.sandbox,
                gateway=stamped.gateway,
                mac_ok=mac_ok,
                receipt=None,
                problem=str(error)[:500],
                step=named.step,
                attempt=named.attempt,
            )
        return ReceiptReceived(
            sandbox=stamped.sandbox,
            gateway=stamped.gateway,
            mac_ok=mac_ok,
            receipt=receipt,
            step=receipt.step,
            attempt=receipt.attempt,
        )


def _named(data: bytes) -> _Named:
    """What step and attempt a receipt of wrong shape names, if any."""
    try:
        return _NAMED.decode(data)
    except _UNREADABLE:
        return _Named()
