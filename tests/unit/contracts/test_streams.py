"""How shards are spread over ledger streams, and what one ledger has always been."""

from __future__ import annotations

import msgspec
import pytest
from fencepost.contracts import authorization, grants, streams, subjects
from fencepost.contracts.grants import ROLES
from fencepost.contracts.messages import HASH
from fencepost.core.errors import RefusedError
from fencepost.runtime.streams import Cut


def _ledgers(shards: int, ledgers: int) -> dict[str, list[str]]:
    names = streams.ledger_names(ledgers)
    return {
        stream.name: stream.config["subjects"]
        for stream in streams.table(shards, ledgers=ledgers)
        if stream.name in names
    }


def test_one_ledger_is_what_it_was() -> None:
    """Byte for byte: a deployment that exists goes on under its stream, and its record is this."""
    assert _ledgers(8, 1) == {"FP_LEDGER": ["fp.v1.ledger.*.*"]}
    assert streams.table(8) == streams.table(8, ledgers=1)
    assert {streams.ledger_of(shard, 1) for shard in range(64)} == {"FP_LEDGER"}
    recorded = msgspec.json.encode(Cut(shards=8, hash=HASH))
    assert recorded == msgspec.json.encode({"shards": 8, "hash": HASH})
    assert authorization.render(ledgers=1) == authorization.render()


@pytest.mark.parametrize(("shards", "ledgers"), [(8, 2), (8, 3), (8, 8), (64, 5), (1024, 16)])
def test_each_subject_is_one_streams_and_each_stream_has_some(shards: int, ledgers: int) -> None:
    found = _ledgers(shards, ledgers)
    assert list(found) == [f"FP_LEDGER_{number}" for number in range(ledgers)]
    assert all(found.values())
    for shard in range(shards):
        name = f"FP_LEDGER_{shard % ledgers}"
        assert streams.ledger_of(shard, ledgers) == name
        holders = [stream for stream, had in found.items() if subjects.ledger("*", shard) in had]
        assert holders == [name]
    assert sum(map(len, found.values())) == shards


def test_only_the_ledger_differs_by_the_number_of_ledgers() -> None:
    one, three = streams.table(8), streams.table(8, ledgers=3)
    assert one[1:] == three[3:]
    for stream in three[:3]:
        same = {name: value for name, value in stream.config.items() if name != "subjects"}
        assert same == {k: v for k, v in one[0].config.items() if k != "subjects"}


@pytest.mark.parametrize("ledgers", [0, -1, 9])
def test_a_ledger_without_a_shard_is_refused(ledgers: int) -> None:
    assert streams.table(8, ledgers=8)
    with pytest.raises(RefusedError, match="ledgers: expected 1 to 8") as refused:
        streams.table(8, ledgers=ledgers)
    assert refused.value.field == "ledgers"


def test_with_several_ledgers_each_role_has_of_each_what_it_had_of_the_one() -> None:
    for role in ROLES:
        of_one = [grant for grant in grants.of(role) if "FP_LEDGER" in grant.subject]
        wanted = {
            (grant.verb, grant.subject.replace("FP_LEDGER", name), grant.account, grant.many)
            for grant in of_one
            for name in streams.ledger_names(3)
        }
        found = {
            (grant.verb, grant.subject, grant.account, grant.many)
            for grant in grants.of(role, ledgers=3)
            if "FP_LEDGER" in grant.subject
        }
        assert found == wanted
        others = [grant for grant in grants.of(role) if "FP_LEDGER" not in grant.subject]
        assert others == [g for g in grants.of(role, ledgers=3) if "FP_LEDGER" not in g.subject]
