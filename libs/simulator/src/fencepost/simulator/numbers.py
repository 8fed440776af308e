"""Numbers as they are typed, within bounds, for argparse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Final

HIGHEST: Final = 2**63 - 1


def whole(low: int = 0, high: int = HIGHEST) -> Callable[[str], int]:
    """An integer from `low` to `high`."""

    def read(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = low - 1
        if not low <= found <= high:
            raise argparse.ArgumentTypeError(
                f"expected an integer from {low} to {high}, got {text[:40]!a}"
            )
        return found

    return read


def more_than_none(high: float = 1e6) -> Callable[[str], float]:
    """A number above 0 and at most `high`."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not 0 < found <= high:
            raise argparse.ArgumentTypeError(
                f"expected more than 0 and at most {high:g}, got {text[:40]!a}"
            )
        return found

    return read


def share_problem(value: float) -> str:
    """What is wrong with a share of one, or nothing."""
    is_share = math.isfinite(value) and 0 <= value <= 1
    return "" if is_share else f"expected a number from 0 to 1, got {value}"
