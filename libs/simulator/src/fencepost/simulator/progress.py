"""A progress bar on standard error where that is a terminal; nothing at all where it is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from fencepost.simulator.batches import Summary

Tell: TypeAlias = "Callable[[Summary], None]"


@contextmanager
def shown(*, runs: int | None = None, events: int | None = None) -> Iterator[Tell | None]:
    """
    Gives what is to be told of the sum so far, or None where nobody looks.

    The bar counts towards so many `events` where they are given, else towards so many `runs`.
    """
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield None
        return
    with bar(console, runs=runs, events=events) as tell:
        yield tell


@contextmanager
def bar(console: Console, *, runs: int | None = None, events: int | None = None) -> Iterator[Tell]:
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[runs]:,} runs"),
        TextColumn("{task.fields[events]:,} events"),
        TextColumn("{task.fields[rate]:,}/s"),
        TextColumn("{task.fields[violations]} violations"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(
            "runs", total=events or runs, runs=0, events=0, rate=0, violations=0
        )
        began = time.perf_counter()
        before: int | None = None

        def tell(summary: Summary) -> None:
            nonlocal before
            if before is None:  # a run that was taken up again: these are not of this process
                before = summary.events
            seconds = time.perf_counter() - began
            progress.update(
                task,
                completed=summary.events if events else summary.seeds,
                runs=summary.seeds,
                events=summary.events,
                rate=round((summary.events - before) / seconds) if seconds > 0 else 0,
                violations=sum(summary.violations.values()),
            )

        yield tell
