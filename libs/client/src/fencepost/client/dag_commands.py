"""
`fencepost dag` and `fencepost releases`: DAGs, what they hold, and the verdict on it.

Exit codes of `dag cancel`: 0 confirmed or nothing held, 1 unconfirmed (the release goes on).
"""
# ruff: noqa: PLR0917 - an option is an argument of its command's function

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from fencepost.client import cli, command_line
from fencepost.client.cli import AsJson, Timeout, Url
from fencepost.client.client import Client
from fencepost.core.errors import RefusedError
from fencepost.core.steps import SandboxSpec
from fencepost.runtime.dags import Verdict
from rich.table import Table
from rich.text import Text

dag_app = command_line.App(help="Open, feed, cancel and look at DAGs.", no_args_is_help=True)
cli.app.add_typer(dag_app, name="dag")

DagId = Annotated[str, typer.Argument(metavar="DAG", help="The DAG's id.")]
Slot = Annotated[str, typer.Argument(metavar="SLOT", help="The author's name for it, any text.")]
Replace = Annotated[
    bool, typer.Option("--replace", help="Move the slot from what it names; that is released.")
]
Wait = Annotated[bool, typer.Option(help="Wait until it is ready.")]

_COLOURS = {"confirmed": "green", "nothing_held": "green", "unconfirmed": "yellow"}


@dag_app.command("open")
def dag_open(
    dag: Annotated[str | None, typer.Argument(help="Its id; made up when left out.")] = None,
    node: Annotated[
        list[str] | None, typer.Option("--node", help="A task's name; may be repeated.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Open a DAG; prints its id."""

    async def work() -> str:
        async with await Client.connect(url) as client:
            return await client.open_dag(dag, node or [])

    found = cli.run(work())
    if as_json:
        cli.emit({"dag": found})
    else:
        cli.out.print(found)


@dag_app.command("acquire")
def dag_acquire(
    dag: DagId,
    slot: Slot,
    provider: Annotated[str, typer.Option(help="What makes it.")] = "process",
    image: Annotated[str, typer.Option(help="Image, where the provider takes one.")] = "",
    network: Annotated[bool, typer.Option("--network", help="Let it use the network.")] = False,
    replace: Replace = False,
    wait: Wait = True,
    timeout: Timeout = 60.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Get a fresh sandbox into a slot; prints its id."""
    spec = SandboxSpec(provider=provider, image=image, network=network)

    async def work() -> Any:
        async with await Client.connect(url) as client:
            return await client.acquire(
                dag, slot, spec, replace=replace, wait=wait, timeout_s=timeout
            )

    _print_acquired(cli.run(work()), as_json=as_json)


@dag_app.command("adopt")
def dag_adopt(
    dag: DagId,
    slot: Slot,
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", help="One that exists.")],
    replace: Replace = False,
    wait: Wait = True,
    timeout: Timeout = 60.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Get a sandbox that exists into a slot: it is then held by this DAG too."""

    async def work() -> Any:
        async with await Client.connect(url) as client:
            return await client.adopt(
                dag, slot, sandbox, replace=replace, wait=wait, timeout_s=timeout
            )

    _print_acquired(cli.run(work()), as_json=as_json)


def _print_acquired(found: Any, *, as_json: bool) -> None:
    if as_json:
        cli.emit(found)
    else:
        cli.out.print(found.sandbox)


@dag_app.command("cancel")
def dag_cancel(
    dag: DagId,
    reason: Annotated[str, typer.Option(help="Recorded.")] = "cancelled",
    bound: Annotated[float, typer.Option(help="Seconds until it answers, at the latest.")] = 5.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Close a DAG, release all that it holds, and print the verdict."""

    async def work() -> tuple[Verdict, dict[str, Any]]:
        async with await Client.connect(url) as client:
            verdict = await client.cancel_dag(dag, reason=reason, bound_s=bound)
            left = verdict.released == "unconfirmed"
            return verdict, await client.show_dag(dag) if left else {}

    verdict, view = cli.run(work())
    if as_json:
        cli.emit(verdict)
    else:
        print_verdict(verdict)
        for item in view.get("outstanding", ()):
            cli.out.print(Text("  " + _outstanding(item)))
    if verdict.released == "unconfirmed":
        raise typer.Exit(cli.TOOL_FAILED)


@dag_app.command("finish")
def dag_finish(
    dag: DagId,
    status: Annotated[str, typer.Option(help="Recorded.")] = "succeeded",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """End a DAG by itself; all that it holds is released."""

    async def work() -> None:
        async with await Client.connect(url) as client:
            await client.finish_dag(dag, status=status)

    cli.run(work())
    if as_json:
        cli.emit({"dag": dag, "finished": status})
    else:
        cli.out.print(Text(f"{dag} is finished: {status}"))


@dag_app.command("show")
def dag_show(dag: DagId, url: Url = None, as_json: AsJson = False) -> None:
    """Show what the owner of its shard says of a DAG, and what is outstanding."""

    async def work() -> dict[str, Any]:
        async with await Client.connect(url) as client:
            return await client.show_dag(dag)

    view = cli.run(work())
    if as_json:
        cli.emit(view)
        return
    outstanding = view.pop("outstanding")
    cli.print_object(view, as_json=False)
    for item in outstanding:
        cli.out.print(Text("outstanding  " + _outstanding(item)))


@dag_app.command("list")
def dag_list(
    released: Annotated[
        str | None, typer.Option(help="confirmed, unconfirmed or nothing_held.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List DAGs, each as its owner proves it."""
    if released not in (None, *_COLOURS):
        raise RefusedError(
            "bad_arguments",
            f"--released: expected one of {', '.join(_COLOURS)}, got {released!r}",
            field="--released",
        )

    async def work() -> list[dict[str, Any]]:
        async with await Client.connect(url) as client:
            return [view async for view in client.list_dags(released=released)]

    found = sorted(cli.run(work()), key=lambda view: str(view["dag"]))
    if as_json:
        cli.emit(found)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("dag", "state", "released", "reason", "outstanding", "held ever"):
        table.add_column(column, no_wrap=True)
    for view in found:
        state = view["finished"] or ("closed" if view["closed"] else "open")
        table.add_row(
            view["dag"],
            Text(state),
            view["released"] or "",
            view["reason"],
            str(view["outstanding_count"]),
            str(view["held_ever"]),
        )
    cli.out.print(table)


@cli.app.command("releases")
def releases(
    dag: Annotated[str | None, typer.Argument(metavar="DAG", help="One DAG's only.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they come.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Tell the verdicts that the server still keeps, one a line; with --follow, as they come."""

    async def work() -> None:
        async with await Client.connect(url) as client:
            await _tell(client, dag, _emitter(as_json=as_json), follow=follow)

    cli.run(work())


async def _tell(
    client: Client, dag: str | None, show: Callable[[Verdict], None], *, follow: bool
) -> None:
    if follow:
        async for verdict in client.releases(dag, from_start=True):
            show(verdict)
        return
    found = await client.releases_so_far(dag)
    for verdict in found:
        show(verdict)
    if dag is not None and not found:
        await client.show_dag(dag)  # raises where there is none


def _emitter(*, as_json: bool) -> Callable[[Verdict], None]:
    return cli.emit if as_json else print_verdict


def print_verdict(verdict: Verdict) -> None:
    """One line: which DAG, what is said of it, and why."""
    line = Text.assemble(f"{verdict.dag}  ", (verdict.released, _COLOURS[verdict.released]))
    if verdict.reason:
        line.append(f": {verdict.reason}")
    if verdict.evidence:
        line.append(f", evidence {verdict.evidence}")
    if verdict.outstanding:
        line.append(f"; {verdict.outstanding} outstanding")
    cli.out.print(line)


def _outstanding(item: dict[str, Any]) -> str:
    evidence = f" ({item['evidence']})" if item["evidence"] else ""
    return f"{item['slot']!r}: {item['sandbox']} {item['phase']}, {item['reason']}{evidence}"
