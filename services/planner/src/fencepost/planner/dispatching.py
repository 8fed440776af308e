"""Carries effects to gateways: one publish per gateway and turn, a JSON array of orders."""

from __future__ import annotations

from typing import Final

import msgspec
import structlog
from fencepost.contracts import subjects
from fencepost.core import limits
from fencepost.core.machine import Effect
from fencepost.runtime.ports import Bus

PACK_BYTES_MAX: Final = limits.NATS_PAYLOAD_BYTES_MAX // 2

logger = structlog.get_logger(__name__)
_ENCODE = msgspec.json.Encoder().encode


def perform(bus: Bus, effects: list[Effect]) -> None:
    """
    Publishes orders and does not wait: a gateway that does not get one gets it again by timer.
    """
    if len(effects) == 1:
        effect = effects[0]
        if effect.target:
            bus.publish(subjects.orders(effect.target), b"[" + _ENCODE(effect.order) + b"]")
        return
    by_target: dict[str, list[bytes]] = {}
    for effect in effects:
        if effect.target:
            by_target.setdefault(effect.target, []).append(_ENCODE(effect.order))
    for target, encoded in by_target.items():
        for pack in _packs(encoded):
            bus.publish(subjects.orders(target), b"[" + b",".join(pack) + b"]")


def _packs(encoded: list[bytes]) -> list[list[bytes]]:
    packs: list[list[bytes]] = [[]]
    size = 0
    for one in encoded:
        if packs[-1] and size + len(one) > PACK_BYTES_MAX:
            packs.append([])
            size = 0
        packs[-1].append(one)
        size += len(one) + 1
    return packs
