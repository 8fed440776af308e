"""Orders as they come from shards, each judged by itself: an unknown one spoils no other."""

from __future__ import annotations

from typing import Final

import msgspec
from fencepost.core.sandbox.orders import Order

_ORDERS: Final = msgspec.json.Decoder(list[Order])
_ONE: Final = msgspec.json.Decoder(Order)
_RAWS: Final = msgspec.json.Decoder(list[msgspec.Raw])


def decode(data: bytes) -> tuple[list[Order], list[str]]:
    """
    The orders that can be read, and what is wrong with each of the others.

    A shard of a newer version may give orders of kinds unknown here. They stay owed, and are given
    again; a gateway that knows them takes them.
    """
    try:
        return _ORDERS.decode(data), []
    except msgspec.DecodeError as error:
        whole = str(error)
    try:
        raws = _RAWS.decode(data)
    except msgspec.DecodeError:
        return [], [whole]
    found: list[Order] = []
    wrong: list[str] = []
    for raw in raws:
        try:
            found.append(_ONE.decode(raw))
        except msgspec.DecodeError as error:
            wrong.append(str(error))
    return found, wrong
