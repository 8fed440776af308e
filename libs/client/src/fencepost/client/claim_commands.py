"""`fencepost sandbox claim` and `unclaim`: keep a sandbox for work that outlives its DAG."""
# ruff: noqa: PLR0917 - an option is an argument of its command's function

from __future__ import annotations

from typing import Annotated, Any

import typer
from fencepost.client import cli
from fencepost.client.cli import AsJson, SandboxId, Timeout, Url
from fencepost.client.client import Client


@cli.sandbox_app.command("claim")
def sandbox_claim(
    sandbox: SandboxId,
    claim: Annotated[
        str | None, typer.Argument(help="Its id, used once; made up when left out.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Recorded.")] = "",
    timeout: Timeout = 30.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Keep a sandbox whoever lets go of it; prints the claim's id."""

    async def work() -> str:
        async with await Client.connect(url) as client:
            return await client.claim(sandbox, claim, reason=reason, timeout_s=timeout)

    found = cli.run(work())
    if as_json:
        cli.emit({"sandbox": sandbox, "claim": found})
    else:
        cli.out.print(found)


@cli.sandbox_app.command("unclaim")
def sandbox_unclaim(
    sandbox: SandboxId,
    claim: Annotated[str, typer.Argument(metavar="CLAIM", help="The claim's id.")],
    timeout: Timeout = 30.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """End a claim; where nothing else keeps the sandbox, it is released."""

    async def work() -> dict[str, Any]:
        async with await Client.connect(url) as client:
            return await client.unclaim(sandbox, claim, timeout_s=timeout)

    found = cli.run(work())
    if as_json:
        cli.emit(found)
    else:
        cli.out.print(f"{sandbox} is {found['state']}")
