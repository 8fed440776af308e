"""
`fencepost deploy`: the NATS users of a deployment, and its streams.

The services of a deployment that was set up by this need no right to create anything.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from fencepost.client import cli, command_line, users
from fencepost.client.cli import AsJson
from fencepost.contracts import authorization
from fencepost.core.errors import FencepostError, RefusedError
from fencepost.runtime import settings, streams
from fencepost.runtime.link import Link

_AGAIN_S: Final = 1.0

app = command_line.App(
    help="Set up NATS for a deployment: users and streams.", no_args_is_help=True
)
cli.app.add_typer(app, name="deploy")

Out = Annotated[Path, typer.Option("--out", help="Folder of the server's configuration.")]


@app.command("nats")
def nats(  # noqa: PLR0917 - options of a command
    out: Out = Path("deploy/nats"),
    credentials: Annotated[
        Path | None, typer.Option(help="Folder of the users' files; --out when left out.")
    ] = None,
    permissions_only: Annotated[
        bool,
        typer.Option(
            "--permissions-only",
            help="Write no users: the server's environment has the passwords' hashes.",
        ),
    ] = False,
    ledgers: Annotated[
        int,
        typer.Option(
            min=1, envvar="FENCEPOST_LEDGERS", help="Over how many ledger streams the shards are."
        ),
    ] = 1,
    nkeys: Annotated[
        bool,
        typer.Option("--nkeys", help="Users with nkeys: the server has their public halves only."),
    ] = False,
    anybody: Annotated[
        bool, typer.Option("--anybody", help="Let whoever shows no credentials in, as a person.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """
    Write authorization.conf from the table of grants, and one user for each service.

    Passwords, or nkeys, are made once; what is there already stays.
    """
    out.mkdir(parents=True, exist_ok=True)
    role = users.ANYBODY if anybody else None
    written: dict[str, Any] = {"authorization": str(out / users.AUTHORIZATION), "credentials": {}}
    if permissions_only:
        text = authorization.render(anybody=role, ledgers=ledgers, nkeys=nkeys)
    else:
        made = users.make(out, secrets_folder=credentials, nkeys=nkeys)
        written["users"] = str(out / users.USERS)
        written["credentials"] = {name: str(path) for name, path in made.items()}
        text = authorization.render(users=users.USERS, anybody=role, ledgers=ledgers, nkeys=nkeys)
    (out / users.AUTHORIZATION).write_text(text)
    if as_json:
        cli.emit(written)
        return
    cli.out.print(f"permissions  {written['authorization']}")
    if not permissions_only:
        cli.out.print(f"users        {written['users']}")
    for name, path in written["credentials"].items():
        cli.out.print(f"{name:<12} {path}")


@app.command("streams")
def declare(
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Stay, and do it again whenever the server was started again."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """
    Create the streams and buckets that are missing, and compare the others with the table.

    By the settings of a service (FENCEPOST_NATS_URL, FENCEPOST_NATS_CREDENTIALS of the operator,
    FENCEPOST_SHARDS, FENCEPOST_LEDGERS, FENCEPOST_REPLICAS). What is in memory is gone after a
    server's restart.
    """
    found = settings.load(settings.Settings)

    def told(text: str) -> None:
        if as_json:
            cli.emit({"streams": text})
        else:
            cli.out.print(text)

    cli.run(_declare(found, told, watch=watch))


async def _declare(found: settings.Settings, told: Any, *, watch: bool) -> None:
    try:
        link = await Link.connect(found.nats_url, name="fencepost-operator", access=found.access())
    except OSError as error:
        raise RefusedError(
            "no_server", f"FENCEPOST_NATS_URL: {found.address().shown}: {error}", field="nats_url"
        ) from error
    back = asyncio.Event()
    link.on_back(back.set)
    try:
        await streams.declare_at_start(
            link, found.shards, create=True, replicas=found.replicas, ledgers=found.ledgers
        )
        told("as the table says")
        while watch:
            await back.wait()
            back.clear()
            await _until_declared(link, found)
            told("as the table says, again")
    finally:
        await link.close()


async def _until_declared(link: Link, found: settings.Settings) -> None:
    while True:
        try:
            await streams.declare(
                link, found.shards, create=True, replicas=found.replicas, ledgers=found.ledgers
            )
        except FencepostError as error:
            cli.err.print(f"not declared: {error}")
            await asyncio.sleep(_AGAIN_S)
        else:
            return
