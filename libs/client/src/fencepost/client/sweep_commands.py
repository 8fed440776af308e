"""
`fencepost sweep`: what a sweep would do and why, and the switch that stops all sweeping.

A dry run asks the leading sweeper for one census tick; nothing is proposed by it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import typer
from fencepost.client import cli
from fencepost.client.cli import AsJson, Timeout, Url
from fencepost.client.client import Client
from fencepost.contracts import streams, subjects
from fencepost.contracts.messages import SweepReply
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.core.sweeping import Finding, Report
from fencepost.runtime.link import Link
from rich.table import Table
from rich.text import Text

_WOULD = {"census": "would be proposed", "proposed": "proposed"}
"""The other reasons say for themselves why nothing is done."""


@cli.app.command("sweep")
def sweep(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look now, and say what would be done and why.")
    ] = False,
    mode: Annotated[
        Literal["on", "census", "off"] | None,
        typer.Option(help="Switch sweeping in this deployment, from the next tick on."),
    ] = None,
    timeout: Timeout = 60.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Look at what a sweep would do, or switch sweeping on, to a census, or off."""
    if not dry_run and mode is None:
        raise RefusedError(
            "nothing_asked",
            "say --dry-run or --mode: sweepers sweep by themselves",
            expected="--dry-run or --mode on|census|off",
        )

    async def work() -> SweepReply | None:
        async with await Client.connect(url) as client:
            if mode is not None:
                await _switch(client.link, mode)
            return await _census(client.link, timeout) if dry_run else None

    reply = cli.run(work())
    if as_json:
        found: dict[str, Any] = {} if mode is None else {"mode": mode}
        cli.emit(found if reply is None else {**found, "reports": reply.reports})
        return
    if mode is not None:
        cli.out.print(f"sweeping is {mode}")
    if reply is not None:
        _print(reply.reports)


async def _switch(link: Link, mode: str) -> None:
    subject = f"$KV.{streams.BUCKET_META}.{streams.SWEEP_MODE}"
    message = await link.call(subject, mode.encode(), timeout_s=5.0)
    stored = msgspec.json.decode(message.data, type=dict[str, Any])
    if "error" in stored:
        raise UnknownError(f"not switched: {stored['error']}")


async def _census(link: Link, timeout_s: float) -> SweepReply:
    try:
        message = await link.call(subjects.SWEEP, b"", timeout_s=timeout_s)
        reply = msgspec.json.decode(message.data, type=SweepReply)
    except UnknownError as error:
        raise UnknownError(f"no sweeper leads now: {error}") from error
    except msgspec.DecodeError as error:
        raise UnknownError(f"an answer that cannot be read: {error}") from error
    if reply.problem:
        raise UnknownError(reply.problem)
    return reply


def _print(reports: list[Report]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("authority", "reached", "found"):
        table.add_column(heading, justify="right" if heading == "reached" else "left")
    for report in reports:
        counts = ", ".join(f"{count} {_said(why)}" for why, count in sorted(report.counts.items()))
        table.add_row(
            report.authority,
            str(report.reached),
            f"nothing is concluded: {report.refused}" if report.refused else counts or "nothing",
        )
    cli.out.print(table)
    for report in reports:
        for finding in report.findings:
            cli.out.print(Text(_line(finding)))


def _said(why: str) -> str:
    return _WOULD.get(why, why.replace("_", " "))


def _line(finding: Finding) -> str:
    if finding.ref is not None:
        thing = f"{finding.ref.provider} {finding.ref.native_id} ({finding.ref.instance})"
        text = f"{finding.sandbox or '?'}: {thing}"
    else:
        text = f"{finding.sandbox}: held by {finding.dag} as {finding.acquisition}"
    age = f", seen for {finding.age_ms / 1000:g} s" if finding.age_ms else ""
    evidence = f", {finding.evidence}" if finding.evidence else ""
    return f"{text}: {_said(finding.why)}{evidence}{age}"
