"""Messages between shards: each counts once, in order, whatever is lost or comes twice."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
from fencepost.contracts.messages import Seen
from fencepost.core import ids
from fencepost.runtime.outbox import Envelope, MessageMaker, Resender

from tests.contracts import until
from tests.toy import Input, Told, ToyMachine
from tests.unit.runtime.rig import SHARDS, Crash, Rig, add, crash_at, state_of


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.close()


def aggregate_of(shard: int) -> str:
    return next(f"a{n}" for n in range(1_000) if ids.shard_of(f"a{n}", SHARDS) == shard)


def tell(text: str, shard: int = 1) -> Input:
    return Input(do="tell", to=aggregate_of(shard), text=text)


def envelopes(rig: Rig, receiver: int = 1) -> list[Envelope]:
    return [
        envelope
        for subject, data in rig.bus.streams["FP_MESSAGES"].messages
        if subject == f"fp.v1.message.toy.{receiver}"
        and not (envelope := msgspec.json.decode(data, type=Envelope)).resend
    ]


async def test_a_message_arrives_and_names_the_former_one(rig: Rig) -> None:
    sender, receiver = await rig.own("a", 0), await rig.own("a", 1)
    for text in ("one", "two", "three"):
        sender.submit(tell(text))
    sender.submit(tell("other", 2))
    await rig.settle(sender)
    sender.submit(tell("four"))
    await rig.settle(sender, receiver)
    assert (await state_of(receiver)).heard == ["one", "two", "three", "four"]
    chain = [(e.prev_seq, e.prev_index, e.seq, e.index) for e in envelopes(rig)]
    assert chain[0][:2] == (0, 0)
    assert [link[:2] for link in chain[1:]] == [link[2:] for link in chain[:-1]]
    seen = rig.batches(1)[-1].last_seen["toy.0"]
    assert (seen.seq, seen.index) == chain[-1][2:]


async def test_s219_a_message_sent_again_after_a_takeover_counts_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = await rig.own("a", 0), await rig.own("a", 1)
    sender.submit(tell("one"))
    await rig.settle(sender, receiver)
    with monkeypatch.context() as patch:
        reached = crash_at(patch, "after_messages")
        sender.submit(tell("two"))
        assert sender._task is not None
        with pytest.raises(Crash):
            await sender._task
        assert reached() == 1
    second = await rig.own("b", 0)
    await rig.settle(second, receiver)
    assert [e.body for e in envelopes(rig)].count(msgspec.Raw(b'"two"')) == 2
    assert (await state_of(receiver)).heard == ["one", "two"]
    # What came twice is not waited for either: the position is at the stream's end.
    await rig.pass_time(2_000, receiver)
    count = len(rig.bus.streams["FP_MESSAGES"].messages)
    assert rig.batches(1)[-1].positions["FP_MESSAGES"].seq == count == 3
    second.submit(tell("three"))
    await rig.settle(second, receiver)
    assert (await state_of(receiver)).heard == ["one", "two", "three"]


async def test_a_message_that_a_killed_sender_did_not_publish_is_sent_by_the_next(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = await rig.own("a", 0), await rig.own("a", 1)
    sender.submit(tell("one"))
    await rig.settle(sender, receiver)
    with monkeypatch.context() as patch:
        crash_at(patch, "after_append")
        sender.submit(tell("two"))
        assert sender._task is not None
        with pytest.raises(Crash):
            await sender._task
    assert len(envelopes(rig)) == 1
    second = await rig.own("b", 0)
    await rig.settle(second, receiver)
    assert (await state_of(receiver)).heard == ["one", "two"]


async def test_s225_an_early_message_waits_for_the_former_one_to_be_sent_again(rig: Rig) -> None:
    sender, receiver = await rig.own("a", 0), await rig.own("a", 1)
    sender.submit(tell("nine"))
    await rig.settle(sender, receiver)
    stream = rig.bus.streams["FP_MESSAGES"]
    # "ten" is acknowledged and then lost, so that only the receiver can miss it.
    real = stream.store
    stream.store = lambda subject, data: (  # type: ignore[method-assign]
        1 if b'"ten"' in data else real(subject, data)
    )
    sender.submit(tell("ten"))
    await rig.settle(sender, receiver)
    stream.store = real  # type: ignore[method-assign]
    await receiver.stop(hand_over=False)
    sender.submit(tell("eleven"))
    await rig.settle(sender)
    assert [bytes(e.body) for e in envelopes(rig)] == [b'"nine"', b'"eleven"']
    again = await rig.own("b", 1)
    await until(lambda: b'"ten"' in [bytes(e.body) for e in envelopes(rig)])
    await until(lambda: again.shard.last_seen["toy.0"].seq >= 4)
    await rig.settle(sender, again)
    assert (await state_of(again)).heard == ["nine", "ten", "eleven"]


@pytest.mark.parametrize("last", [None, 0, 1, 2, 3])
def test_s225_what_is_sent_again_is_linked_as_it_was_at_first(last: int | None) -> None:
    # Of one batch: two for the asker, one for somebody else, two for the asker; one of the next.
    aggregates = [aggregate_of(shard) for shard in (1, 1, 2, 1, 1)]
    batches = [
        (7, [Told(to=aggregate, text=str(n)) for n, aggregate in enumerate(aggregates)]),
        (9, [Told(to=aggregate_of(1), text="next")]),
    ]
    first = MessageMaker(ToyMachine(), 0, SHARDS)
    sent = [item for seq, entries in batches for item in first.make(seq, entries, 0)]
    mine = [msgspec.json.decode(data, type=Envelope) for at, data in sent if at.endswith(".1")]
    seen = Seen(0, 0) if last is None else Seen(mine[last].seq, mine[last].index)
    ask = Envelope(family="toy", shard=1, seq=seen.seq, index=seen.index, resend=True)
    maker = Resender(ToyMachine(), 0, SHARDS, ask)
    again = [
        msgspec.json.decode(data, type=Envelope)
        for seq, entries in batches
        if seq >= seen.seq
        for _, data in maker.make(seq, entries, 0)
    ]
    assert again == mine[0 if last is None else last + 1 :]


async def test_while_a_message_waits_the_position_stays_below_it(rig: Rig) -> None:
    sender, receiver = await rig.own("a", 0), await rig.own("a", 1)
    sender.submit(tell("one"))
    await rig.settle(sender, receiver)
    await sender.stop(hand_over=False)  # nobody there to send again
    one = envelopes(rig)[0].seq
    early = Envelope(
        family="toy", shard=0, seq=9, index=0, prev_seq=8, prev_index=0, body=msgspec.Raw(b'"x"')
    )
    rig.bus.publish("fp.v1.message.toy.1", msgspec.json.encode(early))
    rig.put(add("k"), 1)
    await rig.settle(receiver)
    assert rig.batches(1)[-1].positions["FP_MESSAGES"].seq == 1
    # The next owner reads it again, and takes it once its turn has come.
    await receiver.stop(hand_over=False)
    second = await rig.own("b", 1)
    missing = Envelope(
        family="toy", shard=0, seq=8, index=0, prev_seq=one, prev_index=0, body=msgspec.Raw(b'"w"')
    )
    rig.bus.publish("fp.v1.message.toy.1", msgspec.json.encode(missing))
    await rig.settle(second)
    assert (await state_of(second)).heard == ["one", "w", "x"]
    await rig.pass_time(2_000, second)
    assert rig.batches(1)[-1].positions["FP_MESSAGES"].seq == 4


async def test_messages_survive_a_snapshot_with_none_acknowledged(rig: Rig) -> None:
    sender, receiver = await rig.own("a", 0, snapshot_every=4), await rig.own("a", 1)
    sender.submit(tell("m0"))
    await rig.settle(sender, receiver)
    rig.bus.streams["FP_MESSAGES"].refuses = True
    for number in range(1, 9):
        sender.submit(tell(f"m{number}"))
        await rig.settle(sender)
    await until(lambda: not sender._snapshot_busy)
    sender.submit(tell("m9"))
    await rig.settle(sender)
    await sender.stop(hand_over=False)
    assert rig.batches(0)[-1].snapshot
    rig.bus.streams["FP_MESSAGES"].refuses = False
    second = await rig.own("b", 0)
    second.submit(tell("m10"))
    await rig.settle(second, receiver)
    assert (await state_of(receiver)).heard == [f"m{number}" for number in range(11)]


async def test_a_poisoned_message_is_recorded_and_passed_over(rig: Rig) -> None:
    receiver = await rig.own("a", 1)
    rig.bus.publish("fp.v1.message.toy.1", b"null")
    sender = await rig.own("a", 0)
    sender.submit(tell("one"))
    await rig.settle(sender, receiver)
    assert rig.kinds(1) == ["term_opened", "refused", "heard"]


@pytest.mark.parametrize(
    "data",
    [
        b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"family":"toy","shard":0,"seq":1,"index":0,"body":'
        + b"[" * 20_000
        + b"]" * 20_000
        + b"}",
    ],
    ids=["unknown field", "body"],
)
async def test_s221_a_message_nested_without_end_is_recorded_and_passed_over(
    rig: Rig, data: bytes
) -> None:
    receiver = await rig.own("a", 1)
    rig.bus.publish("fp.v1.message.toy.1", data)
    sender = await rig.own("b", 0)
    sender.submit(tell("one"))
    await rig.settle(sender, receiver)
    assert rig.kinds(1) == ["term_opened", "refused", "heard"]
