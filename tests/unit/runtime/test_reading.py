"""A read has three results; what does not prove an absence is unknown (S-71, S-72, S-74)."""

from __future__ import annotations

import base64

import pytest
from fencepost.runtime.ledger import read_result, stamp_ms
from fencepost.runtime.ports import Absent, Unknown, Valid


def test_s74_no_message_is_absent_and_no_stream_is_unknown() -> None:
    no_message = b'{"error":{"code":404,"err_code":10037,"description":"no message found"}}'
    assert isinstance(read_result(no_message), Absent)
    no_stream = no_message.replace(b"10037", b"10059")
    assert isinstance(read_result(no_stream), Unknown)
    # Judged by the code alone: the text and the 404 are the same.
    assert isinstance(read_result(no_message.replace(b"no message found", b"x")), Absent)


def test_a_message_is_valid() -> None:
    data = base64.b64encode(b"\x00payload").decode()
    answer = f'{{"message":{{"seq":4,"data":"{data}","time":"2026-01-02T03:04:05.678901Z"}}}}'
    assert read_result(answer.encode()) == Valid(4, b"\x00payload", 1_767_323_045_678)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b"false",
        b"7",
        b"[]",
        b'"x"',
        b"{}",
        b"not json",
        b'{"message":{"data":"AA=="}}',
        b'{"message":{"seq":"4","data":"AA==","time":"2026-01-02T03:04:05Z"}}',
        b'{"message":{"seq":4,"data":"%%%","time":"2026-01-02T03:04:05Z"}}',
        b'{"message":{"seq":4,"data":"AA==","time":"yesterday"}}',
        b'{"error":{"code":503,"err_code":10008,"description":"unavailable"}}',
    ],
)
def test_s71_s72_anything_else_is_unknown(answer: bytes) -> None:
    assert isinstance(read_result(answer), Unknown)


def test_stamps_are_read_to_the_millisecond() -> None:
    assert stamp_ms("1970-01-01T00:00:01Z") == 1_000
    assert stamp_ms("1970-01-01T00:00:01.5Z") == 1_500
    assert stamp_ms("1970-01-01T00:00:01.000999999Z") == 1_000
