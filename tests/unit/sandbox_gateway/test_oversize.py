"""No toolhost can break the packing of receipts, or overfill an entry."""

import msgspec
import pytest
from fencepost.core.limits import COMMAND_BYTES_MAX, INLINE_BYTES_MAX
from fencepost.core.receipts import Change, Marker, Receipt
from fencepost.core.steps import digest_of
from fencepost.sandbox_gateway import oversize
from fencepost.sandbox_gateway.frames import Head

HEAD = Head(k="receipt", step="s1", attempt="s1.1")


class Store:
    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    async def get(self, digest: str) -> bytes | None:
        return self.kept.get(digest)

    async def put(self, data: bytes) -> str:
        self.kept[digest_of(data)] = data
        return digest_of(data)


def receipt(result: object = None, changes: int = 0) -> Receipt:
    return Receipt(
        sandbox="sbx",
        step="s1",
        attempt="s1.1",
        direction="apply",
        no=1,
        verdict="applied",
        epoch=7,
        session="s",
        nonce="n",
        instance="i",
        after=Marker(7, "s", "n", "i"),
        tool="run_command",
        digest="sha256:x",
        journal_seq=3,
        outcome="ok",
        changes=[Change(f"path/{n}", None, "sha256:" + "0" * 64) for n in range(changes)],
        result=msgspec.Raw(msgspec.json.encode(result)),
    )


@pytest.mark.parametrize(
    "body", [b"", b"{", b'"\xff"', b"{}x", b"[" * 5000, b"[" * 100 + b"]" * 100, b"x" * 100_000]
)
def test_what_is_no_json_is_replaced_by_what_says_so(body: bytes) -> None:
    said = msgspec.json.decode(oversize.presentable(body, HEAD))
    assert said == {
        "step": "s1",
        "attempt": "s1.1",
        "problem": "not a receipt",
        "size": len(body),
    }


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[" * 40 + b"]" * 40,
        b"[" + b"[],[]," * 200 + b"1]",
        b"null",
        b'{"epoch": 7.0}',
        b"[1, 2]",
    ],
)
def test_json_of_wrong_shape_is_for_the_shard_to_judge(body: bytes) -> None:
    assert oversize.presentable(body, HEAD) == body


async def test_a_receipt_that_fits_is_untouched() -> None:
    whole = receipt({"stdout": "x"})
    body = msgspec.json.encode(whole)
    store = Store()
    assert await oversize.reduced(body, whole, store) == body
    assert store.kept == {}


async def test_a_large_result_is_put_aside_and_named() -> None:
    whole = receipt({"stdout": "x" * 2 * INLINE_BYTES_MAX})
    store = Store()
    reduced = await oversize.reduced(msgspec.json.encode(whole), whole, store)
    assert len(reduced) < INLINE_BYTES_MAX
    found = msgspec.json.decode(reduced, type=Receipt)
    reference = msgspec.json.decode(found.result)
    assert store.kept[reference["$blob"]] == bytes(whole.result)
    assert reference["size"] == len(bytes(whole.result))
    assert msgspec.structs.replace(found, result=whole.result) == whole


async def test_very_many_changes_are_put_aside_as_well() -> None:
    whole = receipt({"stdout": "y"}, changes=5_000)
    store = Store()
    reduced = await oversize.reduced(msgspec.json.encode(whole), whole, store)
    assert len(reduced) < COMMAND_BYTES_MAX // 2
    found = msgspec.json.decode(reduced, type=Receipt)
    reference = msgspec.json.decode(found.result)
    assert reference["of"] == "receipt"
    assert msgspec.json.decode(store.kept[reference["$blob"]], type=Receipt) == whole
