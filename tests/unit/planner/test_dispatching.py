"""Effects on their way out: one publish per gateway and turn, within the payload bound."""

from __future__ import annotations

import msgspec
from fencepost.core import limits
from fencepost.core.machine import Effect
from fencepost.planner import dispatching

from tests.memory import MemoryBus


def effect(key: str, target: str, order: object = None) -> Effect:
    return Effect(key=key, since_ms=0, target=target, order=order or {"key": key})


def test_orders_are_grouped_by_gateway() -> None:
    bus = MemoryBus()
    dispatching.perform(bus, [effect("1", "g1"), effect("2", "g2"), effect("3", "g1")])
    assert {subject: msgspec.json.decode(data) for subject, data in bus.published} == {
        "fp.v1.dispatch.g1": [{"key": "1"}, {"key": "3"}],
        "fp.v1.dispatch.g2": [{"key": "2"}],
    }


def test_an_effect_without_a_gateway_goes_nowhere() -> None:
    bus = MemoryBus()
    dispatching.perform(bus, [effect("1", "")])
    dispatching.perform(bus, [effect("1", ""), effect("2", "g2")])
    assert [subject for subject, _ in bus.published] == ["fp.v1.dispatch.g2"]


def test_many_large_orders_take_several_messages_in_order() -> None:
    bus = MemoryBus()
    effects = [effect(str(n), "g1", {"n": n, "args": "x" * 16_000}) for n in range(100)]
    dispatching.perform(bus, effects)
    assert len(bus.published) > 1
    assert max(len(data) for _, data in bus.published) < limits.NATS_PAYLOAD_BYTES_MAX
    numbers = [order["n"] for _, data in bus.published for order in msgspec.json.decode(data)]
    assert numbers == list(range(100))
