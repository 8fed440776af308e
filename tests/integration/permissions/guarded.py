"""A real server with the generated accounts, users and permissions, and links of each role."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any, Final

from fencepost.client import users
from fencepost.client.embedded import NatsServer
from fencepost.contracts import authorization
from fencepost.contracts.grants import Grant, Role
from fencepost.runtime import access, streams
from fencepost.runtime.link import Link

SHARDS: Final = 2


class Guarded:
    """One server, its users, and what each link was denied."""

    def __init__(self, server: NatsServer, folder: Path, credentials: dict[Role, Path]) -> None:
        self.server = server
        self.folder = folder
        self.credentials = credentials
        self.denied: dict[str, list[str]] = {}

    async def link(self, role: Role) -> Link:
        denied = self.denied.setdefault(role, [])
        return await Link.connect(
            self.server.url,
            name=role,
            access=access.read(str(self.credentials[role])),
            on_denied=denied.append,
        )

    @contextlib.asynccontextmanager
    async def links(self, *roles: Role) -> AsyncIterator[Any]:
        """Links of these roles, closed at the end; one alone is given by itself."""
        made = [await self.link(role) for role in roles]
        try:
            yield made[0] if len(made) == 1 else made
        finally:
            for link in made:
                await link.close()

    async def reload(self, *, without: Collection[tuple[Role, Grant]] = ()) -> None:
        """Has the server read the table again, less some grants; it closes whom that touches."""
        write(self.folder, without=without)
        before = await asyncio.to_thread(self._loaded_at)
        os.kill(self.server.pid, signal.SIGHUP)
        deadline = time.monotonic() + 30
        while await asyncio.to_thread(self._loaded_at) == before:
            assert time.monotonic() < deadline, "the server did not read its configuration again"
            await asyncio.sleep(0.01)

    def _loaded_at(self) -> str:
        with urllib.request.urlopen(f"{self.server.monitor_url}/varz", timeout=10) as answer:
            return str(json.load(answer)["config_load_time"])


def write(folder: Path, *, ledgers: int = 1, without: Collection[tuple[Role, Grant]] = ()) -> None:
    text = authorization.render(users=users.USERS, ledgers=ledgers, without=without)
    (folder / users.AUTHORIZATION).write_text(text)


async def start(folder: Path, *, ledgers: int = 1) -> Guarded:
    """Starts the server and has the operator create everything."""
    credentials = users.make(folder, secrets_folder=folder / "credentials")
    write(folder, ledgers=ledgers)
    server = await NatsServer.start(
        folder, sync_always=False, extra_config=f"include ./{users.AUTHORIZATION}"
    )
    found = Guarded(server, folder, credentials)
    async with found.links("operator") as operator:
        await streams.declare_at_start(operator, SHARDS, create=True, ledgers=ledgers)
    return found
