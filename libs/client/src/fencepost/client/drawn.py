"""
Draws the recorded ledger of one sandbox, or of one DAG: the same picture as of a simulated run.

A ledger tells what was decided, not what was on its way: an order is drawn at the instant of the
entry that it came from, and a receipt from there to the entry that it became.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from fencepost.client import commands, ledger, timeline
from fencepost.client.client import Client
from fencepost.client.timeline import Line
from fencepost.core import ids, invariants
from fencepost.core.dag import entries as d
from fencepost.core.sandbox import entries as e
from fencepost.simulator import drawing
from fencepost.simulator.drawing import Arrow, ArrowTone, Band, BandTone, Lane, Picture, Row, Tone

ROWS_MAX: Final = 400

_TONES: Final[dict[str, Tone]] = {
    "committed": "good",
    "ready": "good",
    "epoch_opened": "opened",
    "attached": "opened",
    "opened": "opened",
    "epoch_closed": "bad",
    "condemned": "bad",
    "receipt_refused": "bad",
    "refused": "bad",
    "indeterminate": "bad",
    "create_failed": "bad",
}
_RECEIPTS: Final = (e.Committed, e.Compensated, e.Revoked, e.Indeterminate, e.ReceiptRefused)
# Evidence that an attempt ended without its receipt: what comes of it later is refused.
_WITHOUT_RECEIPT: Final = ("lost_with_epoch", "carried")
_FACTS: Final = (e.AssignedEntry, e.Attached, e.StopAnsweredEntry, e.GoneEntry, e.StrayFound)


async def picture(client: Client, *, sandbox: str = "", dag: str = "") -> Picture | None:
    """
    Reads and draws the last `ROWS_MAX` entries, and what is wrong with them.

    None where there is none, or only refusals of commands to what never was.
    """
    kept: deque[Line] = deque(maxlen=ROWS_MAX)
    count = 0
    exists = False
    told = timeline.dag_lines(client, dag) if dag else timeline.lines(client, sandbox)
    async for line in told:
        kept.append(line)
        count += 1
        exists = exists or line.kind != "refused"
    if not exists:
        return None
    family = "dag" if dag else "sandbox"
    violations = await _violations(client, family, dag or sandbox)
    return of_lines(
        list(kept),
        name=dag or sandbox,
        is_dag=bool(dag),
        violations=violations,
        before=count - len(kept),
    )


async def write(url: str | None, path: Path, *, sandbox: str = "", dag: str = "") -> str | None:
    """Writes the page; answers a line that says so, or None where the ledger has nothing."""
    async with await Client.connect(url) as client:
        drawn = await picture(client, sandbox=sandbox, dag=dag)
    if drawn is None:
        return None
    again = f"fencepost replay {f'--dag {dag}' if dag else sandbox} --draw {shlex.quote(str(path))}"
    path.write_text(drawing.page(drawn, again=again), encoding="utf-8")
    return f"drawn: {path}: {drawn.notes[0]}"


async def _violations(client: Client, family: str, name: str) -> list[invariants.Violation]:
    """What an audit finds in the whole shard, in which what concerns a name is looked for."""
    shard = ids.shard_of(commands.require_id(family, name), client.shards)
    auditor = invariants.ShardAuditor(family, shard)
    found: list[invariants.Violation] = []
    async for recorded in ledger.batches(client.link, shard, family=family, ledgers=client.ledgers):
        batch = recorded.batch
        entries: Sequence[Any] = recorded.dag_entries if family == "dag" else recorded.entries
        found += auditor.take(
            seq=recorded.seq,
            prev=batch.prev,
            term=batch.term,
            owner=batch.owner,
            now_ms=batch.now_ms,
            entries=entries,
        )
    return found + auditor.finish()


def of_lines(
    lines: Sequence[Line],
    *,
    name: str,
    is_dag: bool = False,
    violations: Iterable[invariants.Violation] = (),
    before: int = 0,
) -> Picture:
    """
    Draws lines of one sandbox or one DAG; `before` of them came earlier and are not drawn.

    Of `violations` those are marked whose batch has one of these lines.
    """
    drawn = _Drawing(lines, name, is_dag=is_dag)
    wrong: dict[int, list[invariants.Violation]] = {}
    for violation in violations:
        wrong.setdefault(violation.seq, []).append(violation)
    for place, line in enumerate(lines):
        drawn.take(line)
        if place + 1 == len(lines) or lines[place + 1].seq != line.seq:
            for violation in wrong.pop(line.seq, ()):
                drawn.violated(line, violation)
    return drawn.picture(before)


class _Drawing:
    def __init__(self, lines: Sequence[Line], name: str, *, is_dag: bool) -> None:
        self.name = name
        self.is_dag = is_dag
        self.lanes: dict[str, Lane] = {}
        self.rows: list[Row] = []
        self.bands: list[Band] = []
        self.arrows: list[Arrow] = []
        self.open: dict[tuple[str, str], tuple[str, BandTone, int, int]] = {}
        self.fenced: dict[str, int] = {}
        self.sandbox_of: dict[str, str] = {}
        self.first = lines[0]
        if not self.is_dag and self.first.epoch and not isinstance(self.first.entry, e.EpochOpened):
            self._begin(name, "epoch", f"epoch {self.first.epoch}", self.first.epoch, row=-1)

    @property
    def row(self) -> int:
        return len(self.rows) - 1

    def take(self, line: Line) -> None:
        owner = f"owner {line.owner}"
        self.lanes.setdefault(owner, Lane(owner, line.owner, "owner"))
        self.rows.append(
            Row(
                at=line.at[11:23],
                lane=owner,
                text=line.text,
                detail=f"{line.at}, batch {line.seq}.{line.index}, term {line.term}: {line.text}",
                tone=_TONES.get(line.kind, "plain"),
            )
        )
        if self._label((owner, "term")) != f"term {line.term}":
            for key in [key for key in self.open if key[1] == "term"]:
                self._end(*key, row=self.row - 1)
            self._begin(owner, "term", f"term {line.term}", line.term)
        if self.is_dag:
            self._take_dag(line.entry)
        else:
            self._take_sandbox(line.entry, owner)

    def violated(self, line: Line, violation: invariants.Violation) -> None:
        text = f"{violation.invariant} violated: {violation.detail}"
        lane = "" if self.is_dag else self._sandbox(self.name)
        self.rows.append(
            Row(at=line.at[11:23], lane=lane, text=text, detail=text, tone="violation")
        )

    def picture(self, before: int) -> Picture:
        for key in list(self.open):
            self._end(*key)
        groups = ("owner", "gateway", "sandbox")
        kind = "DAG" if self.is_dag else "sandbox"
        first, last = self.first.at[:19].replace("T", " "), self.rows[-1].at
        return Picture(
            title=f"The ledger of {kind} {self.name}",
            notes=[f"{len(self.rows)} entries, {first} to {last}."],
            lanes=sorted(self.lanes.values(), key=lambda lane: groups.index(lane.group)),
            rows=self.rows,
            bands=self.bands,
            arrows=self.arrows,
            left_out=f"({before:,} earlier entries are not drawn)" if before else "",
            thin_band="a session, or a DAG's hold on a sandbox",
        )

    # --- lanes and bands ----------------------------------------------------------------------

    def _sandbox(self, name: str) -> str:
        self.lanes.setdefault(name, Lane(name, f"sandbox {name}", "sandbox"))
        return name

    def _gateway(self, name: str) -> str:
        key = f"gateway {name}"
        self.lanes.setdefault(key, Lane(key, name, "gateway"))
        return key

    def _label(self, key: tuple[str, str]) -> str:
        return self.open[key][0] if key in self.open else ""

    def _begin(
        self, lane: str, tone: BandTone, label: str, shade: int = 0, *, row: int | None = None
    ) -> None:
        self._end(lane, tone)
        self.open[lane, tone] = (label, tone, self.row if row is None else row, shade)

    def _end(self, lane: str, tone: str, *, row: int | None = None) -> None:
        found = self.open.pop((lane, tone), None)
        if found is not None:
            label, kind, first, shade = found
            last = max(self.row if row is None else row, first, 0)
            self.bands.append(
                Band(lane=lane, first=first, last=last, label=label, tone=kind, shade=shade)
            )

    def _arrow(self, tone: ArrowTone, start: str, end: str, *, since: int | None = None) -> None:
        self.arrows.append(
            Arrow(
                tone=tone,
                start=(start, self.row if since is None else since),
                end=(end, self.row),
                detail=self.rows[-1].detail,
            )
        )

    # --- what an entry shows ------------------------------------------------------------------

    def _take_sandbox(self, entry: Any, owner: str) -> None:
        lane = self._sandbox(self.name)
        match entry:
            case e.EpochOpened():
                self._begin(lane, "epoch", f"epoch {entry.epoch}", entry.epoch)
            case e.EpochClosed():
                self._end(lane, "epoch")
                self._end(lane, "disk")
            case e.Attached():
                self._begin(lane, "disk", f"session {entry.session}")
            case e.Detached():
                self._end(lane, "disk")
            case e.Requested():
                self._arrow("order", owner, self._gateway(entry.gateway))
            case e.Marking():
                self._arrow("order", owner, self._gateway(entry.gateway))
            case e.Fenced():
                self.fenced[entry.attempt] = self.row
                self._arrow("order", owner, lane)
            case _:
                pass
        if isinstance(entry, e.Compensated) and entry.evidence in _WITHOUT_RECEIPT:
            return
        if isinstance(entry, _RECEIPTS):
            since = self.fenced.get(entry.attempt)
            tone: ArrowTone = "refused" if isinstance(entry, e.ReceiptRefused) else "receipt"
            if since is not None:
                self._arrow(tone, lane, owner, since=since)
        elif isinstance(entry, _FACTS):
            start = self._gateway(entry.gateway) if isinstance(entry, e.Attached) else lane
            self._arrow("fact", start, owner)

    def _take_dag(self, entry: Any) -> None:
        dag = f"dag {self.name}"
        self.lanes.setdefault(dag, Lane(dag, f"DAG {self.name}", "sandbox"))
        match entry:
            case d.Opened():
                self._begin(dag, "dag", "open")
            case d.Closed():
                self._begin(dag, "dag", "closed", 1)
            case d.Answered():
                self._begin(dag, "dag", entry.verdict, self.row)
            case d.Intended():
                self.sandbox_of[entry.acquisition] = self._sandbox(entry.sandbox)
                self._begin(entry.sandbox, "epoch", "wanted")
            case d.Ready() if entry.acquisition in self.sandbox_of:
                sandbox = self.sandbox_of[entry.acquisition]
                self._begin(sandbox, "epoch", "held", 1)
                self._begin(sandbox, "disk", f"held by {entry.acquisition}")
            case d.ReleaseBegun():
                self._begin(self._sandbox(entry.sandbox), "epoch", "let go", 2)
            case d.ReleaseSettled():
                self._end(self._sandbox(entry.sandbox), "epoch")
                self._end(entry.sandbox, "disk")
            case d.Abandoned() if entry.acquisition in self.sandbox_of:
                self._end(self.sandbox_of[entry.acquisition], "epoch")
            case _:
                pass
