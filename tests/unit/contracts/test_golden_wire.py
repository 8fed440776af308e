"""What is written stays what it was, byte for byte, and what is unknown is never dropped unsaid."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fencepost.core.dag.machine import DagMachine
from fencepost.core.errors import LedgerBrokenError, PoisonedError
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.inputs import CommandMalformed
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.runtime import exchange, fold
from fencepost.sandbox_gateway import orders

from scripts import golden_wire

KNOWN = golden_wire.messages_known()
NEWER = b'"of_a_newer_version":{"deep":[1,null]}'


def with_unknown(data: bytes) -> bytes:
    last = data[-1:]
    return data[:-1] + (b"," + NEWER if last == b"}" else b",{" + NEWER + b"}") + last


def test_bytes_are_those_of_the_newest_generation() -> None:
    newest = golden_wire.kept()[-1]
    assert golden_wire.versions() == newest.versions
    assert golden_wire.differing(golden_wire.made(), newest.bytes) == [], (
        "scripts/golden_wire.py --renew, if the wire was meant to change"
    )


def test_every_generation_can_be_read_and_nothing_of_it_is_lost() -> None:
    assert list(golden_wire.unreadable(golden_wire.kept())) == []


def test_a_generation_that_lost_something_is_noticed() -> None:
    newest = golden_wire.kept()[-1]
    text = newest.bytes["ref"].replace('"instance"', '"renamed"', 1)
    more = newest.bytes["marker"].replace("{", '{"former":1,', 1)
    changed = msgspec.structs.replace(newest, bytes={"ref": text, "marker": more, "no": "{}"})
    assert list(golden_wire.unreadable([changed])) == [
        "ref of generation 1: Object missing required field `instance`",
        "marker of generation 1: .former is lost",
        "no of generation 1: nobody reads it any more",
    ]


def test_what_is_recorded_changes_only_with_its_machines_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    newest = golden_wire.kept()[-1]
    for name, is_refused in (("entry.dag.opened", True), ("heartbeats", False)):
        found = {**newest.bytes, name: newest.bytes[name].replace("{", '{"fresh":1,', 1)}
        file = tmp_path / f"{name}.json"
        file.write_bytes(msgspec.json.encode([newest]))
        monkeypatch.setattr(golden_wire, "FILE", file)
        monkeypatch.setattr(golden_wire, "made", found.copy)
        if is_refused:
            with pytest.raises(
                SystemExit, match=r"raise the machine's version: entry\.dag\.opened"
            ):
                golden_wire.renew("why")
        else:
            golden_wire.renew("why")
        assert len(golden_wire.kept()) == 1 + (not is_refused)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_field_that_nobody_knows_changes_nothing_or_is_refused_by_name(name: str) -> None:
    message = KNOWN[name]
    data = with_unknown(message.data)
    if not message.type.__struct_config__.forbid_unknown_fields:
        read = msgspec.json.decode(data, type=message.read_as)
        assert msgspec.json.encode(read) == message.data
        return
    # Commands, and what they carry: a person's mistake there must not pass for a wish.
    assert name.startswith(("command.", "spec.")), name
    with pytest.raises(msgspec.ValidationError, match="of_a_newer_version"):
        msgspec.json.decode(data, type=message.read_as)


@pytest.mark.parametrize("machine", [SandboxMachine(), DagMachine()], ids=["sandbox", "dag"])
def test_an_entry_of_an_unknown_kind_ends_the_fold(machine: Any) -> None:
    opened = machine.encode_entries([machine.term_opened(1, "a", 8, "h")])
    assert machine.decode_entries(opened)
    unknown = opened.replace(b'"term_opened"', b'"of_a_newer_version"')
    with pytest.raises(LedgerBrokenError, match="of_a_newer_version"):
        machine.decode_entries(unknown)


def test_a_batch_of_a_newer_version_is_not_folded() -> None:
    sample = msgspec.structs.replace(KNOWN["batch"].sample, v=golden_wire.versions()["batch"])
    data = with_unknown(msgspec.json.encode(sample))
    read = fold.decode_batch(data, family="family", shard=7)
    assert msgspec.json.encode(read) == msgspec.json.encode(sample)
    newer = msgspec.structs.replace(sample, v=sample.v + 1)
    with pytest.raises(LedgerBrokenError, match=f"a batch of version {newer.v}"):
        fold.decode_batch(msgspec.json.encode(newer), family="family", shard=7)
    other = b'{"v":9,"shape":"another"}'
    with pytest.raises(LedgerBrokenError, match="undecodable batch of version 9"):
        fold.decode_batch(other, family="family", shard=7)


def test_a_fact_of_an_unknown_kind_is_recorded_as_refused() -> None:
    machine = SandboxMachine()
    fact = KNOWN["fact.gone"].data
    subject = "fp.v1.infact.0.sandbox.gone"
    assert machine.decode("facts", subject, fact) == [KNOWN["fact.gone"].sample]
    with pytest.raises(PoisonedError, match="of_a_newer_version") as caught:
        machine.decode("facts", subject, fact.replace(b'"gone"', b'"of_a_newer_version"', 1))
    poison = machine.poison("facts", subject, 9, str(caught.value))
    (entry,) = machine.decide(machine.initial(0, 1), machine.new_hints(), poison, 0)
    assert isinstance(entry, e.Refused)
    assert (entry.reason, entry.command, entry.id) == ("poison", "facts", "9")


@pytest.mark.parametrize(
    ("machine", "what"), [(SandboxMachine(), "hold"), (DagMachine(), "told")], ids=["hold", "told"]
)
def test_a_shards_message_of_an_unknown_kind_is_said(machine: Any, what: str) -> None:
    data = KNOWN[f"message.{what}"].data
    assert machine.decode("messages", "", data) == [KNOWN[f"message.{what}"].sample]
    with pytest.raises(PoisonedError):
        machine.decode("messages", "", data.replace(what.encode(), b"of_a_newer_version", 1))
    envelope = exchange.decode(with_unknown(KNOWN["envelope"].data))
    assert msgspec.json.encode(envelope) == KNOWN["envelope"].data


def test_a_command_with_an_unknown_field_is_refused_by_name() -> None:
    machine = SandboxMachine()
    data = b'{"sandbox":"box","step":"s1"}'
    (well,) = machine.decode("commands", "fp.v1.in.0.cancel.box.s1", data)
    assert not isinstance(well, CommandMalformed)
    (malformed,) = machine.decode("commands", "fp.v1.in.0.cancel.box.s1", with_unknown(data))
    assert isinstance(malformed, CommandMalformed)
    assert "of_a_newer_version" in malformed.detail


def test_an_order_of_an_unknown_kind_spoils_no_other() -> None:
    known = [KNOWN["order.mark"], KNOWN["order.stop"]]
    unknown = KNOWN["order.prune"].data.replace(b'"prune"', b'"of_a_newer_version"')
    data = b"[" + b",".join([known[0].data, unknown, with_unknown(known[1].data)]) + b"]"
    taken, wrong = orders.decode(data)
    assert taken == [message.sample for message in known]
    assert len(wrong) == 1
    assert "of_a_newer_version" in wrong[0]
    assert orders.decode(b"{}") == ([], ["Expected `array`, got `object`"])
    assert orders.decode(b"[") == ([], ["Input data was truncated"])
