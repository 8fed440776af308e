"""
Receipts that do not fit: what of them goes to the object store, and what is stamped instead.

A packed message carries receipts of many sandboxes, and a batch of the ledger has a bound, so one
sandbox's toolhost must be able neither to break the packing nor to overfill an entry.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fencepost.core.limits import COMMAND_BYTES_MAX, INLINE_BYTES_MAX
from fencepost.core.receipts import Receipt
from fencepost.sandbox_gateway.blobs import BlobStore
from fencepost.sandbox_gateway.frames import Head

NESTED_MAX: Final = 64
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encode: Final = msgspec.json.Encoder().encode


def presentable(body: bytes, head: Head) -> bytes:
    """
    Gives a receipt of wrong shape a form that can stand in a packed message.

    Valid JSON passes as it is, so that the shard judges and records its shape. The rest is
    replaced by an object that says so, which is no receipt either.
    """
    if len(body) <= INLINE_BYTES_MAX:
        try:
            msgspec.json.decode(body)
            body.decode("utf-8")
        except UNREADABLE:
            pass
        else:
            if is_shallow(body):
                return body
    return _encode(
        {
            "step": head.step[:64],
            "attempt": head.attempt[:128],
            "problem": "not a receipt",
            "size": len(body),
        }
    )


def is_shallow(body: bytes) -> bool:
    """
    Tells whether JSON is nested no deeper than any honest receipt.

    Readers stop at a depth that depends on their own stack: what passes here could, in a packed
    message, stop the shard's owner, and every receipt beside it.
    """
    if body.count(b"[") + body.count(b"{") <= NESTED_MAX:
        return True
    level: list[Any] = [msgspec.json.decode(body)]
    for _ in range(NESTED_MAX):
        level = [
            inner
            for item in level
            if isinstance(item, (list, dict))
            for inner in (item if isinstance(item, list) else item.values())
        ]
        if not level:
            return True
    return False


async def reduced(body: bytes, receipt: Receipt | None, store: BlobStore) -> bytes:
    """
    Puts a large result into the store and its reference in its place.

    Where the rest is too large as well (a step that changed very many paths), the whole receipt
    goes there and its list of changes is left out. Raises `UnknownError`.
    """
    if receipt is None or len(body) <= INLINE_BYTES_MAX:
        return body
    result = bytes(receipt.result)
    if len(result) > INLINE_BYTES_MAX // 2:
        digest = await store.put(result)
        reference = msgspec.Raw(_encode({"$blob": digest, "size": len(result)}))
        body = _encode(msgspec.structs.replace(receipt, result=reference))
    if len(body) > COMMAND_BYTES_MAX // 2:
        whole = _encode(receipt)
        digest = await store.put(whole)
        reference = msgspec.Raw(_encode({"$blob": digest, "size": len(whole), "of": "receipt"}))
        body = _encode(
            msgspec.structs.replace(
                receipt, result=reference, changes=[], detail="changes: see the stored receipt"
            )
        )
    return body
