from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.permissions import guarded as making


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[making.Guarded]:
    """A server with every user of the table, and every stream."""
    found = await making.start(tmp_path / "nats")
    try:
        yield found
    finally:
        await found.server.stop()
