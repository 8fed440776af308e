"""`fencepost reshard`: another number of shards, on another server."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from fencepost.client import cli, reshard
from fencepost.client.cli import AsJson, Url
from fencepost.client.client import Client
from fencepost.runtime import access, streams
from fencepost.runtime.link import Link


@cli.app.command("reshard")
def reshard_(  # noqa: PLR0917 - options of a command
    to: Annotated[str, typer.Option("--to", help="NATS address of the new deployment, empty.")],
    shards: Annotated[
        int, typer.Option(min=1, max=reshard.SHARDS_MAX, help="Its number of shards, for ever.")
    ],
    to_credentials: Annotated[
        str, typer.Option("--to-credentials", help="Credentials file there; else the same as here.")
    ] = "",
    replicas: Annotated[
        int, typer.Option(min=1, max=5, help="How often the new server keeps each stream.")
    ] = 1,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Write this deployment's history anew, cut into another number of shards, and verify it."""

    async def work() -> reshard.Result:
        user = access.read(to_credentials) if to_credentials else None
        async with await Client.connect(url, name="fencepost-reshard") as source:
            link = await Link.connect(to, name="fencepost-reshard", access=user)
            try:
                await streams.declare_at_start(link, shards, create=True, replicas=replicas)
            finally:
                await link.close()
            async with await Client.connect(to, name="fencepost-reshard", user=user) as target:
                return await reshard.reshard(source, target)

    result = cli.run(work())
    if as_json:
        cli.emit(msgspec.to_builtins(result))
        return
    cli.out.print(
        f"{result.aggregates} sandboxes and DAGs, {result.entries} entries in {result.batches} "
        f"batches: {result.shards_before} shards are {result.shards} now, and verify is clean."
    )
    if result.forgotten:
        cli.out.print(f"{result.forgotten} that ended long ago are in the ledger only.")
    cli.out.print(
        f"Start the services on {to} with FENCEPOST_SHARDS={result.shards}; the old deployment is "
        "whole, for as long as you keep it."
    )
