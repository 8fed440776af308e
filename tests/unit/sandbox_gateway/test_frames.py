"""The toolhost's stream, cut at every place a stream can be cut at."""

import json

import pytest
from fencepost.core.sandbox.orders import Dispatch, Fence
from fencepost.sandbox_gateway import frames
from fencepost.sandbox_gateway.frames import Frames, FramingLostError
from hypothesis import given
from hypothesis import strategies as st


def frame(head: dict, body: bytes = b"") -> bytes:
    if body:
        head = {**head, "n": len(body)}
    return json.dumps(head).encode() + b"\n" + body


STREAM = [
    ({"k": "hello", "id": "1", "marker": None, "journal_seq": 3}, b""),
    ({"k": "receipt", "step": "s1", "attempt": "s1.1", "verdict": "applied"}, b'{"a":"\n"}'),
    ({"k": "heartbeat", "epoch": 7, "session": "s", "nonce": "n", "running": ["x"]}, b""),
    ({"k": "read", "id": "2", "ok": True}, b"\n\n\n"),
]


def test_a_stream_in_one_piece() -> None:
    taken = Frames().feed(b"".join(frame(*item) for item in STREAM))
    assert [(head.k, body) for head, body in taken] == [(h["k"], b) for h, b in STREAM]
    assert taken[2][0].epoch == 7


@given(st.lists(st.integers(1, 60), min_size=1, max_size=200))
def test_a_stream_in_any_pieces_is_the_same(sizes: list[int]) -> None:
    data = b"".join(frame(*item) for item in STREAM) * 3
    parser, taken, at = Frames(), [], 0
    for size in [*sizes, len(data)]:
        taken += parser.feed(data[at : at + size]) if data[at : at + size] else []
        at += size
    assert [(head.k, body) for head, body in taken] == [(h["k"], b) for h, b in STREAM] * 3


@pytest.mark.parametrize(
    "data",
    [
        b"not json\n",
        b'{"n": 1}\n',
        b'{"k": "receipt", "n": -1}\n',
        b'{"k": "receipt", "n": 999999999999}\n',
        b'{"k": "heartbeat", "epoch": 7.5}\n',
        b'{"k": "heartbeat", "epoch": true}\n',
        b'{"k": "x", "id": "\xff"}\n',
        b"x" * (frames.HEAD_BYTES_MAX + 1),
    ],
)
def test_a_stream_that_cannot_be_read_is_lost(data: bytes) -> None:
    with pytest.raises(FramingLostError):
        Frames().feed(data)
    assert Frames().feed(b'{"k": "heartbeat", "epoch": 7}\n')[0][0].epoch == 7


def order(**changes: object) -> Dispatch:
    fence = Fence(
        sandbox="sbx",
        epoch=7,
        session="s",
        attempt="s1.1",
        no=3,
        direction=changes.pop("d", "apply"),
    )
    fields = {"step": "s1", "tool": "write_file", "digest": "sha256:x", "args": b'{"a": 1}'}
    return Dispatch(fence=fence, **{**fields, **changes})


def read(data: bytes) -> tuple[dict, bytes]:
    head, body = data.split(b"\n", 1)
    return json.loads(head), body


@pytest.mark.parametrize(
    ("direction", "kind"),
    [("apply", "apply"), ("replay", "apply"), ("undo", "undo"), ("revoke", "revoke")],
)
def test_a_call_becomes_the_frame_of_its_direction(direction: str, kind: str) -> None:
    head, body = read(frames.dispatch(order(d=direction)))
    assert (head["k"], head["fence"]["direction"], head["step"]) == (kind, direction, "s1")
    assert head["fence"] == {
        "sandbox": "sbx",
        "epoch": 7,
        "session": "s",
        "attempt": "s1.1",
        "no": 3,
        "direction": direction,
    }
    if kind == "revoke":
        assert body == b""
    else:
        assert (head["n"], body) == (8, b'{"a": 1}')


def test_arguments_travel_byte_for_byte() -> None:
    args = b'{ "b" : 1.0,\n "a":"\\u00e9" }'
    head, body = read(frames.dispatch(order(args=args)))
    assert (head["n"], body) == (len(args), args)


def test_an_undo_from_the_pre_image_has_no_arguments() -> None:
    head, body = read(frames.dispatch(order(d="undo", tool="", of="s1.1", args=b"null")))
    assert (head["of"], head.get("n", 0), body) == ("s1.1", 0, b"")
    head, body = read(frames.dispatch(order(d="undo", tool="run_command", of="s1.1")))
    assert (head["tool"], body) == ("run_command", b'{"a": 1}')
