"""
The gateway's side of the toolhost protocol: frames in, frames out (`docs/toolhost-protocol.md`).

Only shapes are judged here. A stream that breaks them has lost its framing and proves nothing.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from fencepost.core.errors import FencepostError
from fencepost.core.limits import KIB, MIB
from fencepost.core.sandbox.orders import CheckpointOrder, Dispatch, Fence, RestoreOrder

HEAD_BYTES_MAX: Final = 64 * KIB
BODY_BYTES_MAX: Final = 32 * MIB
BLOB_PART_BYTES: Final = 256 * KIB


class FramingLostError(FencepostError):
    """The stream of a toolhost can no longer be read."""


class DiskMarker(msgspec.Struct, frozen=True):
    epoch: int
    session: str
    nonce: str


class Head(msgspec.Struct, kw_only=True, gc=False):
    """Any head from a toolhost; which fields are there depends on `k`."""

    k: str
    n: int = 0
    id: str = ""
    step: str = ""
    attempt: str = ""
    verdict: str = ""
    epoch: int | None = None
    session: str | None = None
    nonce: str | None = None
    instance: str | None = None
    journal_seq: int = 0
    marker: DiskMarker | None = None
    ok: bool = False
    reason: str = ""
    detail: str = ""
    digest: str = ""
    kind: str = ""
    checkpoint: str = ""
    manifest: str = ""
    files: int = 0
    size: int = 0
    skipped: int = 0


_HEAD: Final = msgspec.json.Decoder(Head)
_encode: Final = msgspec.json.Encoder().encode


class Frames:
    """Cuts a byte stream into (head, body). Raises `FramingLostError` once it cannot."""

    def __init__(self) -> None:
        self._kept = b""
        self._wanted = 0

    def feed(self, data: bytes) -> list[tuple[Head, bytes]]:
        if self._kept:
            data = self._kept + data
            self._kept = b""
            if len(data) < self._wanted:
                self._kept = data
                return []
        self._wanted = 0
        frames: list[tuple[Head, bytes]] = []
        at = 0
        end = len(data)
        while at < end:
            line = data.find(b"\n", at)
            if line < 0 or line - at > HEAD_BYTES_MAX:
                if end - at > HEAD_BYTES_MAX:
                    raise FramingLostError("a head is longer than its bound")
                break
            try:
                head = _HEAD.decode(data[at:line])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise FramingLostError(f"a head cannot be read: {error}") from error
            if not 0 <= head.n <= BODY_BYTES_MAX:
                raise FramingLostError(f"a body of {head.n} bytes is out of bounds")
            body_end = line + 1 + head.n
            if body_end > end:
                self._wanted = body_end - at
                break
            frames.append((head, data[line + 1 : body_end]))
            at = body_end
        if at < end:
            self._kept = data[at:]
        return frames


class _Apply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="k"):
    fence: Fence
    step: str
    tool: str
    digest: str
    effect: Literal["workspace", "external"]
    n: int = 0
    of: str = ""


class _ApplyFrame(_Apply, frozen=True, kw_only=True, omit_defaults=True, tag="apply"):
    pass


class _UndoFrame(_Apply, frozen=True, kw_only=True, omit_defaults=True, tag="undo"):
    pass


class _RevokeFrame(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="k", tag="revoke"
):
    fence: Fence
    step: str
    n: int = 0


def dispatch(order: Dispatch) -> bytes:
    """The frame that hands a fenced call to the toolhost."""
    fence = order.fence
    if fence.direction == "revoke":
        return _encode(_RevokeFrame(fence=fence, step=order.step)) + b"\n"
    # An undo from the pre-image has no arguments: its tool is "".
    args = bytes(order.args) if order.tool else b""
    shape = _UndoFrame if fence.direction == "undo" else _ApplyFrame
    head = _encode(
        shape(
            fence=fence,
            step=order.step,
            tool=order.tool,
            digest=order.digest,
            effect=order.effect,
            n=len(args),
            of=order.of,
        )
    )
    return b"".join((head, b"\n", args))


def hello(id_: str) -> bytes:
    return _encode({"k": "hello", "id": id_}) + b"\n"


def mark(id_: str, *, epoch: int, session: str, nonce: str) -> bytes:
    return (
        _encode({"k": "mark", "id": id_, "epoch": epoch, "session": session, "nonce": nonce})
        + b"\n"
    )


def grant(ms: int) -> bytes:
    return b'{"k":"grant","ms":%d}\n' % ms


def checkpoint(id_: str, order: CheckpointOrder, *, base: str) -> bytes:
    return _job(id_, order, base=base)


def restore(id_: str, order: RestoreOrder) -> bytes:
    return _job(id_, order, manifest=order.manifest)


def _job(id_: str, order: CheckpointOrder | RestoreOrder, **more: str) -> bytes:
    head = {
        "k": order.__struct_config__.tag,
        "id": id_,
        "epoch": order.epoch,
        "session": order.session,
        "checkpoint": order.checkpoint,
        **more,
    }
    return _encode(head) + b"\n"


def want(id_: str, digests: bytes) -> bytes:
    return b"".join((_encode({"k": "want", "id": id_, "n": len(digests)}), b"\n", digests))


def chunk(id_: str, digest: str, *, size: int) -> bytes:
    """The head of a chunk's frame; its bytes follow by themselves, uncopied."""
    return _encode({"k": "chunk", "id": id_, "digest": digest, "n": size}) + b"\n"


def chunk_failed(id_: str, digest: str, reason: str) -> bytes:
    head = {"k": "chunk_failed", "id": id_, "digest": digest, "reason": reason}
    return _encode(head) + b"\n"


def abort(id_: str) -> bytes:
    """Ends a checkpoint or restore; one that has ended already is not touched."""
    return _encode({"k": "abort", "id": id_}) + b"\n"


def kept(manifest: str) -> bytes:
    return _encode({"k": "kept", "manifest": manifest}) + b"\n"


def read(id_: str, *, tool: str, args: bytes, timeout_ms: int) -> bytes:
    head = {"k": "read", "id": id_, "tool": tool, "timeout_ms": timeout_ms, "n": len(args)}
    return b"".join((_encode(head), b"\n", args))


def blob(digest: str, *, size: int, last: bool, part: bytes) -> bytes:
    head = {"k": "blob", "digest": digest, "size": size, "last": last, "n": len(part)}
    return b"".join((_encode(head), b"\n", part))
