"""Disks and toolhost processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolhost.driver import Disk, Toolhost


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
def start(disk: Disk) -> Iterator[Callable[..., Toolhost]]:
    """Starts toolhosts on the test's disk; all are ended with the test."""
    with ExitStack() as stack:

        def starter(*options: str, **more: Any) -> Toolhost:
            return stack.enter_context(Toolhost(more.pop("on", disk), *options, **more))

        yield starter


@pytest.fixture
def host(start: Callable[..., Toolhost]) -> Toolhost:
    """A toolhost in epoch 7, session A."""
    toolhost = start()
    assert toolhost.mark()["k"] == "marked"
    return toolhost
