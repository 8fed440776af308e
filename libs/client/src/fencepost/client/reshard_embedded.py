"""
`fencepost reshard --into`: the embedded stack's folder, cut anew into another folder.

The new folder gets a NATS server of its own, with the same users, passwords and receipt key. The
sandboxes stay where they are, since a sandbox is known by its place: the new folder points there.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Final

from fencepost.client import up, users
from fencepost.client.client import Client
from fencepost.client.reshard import Result, reshard
from fencepost.client.stack import (
    MOVING,
    Stack,
    ledgers_of,
    refuse_half_moved,
    shards_of,
    write_ledgers,
    write_shards,
)
from fencepost.contracts.streams import require_ledgers
from fencepost.core.errors import RefusedError
from fencepost.runtime import access

KEPT: Final = ("credentials", "receipt.key", f"nats/{users.USERS}")
"""What a deployment is known by, besides its ledger."""

SANDBOXES: Final = "sandboxes"


async def reshard_folder(
    data: Path, into: Path, *, shards: int | None = None, ledgers: int | None = None
) -> Result:
    """
    Writes the history of the stack on `data` into a new stack on `into`; neither may run.

    What is left out of `shards` and `ledgers` stays as it is.

    Raises as `reshard.reshard` does, and `RefusedError` where `data` holds no stack or `into` is
    not empty. What a failed one left in `into` is of no use, and no stack starts on it: delete it,
    and `data` is whole.
    """
    data, into = data.resolve(), into.resolve()
    refuse_unless_folders(data, into)
    wanted, over = shards or shards_of(data), ledgers or ledgers_of(data)
    require_ledgers(over, shards=wanted)
    with up.held(data), up.held(into):
        refuse_half_moved(data)
        (into / MOVING).touch()  # before there is anything to go on with
        _take_along(data, into)
        write_shards(into, wanted)
        write_ledgers(into, over)
        async with contextlib.AsyncExitStack() as stopping:
            clients = []
            for folder in (data, into):
                stack = await _servers_of(folder)
                stopping.push_async_callback(stack.stop)
                mover = access.read(str(stack.credentials["mover"]))
                client = await Client.connect(
                    stack.nats.url, name="fencepost-reshard", wait_s=10, user=mover
                )
                clients.append(await stopping.enter_async_context(client))
            result = await reshard(*clients)
        (into / MOVING).unlink()
        return result


def refuse_unless_folders(data: Path, into: Path) -> None:
    """Raises `RefusedError` where there is nothing to read, or something to write over."""
    if not (data / "nats" / "store").is_dir():
        raise RefusedError(
            "nothing_to_reshard",
            f"--data: expected the folder of an embedded stack, got {data}",
            field="data",
        )
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise RefusedError(
            "not_empty", f"--into: expected an empty or new folder, got {into}", field="into"
        )


async def _servers_of(folder: Path) -> Stack:
    """Its NATS server alone, with its streams as the table says."""
    return await Stack.start(
        folder,
        planners=0,
        gateways=0,
        others=False,
        postgres=False,
        shards=shards_of(folder),
        ledgers=ledgers_of(folder),
    )


def _take_along(data: Path, into: Path) -> None:
    for name in KEPT:
        there, here = data / name, into / name
        here.parent.mkdir(parents=True, exist_ok=True)
        if there.is_dir():
            shutil.copytree(there, here)
        elif there.exists():
            shutil.copy2(there, here)
    sandboxes = data / SANDBOXES
    if sandboxes.exists():
        (into / SANDBOXES).symlink_to(sandboxes.resolve(), target_is_directory=True)
