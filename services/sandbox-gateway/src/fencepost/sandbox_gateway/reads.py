"""
The cheap path: read-only tools by core-NATS request. No ledger, no lease, no journal (S-09).

The reply carries the marker that the toolhost read beside the result, because a zombie gateway on
an old disk can answer too; below the caller's minimum the answer is `unknown`, never a result.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from fencepost.contracts.messages import ReadReply, ReadRequest
from fencepost.core.limits import NATS_PAYLOAD_BYTES_MAX
from fencepost.core.receipts import Marker
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import GatewayMetrics
from fencepost.sandbox_gateway import frames
from fencepost.sandbox_gateway.attachment import Attachment
from fencepost.sandbox_gateway.frames import Head

TIMEOUT_MS_MAX: Final = 600_000

_REQUEST: Final = msgspec.json.Decoder(ReadRequest)
_RAW: Final = msgspec.json.Decoder(msgspec.Raw)
_NOT_RUN: Final = frozenset({"invalid_arguments", "unsupported"})


class _Failure(msgspec.Struct, frozen=True):
    reason: str = ""
    error: str = ""


_FAILURE: Final = msgspec.json.Decoder(_Failure)
_encode: Final = msgspec.json.Encoder().encode


class Reads:
    def __init__(self, link: Link, metrics: GatewayMetrics) -> None:
        self._link = link
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()

    def take(self, attachment: Attachment, msg: Any) -> None:
        """Passes one request on; the reply comes when the toolhost's does."""
        if not msg.reply:
            return
        try:
            request = _REQUEST.decode(msg.data)
        except msgspec.ValidationError as error:
            self._reply(
                msg.reply, ReadReply(status="refused", reason="bad_request", detail=str(error))
            )
            return
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._reply(
                msg.reply, ReadReply(status="refused", reason="not_json", detail=str(error))
            )
            return
        self._ask(attachment, request, msg.reply)

    def _ask(self, attachment: Attachment, request: ReadRequest, reply: str) -> None:
        timeout_ms = max(1, min(request.timeout_ms, TIMEOUT_MS_MAX))
        timer: asyncio.TimerHandle | None = None

        def answered(head: Head | None, body: bytes) -> None:
            if timer is not None:
                timer.cancel()
            self._reply(reply, _judge(request, head, body))

        def timed_out() -> None:
            attachment.forget(id_)
            self._reply(reply, ReadReply(status="unknown", reason="timeout"))

        def frame(id_: str) -> bytes:
            return frames.read(
                id_, tool=request.tool, args=bytes(request.args), timeout_ms=timeout_ms
            )

        # A little longer than the tool itself has, so that its own word comes first.
        timer = self._loop.call_later(timeout_ms / 1000 + 1.0, timed_out)
        id_ = attachment.ask(frame, answered)

    def _reply(self, to: str, reply: ReadReply) -> None:
        self._metrics.reads.labels(reply.status).inc()
        data = _encode(reply)
        if len(data) > NATS_PAYLOAD_BYTES_MAX - 4096:
            data = _encode(
                ReadReply(
                    status="refused",
                    marker=reply.marker,
                    reason="result_too_large",
                    detail=f"{len(data)} bytes; ask for less at a time",
                )
            )
        self._link.publish(to, data)


def _judge(request: ReadRequest, head: Head | None, body: bytes) -> ReadReply:
    if head is None:
        return ReadReply(status="unknown", reason="channel_ended")
    if head.k == "refused":
        return ReadReply(status="refused", reason=head.reason, detail=head.detail)
    if head.k != "read":
        return ReadReply(status="unknown", reason="unexpected_answer", detail=head.k)
    if not head.epoch or head.session is None or head.nonce is None:
        return ReadReply(status="unknown", reason="no_generation")
    marker = Marker(
        epoch=head.epoch, session=head.session, nonce=head.nonce, instance=head.instance or ""
    )
    if head.epoch < request.epoch_min:
        return ReadReply(status="unknown", reason="epoch_below_minimum", marker=marker)
    try:
        result = _RAW.decode(body)
        body.decode("utf-8")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ReadReply(status="unknown", reason="undecodable_result", marker=marker)
    if head.ok:
        return ReadReply(status="ok", result=result, marker=marker)
    return _judge_failure(result, body, marker)


def _judge_failure(result: msgspec.Raw, body: bytes, marker: Marker) -> ReadReply:
    """A tool that failed has a result; one that was never run has only a reason."""
    try:
        said = _FAILURE.decode(body)
    except msgspec.DecodeError:
        said = _Failure()
    if said.reason in _NOT_RUN:
        # Without a view that cannot be written to, a command is a write: it must be fenced.
        reason = "needs_fence" if said.reason == "unsupported" else said.reason
        return ReadReply(status="refused", reason=reason, detail=said.error, marker=marker)
    if said.reason in ("overloaded", "grant_expired"):
        return ReadReply(status="unknown", reason=said.reason, detail=said.error, marker=marker)
    return ReadReply(status="failed", result=result, marker=marker)
