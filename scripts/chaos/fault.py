"""What a fault is."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

Strike = Callable[[random.Random], Awaitable[None]]

KINDS: Final = {"process": 3, "link": 4, "server": 4, "disk": 2, "sandbox": 4}
"""How often each kind is drawn, however many faults there are of it."""


@dataclass(frozen=True)
class Fault:
    """
    One fault; `touches` is what no other may touch meanwhile.

    `weight`: how often it is drawn, compared with the others of its kind.
    """

    name: str
    touches: str
    weight: int
    strike: Strike
    kind: str = "server"
