"""`fencepost reshard`: other numbers of shards and ledgers, on another server or in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from fencepost.client import cli, reshard, reshard_embedded
from fencepost.client.cli import AsJson, Url
from fencepost.client.client import Client, takes_connections
from fencepost.client.errors import NoServerError
from fencepost.contracts.streams import require_ledgers
from fencepost.core.errors import RefusedError
from fencepost.runtime import access, address, streams
from fencepost.runtime.link import Link


@cli.app.command("reshard")
def reshard_(  # noqa: PLR0917 - options of a command
    shards: Annotated[
        int | None,
        typer.Option(
            min=1, max=reshard.SHARDS_MAX, help="The new number of shards; left out, as before."
        ),
    ] = None,
    ledgers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=reshard.SHARDS_MAX,
            help="The new number of ledger streams, at most the shards; left out, as before.",
        ),
    ] = None,
    to: Annotated[
        str, typer.Option("--to", help="NATS address of the new deployment, empty.")
    ] = "",
    to_credentials: Annotated[
        str, typer.Option("--to-credentials", help="Its mover's file; else the same as here.")
    ] = "",
    to_operator: Annotated[
        str,
        typer.Option(
            "--to-operator",
            help="Its operator's file, to create the streams; else they must be there, or whoever "
            "connects without a file may create them.",
        ),
    ] = "",
    replicas: Annotated[
        int, typer.Option(min=1, max=5, help="How often the new server keeps each stream.")
    ] = 1,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of an embedded stack that is stopped.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--into", help="New folder for it; needs --data.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Write this deployment's history anew, in other shards or ledgers, and verify it."""
    if shards is None and ledgers is None:
        raise RefusedError("bad_arguments", "expected --shards, --ledgers or both", field="shards")
    if into is not None and data is not None and not to:
        result = cli.run(
            reshard_embedded.reshard_folder(data, into, shards=shards, ledgers=ledgers)
        )
        told = f"`fencepost up --data {into}` goes on; the sandboxes stay in {data}"
    elif to and into is None and data is None:
        result = cli.run(
            _between(
                url,
                to=to,
                to_credentials=to_credentials,
                to_operator=to_operator,
                shards=shards,
                ledgers=ledgers,
                replicas=replicas,
            )
        )
        told = f"Start the services on {address.require('--to', to).shown} with {_settings(result)}"
    else:
        raise RefusedError(
            "bad_arguments",
            "expected --to (an address), or --data and --into (folders of embedded stacks)",
            field="to",
        )
    _tell(result, told, as_json=as_json)


def _settings(result: reshard.Result) -> str:
    return f"FENCEPOST_SHARDS={result.shards} and FENCEPOST_LEDGERS={result.ledgers}"


def _tell(result: reshard.Result, told: str, *, as_json: bool) -> None:
    if as_json:
        cli.emit(msgspec.to_builtins(result))
        return
    cli.out.print(
        f"{result.aggregates} sandboxes and DAGs, {result.entries} entries in {result.batches} "
        f"batches, {result.contents} contents, {result.chunks} chunks of checkpoints: "
        f"{result.shards_before} shards in {result.ledgers_before} ledgers are {result.shards} in "
        f"{result.ledgers} now, and verify is clean."
    )
    if result.forgotten:
        cli.out.print(f"{result.forgotten} that ended long ago are in the ledger only.")
    cli.out.print(f"{told}; the old deployment is whole, for as long as you keep it.")


async def _between(
    url: str | None,
    *,
    to: str,
    to_credentials: str,
    to_operator: str,
    shards: int | None,
    ledgers: int | None,
    replicas: int,
) -> reshard.Result:
    user = access.read(to_credentials) if to_credentials else None
    creator = access.read(to_operator) if to_operator else user
    if not await takes_connections(to):
        raise NoServerError(f"--to: no server at {address.require('--to', to).shown}")
    async with await Client.connect(url, name="fencepost-reshard") as source:
        wanted, over = shards or source.shards, ledgers or source.ledgers
        require_ledgers(over, shards=wanted)
        link = await Link.connect(to, name="fencepost-reshard", access=creator)
        try:
            may_create = bool(to_operator) or not to_credentials
            await streams.declare_at_start(
                link, wanted, create=may_create, replicas=replicas, ledgers=over
            )
        finally:
            await link.close()
        async with await Client.connect(to, name="fencepost-reshard", user=user) as target:
            return await reshard.reshard(source, target)
