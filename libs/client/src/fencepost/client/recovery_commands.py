"""
`fencepost sandbox checkpoint`, `restore`, `fork` and `recover`.

A restore and a fork bring a workspace back into a *new* sandbox; the origin is only read. Exit
code 1 where a step did not have the effect that its first receipt tells of.
"""
# ruff: noqa: PLR0917 - an option is an argument of its command's function

from __future__ import annotations

from typing import Annotated, Any, cast

import typer
from fencepost.client import cli, forks, losses
from fencepost.client.cli import AsJson, SandboxId, Timeout, Url
from fencepost.client.client import Client
from fencepost.client.recovery import Checkpoint, Decision
from fencepost.client.recovery_words import size
from fencepost.core.errors import RefusedError
from rich.text import Text

As = Annotated[
    str | None, typer.Option("--as", help="The new sandbox's id; made up when left out.")
]


@cli.sandbox_app.command("checkpoint")
def sandbox_checkpoint(
    sandbox: SandboxId,
    reason: Annotated[str, typer.Option(help="Recorded.")] = "",
    timeout: Timeout = 60.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Store the workspace outside the sandbox, as it is between two steps."""

    async def work() -> Checkpoint:
        async with await Client.connect(url) as client:
            return await client.checkpoint(sandbox, reason=reason, timeout_s=timeout)

    found = cli.run(work())
    if as_json:
        cli.emit(found)
    else:
        cli.out.print(
            f"checkpoint {found.checkpoint}: {found.files} files, {size(found.size_bytes)},"
            f" {size(found.sent_bytes)} sent"
        )


@cli.sandbox_app.command("restore")
def sandbox_restore(
    sandbox: SandboxId,
    at: Annotated[
        str, typer.Option("--at", help="A committed step; else all that is committed.")
    ] = "",
    as_: As = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Bring a sandbox's committed workspace back into a new sandbox; prints its id."""
    _fork(sandbox, at, as_, url, as_json=as_json)


@cli.sandbox_app.command("fork")
def sandbox_fork(
    sandbox: SandboxId,
    at: Annotated[str, typer.Option("--at", help="A committed step.")],
    as_: As = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Bring the workspace as it was right after a step back into a new sandbox; prints its id."""
    if not at:
        raise RefusedError(
            "bad_arguments", "--at: expected a committed step's id", field="--at", expected="an id"
        )
    _fork(sandbox, at, as_, url, as_json=as_json)


def _fork(sandbox: str, at: str, name: str | None, url: str | None, *, as_json: bool) -> None:
    def say(text: str) -> None:
        if not as_json:
            cli.err.print(text, style="dim")

    async def work() -> forks.Fork:
        async with await Client.connect(url) as client:
            return await forks.fork(client, sandbox, at=at, name=name, say=say)

    found = cli.run(work())
    if as_json:
        cli.emit(found)
    else:
        _print_fork(found)
    if found.difference is not None:
        raise typer.Exit(cli.TOOL_FAILED)


def _print_fork(found: forks.Fork) -> None:
    for step in found.external:
        cli.err.print(Text(f"not run again, it acted outside: {step}"))
    for step in found.unproven:
        cli.err.print(Text(f"left out, committed by an operator's word alone: {step}"))
    if found.difference is not None:
        differs = found.difference
        cli.err.print(
            Text.assemble(
                ("it ends early: ", "bold red"),
                f"step {differs.step} had another effect: expected {differs.expected},"
                f" found {differs.found}",
            )
        )
    if found.leans:
        text = f"{found.sandbox} has no checkpoint of its own yet: keep {found.origin} until it has"
        cli.err.print(Text(text))
    start = f"checkpoint {found.checkpoint}" if found.checkpoint else "an empty workspace"
    cli.err.print(
        Text(f"{found.origin} at {found.at}: from {start}, {found.replayed} steps replayed")
    )
    cli.out.print(found.sandbox)


@cli.sandbox_app.command("recover")
def sandbox_recover(
    sandbox: SandboxId,
    decision: Annotated[
        str,
        typer.Argument(
            help="accept: the disk as it is; tell: give up what is still owed; discard: this disk."
        ),
    ],
    who: Annotated[str, typer.Option(help="Who says so; recorded.")],
    note: Annotated[str, typer.Option(help="Why; recorded.")],
    timeout: Timeout = 60.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Decide a recovery that stopped."""
    if decision not in ("accept", "tell", "discard"):
        raise RefusedError(
            "bad_arguments",
            f"DECISION: expected accept, tell or discard, got {decision!r}",
            field="DECISION",
            expected="accept, tell or discard",
        )

    async def work() -> dict[str, Any]:
        async with await Client.connect(url) as client:
            return await client.recover(
                sandbox, cast("Decision", decision), who=who, note=note, timeout_s=timeout
            )

    found = cli.run(work())
    if as_json:
        cli.emit(found)
    else:
        cli.out.print(f"{sandbox} is {found['state']} at epoch {found['epoch']}")
        if decision == "tell":
            cli.err.print(Text(f"what is given up: fencepost sandbox losses {sandbox}"))


@cli.sandbox_app.command("losses")
def sandbox_losses(sandbox: SandboxId, url: Url = None, as_json: AsJson = False) -> None:
    """List what a stopped recovery differs in, path by path, and every step that was given up."""

    async def work() -> losses.Losses:
        async with await Client.connect(url) as client:
            return await losses.losses(client, sandbox)

    found = cli.run(work())
    if as_json:
        cli.emit(found)
        return
    if found.stopped:
        cli.out.print(Text(f"the recovery stopped: {found.stopped} {found.step}".strip()))
    for one in found.differs:
        expected = f"expected {one.expected}, found " if one.expected else ""
        cli.out.print(Text(f"  {one.path}: {expected}{one.found}"))
    if found.is_cut:
        cli.out.print("  these are not all, or the first receipt lists none")
    for checkpoint in found.lost:
        held = f"checkpoint {checkpoint} is lost with all that it held"
        of = f"; it held what {found.origin} had then" if found.origin else ""
        cli.out.print(Text(f"{held}{of}"))
    for given in found.given_up:
        cli.out.print(Text(f"given up: {given.step} {given.tool}"))
    if not (found.stopped or found.lost or found.given_up):
        cli.out.print("nothing is lost")
