"""Ids as tokens of subjects, and the shard that each belongs to."""

import pytest
from fencepost.core import ids


@pytest.mark.parametrize("good", ["a", "A-b_9", "x" * 64, "-", "_"])
def test_an_id_is_one_token(good: str) -> None:
    assert ids.is_id(good)


@pytest.mark.parametrize(
    "bad",
    ["", "main\n", "\nmain", "a.b", "a b", "x" * 65, "ü", "*", ">", "a:b", None, 7, b"a", ["a"]],
)
def test_anything_else_is_not(bad: object) -> None:
    assert not ids.is_id(bad)


def test_the_shard_is_the_servers_partition() -> None:
    """FNV-1a over the token, 32 bits, as nats-server computes `{{partition(n,1)}}`."""
    known = {"": 2166136261, "a": 0xE40C292C, "foobar": 0xBF9CF968}
    for name in ("", "a", "foobar"):
        assert ids.shard_of(name, 1 << 32) == known[name]
    assert [ids.shard_of(f"sbx{n}", 8) for n in range(10)] == [
        (ids.shard_of(f"sbx{n}", 1 << 32)) % 8 for n in range(10)
    ]
    assert {ids.shard_of(f"s{n}", 8) for n in range(100)} == set(range(8))
    assert ids.shard_of("anything", 1) == 0


def test_attempts_and_undos_have_names_of_their_own() -> None:
    assert ids.attempt_id("s1", 2) == "s1.2"
    assert ids.undo_id("s1.2", 7) == "s1.2:u7"
    assert not ids.is_id(ids.attempt_id("s1", 2))


def test_the_time_of_an_id_is_read_from_ulids_alone() -> None:
    assert ids.ulid_ms("01ARZ3NDEKTSV4RRFFQ69G5FAV") == 1469922850259
    assert ids.ulid_ms("00000000000000000000000000") == 0
    assert ids.ulid_ms("7ZZZZZZZZZZZZZZZZZZZZZZZZZ") == (1 << 48) - 1
    for other in ("", "s1", "8ZZZZZZZZZZZZZZZZZZZZZZZZZ", "01ARZ3NDEKTSV4RRFFQ69G5FAU"):
        assert ids.ulid_ms(other) is None
    assert ids.ulid_ms("01ARZ3NDEKTSV4RRFFQ69G5FAV\n") is None
