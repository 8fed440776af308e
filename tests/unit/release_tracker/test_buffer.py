"""What the projection's buffer lets its readers ask for."""

import pytest
from fencepost.release_tracker.projector import BUFFER_BATCHES_MAX, BUFFER_BYTES_MAX, Buffer
from fencepost.runtime.ports import InputMessage


def message(data: bytes = b"") -> InputMessage:
    return InputMessage(seq=1, subject="s", data=data)


@pytest.mark.parametrize("readers", [1, 3, BUFFER_BATCHES_MAX, 2 * BUFFER_BATCHES_MAX])
def test_every_reader_may_ask_while_there_is_room_and_none_after(readers: int) -> None:
    buffer = Buffer()
    for _ in range(BUFFER_BATCHES_MAX):
        assert buffer.room(readers) >= 1, "else a deployment with as many ledgers stands still"
        assert (buffer.room(readers) - 1) * readers < BUFFER_BATCHES_MAX
        buffer.put(message())
    assert buffer.room(readers) == 0
    buffer.put(message())
    assert buffer.room(readers) == 0


def test_bytes_are_room_as_well() -> None:
    buffer = Buffer()
    buffer.put(message(b"x" * (BUFFER_BYTES_MAX - 1)))
    assert buffer.room(3) > 0
    buffer.put(message(b"x"))
    assert buffer.room(3) == 0
