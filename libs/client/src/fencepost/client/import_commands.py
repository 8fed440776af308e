"""
`fencepost import-git`: a git history as tool steps, under reclaims, against git's own tree.

Exit code 0 when the workspace is git's tree and the ledger verifies, 1 when not.
"""
# ruff: noqa: PLR0917 - an option is an argument of its command's function

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, cast

import msgspec
import typer
from fencepost.client import cli, up
from fencepost.client.cli import AsJson, Data, Url
from fencepost.client.client import Client
from fencepost.client.gitimport import running
from fencepost.client.gitimport.repository import Order
from fencepost.client.stack import Stack
from fencepost.core.errors import RefusedError
from rich.text import Text

_DOWN_S: Final = 0.2


class _Place(NamedTuple):
    """Where the sandboxes run: whom to talk to, and the folder that the provider keeps them in."""

    url: str
    workspaces: Path
    crash_planner: Callable[[], Coroutine[Any, Any, None]] | None


@cli.app.command("import-git")
def import_git(
    repository: Annotated[Path, typer.Argument(metavar="REPO", help="A repository's folder.")],
    limit: Annotated[int, typer.Option(min=1, help="The newest so many commits.")] = 300,
    rev: Annotated[str, typer.Option("--rev", help="Up to this commit.")] = "HEAD",
    order: Annotated[
        str, typer.Option("--order", help="first-parent, or topo: all ancestors in one line.")
    ] = "first-parent",
    reclaim_mean: Annotated[
        float, typer.Option(min=0, help="A reclaim in so many steps, on average; 0: none.")
    ] = 0,
    duplicates: Annotated[
        float, typer.Option(min=0, max=1, help="Share of messages delivered twice.")
    ] = 0.1,
    crash_planner: Annotated[
        bool, typer.Option("--crash-planner", help="Kill the planner once (own stack only).")
    ] = False,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="A checkpoint in so many steps; 0: none.")
    ] = 10,
    seed: Annotated[int, typer.Option(help="Draws the places of the trouble.")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the own stack's folder.")] = False,
    data: Data = cli.DATA,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Run a git history as steps in a sandbox and compare the end with git's tree."""
    if order not in ("first-parent", "topo"):
        raise RefusedError(
            "bad_arguments",
            f"--order: expected first-parent or topo, got {order!r}",
            field="--order",
            expected="first-parent or topo",
        )
    history = running.History(
        repository=repository, limit=limit, revision=rev, order=cast("Order", order)
    )

    running.check(history)
    trouble = running.Trouble(
        reclaim_mean=reclaim_mean,
        duplicates=duplicates,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    scratch = Path(tempfile.mkdtemp(prefix="fencepost-import-"))
    scratch.chmod(0o755)
    try:
        place = _place(data, url, scratch, crash=crash_planner)
        report = cli.run(_import(history, trouble, place, scratch, as_json=as_json))
    finally:
        if keep:
            cli.err.print(f"kept: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    if as_json:
        cli.emit(report)
    else:
        _print_report(report)
    if not report.is_good:
        raise typer.Exit(cli.TOOL_FAILED)


async def _import(
    history: running.History,
    trouble: running.Trouble,
    where: AbstractAsyncContextManager[_Place],
    scratch: Path,
    *,
    as_json: bool,
) -> running.Report:
    async with where as place, await Client.connect(place.url, wait_s=10) as client:
        return await running.run(
            client,
            history,
            msgspec.structs.replace(trouble, crash_planner=place.crash_planner),
            workspaces=place.workspaces,
            scratch=scratch,
            say=lambda text: None if as_json else cli.err.print(text, style="dim"),
        )


@contextlib.asynccontextmanager
async def _place(
    data: Path, url: str | None, scratch: Path, *, crash: bool
) -> AsyncIterator[_Place]:
    """The stack that runs on this folder, or one of its own for as long as this lasts."""
    if url is not None or up.is_up(data):
        if crash:
            raise RefusedError(
                "bad_arguments",
                "--crash-planner: it is killed in a stack of this command's own only; stop the"
                " running one, or name another folder with --data",
                field="--crash-planner",
            )
        state = up.read_state(data)
        found = url or str(state.get("nats_url", ""))
        yield _Place(found, Path(str(state.get("data", data))) / "sandboxes", None)
        return
    stack = await Stack.start(scratch / "stack", others=False, postgres=False)
    planner = stack.of("planner")[0]

    async def kill_and_start() -> None:
        planner.kill()
        await asyncio.sleep(_DOWN_S)
        planner.start()

    try:
        yield _Place(stack.nats.url, stack.sandbox_root, kill_and_start if crash else None)
    finally:
        await stack.stop()


def _print_report(report: running.Report) -> None:
    same = report.tree_found == report.tree_expected
    cli.out.print(
        Text.assemble(
            ("the same tree" if same else "another tree", "green" if same else "bold red"),
            f": git has {report.tree_expected}, the workspace {report.tree_found}",
        )
    )
    cli.out.print(
        f"{report.commits} commits, {report.steps} steps in {report.seconds:.1f} s"
        f" ({report.steps_per_s:g}/s); {report.reclaims} reclaims to epoch {report.epoch},"
        f" {report.checkpoints} checkpoints, {report.restored} restored,"
        f" {report.replayed} steps replayed"
    )
    cli.out.print(
        f"{report.duplicates} messages delivered twice, {report.planner_crashes} planner crashes;"
        f" verify: {report.verify}; seed {report.seed}"
    )
    for name in report.submodules:
        cli.out.print(Text(f"passed over, a submodule: {name}"))
