"""Connections as the owners of shards have them: nobody else may append to a ledger."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from fencepost.client.stack import Stack
from fencepost.runtime import access
from fencepost.runtime.link import Link


@asynccontextmanager
async def as_owner(stack: Stack, role: Literal["planner", "tracker"]) -> AsyncIterator[Link]:
    """A connection of the user that this service has."""
    found = access.read(str(stack.credentials[role]))
    link = await Link.connect(stack.nats.url, name=f"bench-{role}", access=found)
    try:
        yield link
    finally:
        await link.close()
