"""
Draws a history as one SVG, or as one HTML page around it: rows are what happened, in order, and
columns are who it happened to.

Knows nothing of sandboxes or seeds: `pictures` makes a `Picture` of a simulator's trace, and the
command line one of a recorded ledger. Nothing is fetched, and nothing runs in the page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from html import escape
from typing import Final, Literal

import msgspec

Tone = Literal["plain", "good", "bad", "fault", "violation", "quiet", "opened"]
BandTone = Literal["epoch", "term", "down", "disk", "dag"]
ArrowTone = Literal["command", "order", "receipt", "fact", "refused", "lost"]

ROW: Final = 20
TIME: Final = 96
LANE: Final = 118
LANE_MARK: Final = 86
TEXT: Final = 700
HEAD: Final = 34
FOOT: Final = 12
LETTER: Final = 6.63
TEXT_LETTERS: Final = int(TEXT / LETTER) - 2
TITLE_LETTERS: Final = 15


class Lane(msgspec.Struct, frozen=True):
    """One column. `group` colours its title: who decides, who acts, what it happens to."""

    key: str
    title: str
    group: Literal["client", "owner", "gateway", "sandbox"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. `detail` is shown where the pointer rests; `lane` may be empty."""

    at: str
    lane: str
    text: str
    detail: str
    tone: Tone = "plain"


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """
    What was so in a lane from the row `first` to the row `last`.

    `part` of `parts` are columns beside each other within the lane. `shade` tells neighbours apart.
    """

    lane: str
    first: int
    last: int
    label: str
    tone: BandTone
    shade: int = 0
    part: int = 0
    parts: int = 1


class Arrow(msgspec.Struct, frozen=True, kw_only=True):
    """Something that went from one lane's row to another's; a lost one ends on its way."""

    tone: ArrowTone
    start: tuple[str, int]
    end: tuple[str, int]
    detail: str


class Picture(msgspec.Struct, kw_only=True):
    """`notes` are the lines under the title, `thin_band` is what the thin green ones are."""

    title: str
    notes: list[str]
    lanes: list[Lane]
    rows: list[Row]
    bands: list[Band]
    arrows: list[Arrow]
    left_out: str = ""
    thin_band: str = "an instance that really runs"


_STYLE: Final = """
.fp{--paper:#fff;--ink:#1c2430;--dim:#6a7482;--rule:#e3e7ec;--good:#13795b;--bad:#c02b2b;
--fault:#a85b00;--open:#1f5fbf;--order:#3566c8;--receipt:#13795b;--fact:#8a5fb8;--client:#6a7482;
--band0:#1f77d022;--band1:#e08a0026;--band2:#7a4fc922;--term0:#8893a122;--term1:#8893a13d;
--down:#c02b2b30;--disk:#13795b;--alarm:#c02b2b1c;--stripe:#8893a10d;--hover:#f5c54230}
@media (prefers-color-scheme:dark){.fp{--paper:#12161c;--ink:#dde3ea;--dim:#8d98a6;--rule:#262d37;
--good:#4fc79b;--bad:#ff7b72;--fault:#f0a04b;--open:#79b0ff;--order:#79a5ff;--receipt:#4fc79b;
--fact:#c39bf0;--client:#8d98a6;--band0:#4f9cf02b;--band1:#e0a03a2e;--band2:#a684f02b;
--term0:#8d98a622;--term1:#8d98a63d;--down:#ff7b7238;--disk:#4fc79b;--alarm:#ff7b7224;
--stripe:#8d98a60d;--hover:#f5c54226}}
.fp text{font:11px "DejaVu Sans Mono",ui-monospace,Menlo,Consolas,monospace;fill:var(--ink)}
.fp .at,.fp .row .at,.fp .quiet text{fill:var(--dim);font-weight:400}
.fp .good text{fill:var(--good)}
.fp .bad text{fill:var(--bad)}.fp .fault text{fill:var(--fault)}
.fp .opened text{fill:var(--open)}.fp .violation text{fill:var(--bad);font-weight:700}
.fp .row .hit{fill:transparent}.fp .row:hover .hit{fill:var(--hover)}
.fp .mark{fill:var(--ink);stroke:var(--paper);stroke-width:1.5}
.fp .good .mark{fill:var(--good)}.fp .bad .mark{fill:var(--bad)}.fp .fault .mark{fill:var(--fault)}
.fp .violation .mark{fill:var(--bad)}
.fp .opened .mark{fill:var(--open)}.fp .quiet .mark{fill:var(--dim)}
.fp .alarm{fill:var(--alarm)}.fp .alarm-line{stroke:var(--bad);stroke-width:1.5}
.fp .band text{fill:var(--dim);font-size:10px}.fp .rail{stroke:var(--rule)}
.fp .epoch0{fill:var(--band0)}.fp .epoch1{fill:var(--band1)}.fp .epoch2{fill:var(--band2)}
.fp .term0,.fp .dag0{fill:var(--term0)}.fp .term1,.fp .dag1{fill:var(--term1)}
.fp .term2,.fp .dag2{fill:var(--term0)}
.fp .down0,.fp .down1,.fp .down2{fill:url(#down)}.fp .stripes{stroke:var(--down);stroke-width:3}
.fp .disk0,.fp .disk1,.fp .disk2{fill:var(--disk)}
.fp .arrow{fill:none;stroke-width:1.3}.fp .arrow:hover{stroke-width:3}
.fp .wide{fill:none;stroke:transparent;stroke-width:9}
.fp .a-command{stroke:var(--client)}.fp .a-order{stroke:var(--order)}
.fp .a-receipt{stroke:var(--receipt)}.fp .a-fact{stroke:var(--fact);stroke-dasharray:2 3}
.fp .a-refused{stroke:var(--bad)}.fp .a-lost{stroke:var(--bad);stroke-dasharray:4 3}
.fp .h-command{fill:var(--client)}.fp .h-order{fill:var(--order)}.fp .h-receipt{fill:var(--receipt)}
.fp .h-fact{fill:var(--fact)}.fp .h-refused,.fp .h-lost{fill:var(--bad)}
.fp .title{font-weight:700}.fp .g-sandbox{fill:var(--open)}.fp .g-client{fill:var(--dim)}
.fp .paper{fill:var(--paper)}.fp .rule{stroke:var(--rule)}
"""

_PAGE_STYLE: Final = """
body.fp{margin:0;background:var(--paper);color:var(--ink);font:14px/1.45 system-ui,sans-serif}
.fp header,.fp footer{padding:16px 20px;max-width:1000px}.fp h1{font-size:19px;margin:0 0 6px}
.fp p{margin:2px 0;overflow-wrap:anywhere}.fp .broken{color:var(--bad);font-weight:700}
.fp .heads{position:sticky;top:0;z-index:1;background:var(--paper);width:max-content}
.fp .heads svg,.fp main svg{display:block}.fp main{width:max-content}
.fp .legend{color:var(--dim);font-size:12px}.fp .legend b{font-weight:600}
.fp .k-command{color:var(--client)}.fp .k-order{color:var(--order)}.fp .k-receipt{color:var(--good)}
.fp .k-fact{color:var(--fact)}.fp .k-bad{color:var(--bad)}.fp .k-fault{color:var(--fault)}
.fp code{font:12px "DejaVu Sans Mono",ui-monospace,monospace}
"""


class _Drawn:
    """Where things stand: x of lanes, y of rows."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        used = {row.lane for row in picture.rows} | {band.lane for band in picture.bands}
        used |= {end for arrow in picture.arrows for end in (arrow.start[0], arrow.end[0])}
        self.lanes = [lane for lane in picture.lanes if lane.key in used]
        self.x = {lane.key: TIME + LANE * place for place, lane in enumerate(self.lanes)}
        self.text_x = TIME + LANE * len(self.lanes) + 14
        self.width = self.text_x + TEXT
        self.lines = [_lines_of(row) for row in picture.rows]
        self.y: list[int] = []
        y = ROW if picture.left_out else 0
        for lines in self.lines:
            self.y.append(y)
            y += ROW * len(lines)
        self.height = y + FOOT

    def bottom(self, row: int) -> int:
        return self.y[row] + ROW * len(self.lines[row])


def _lines_of(row: Row) -> list[str]:
    """A violation is never cut; anything else is, and is whole where the pointer rests."""
    if row.tone == "violation":
        return textwrap.wrap(row.text, TEXT_LETTERS) or [""]
    if len(row.text) <= TEXT_LETTERS:
        return [row.text]
    return [row.text[: TEXT_LETTERS - 1] + "…"]


def svg(picture: Picture) -> str:
    """The whole picture as one SVG, for a page that shows it as an image."""
    drawn = _Drawn(picture)
    height = HEAD + drawn.height
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="fp" width="{drawn.width}" '
            f'height="{height}" viewBox="0 0 {drawn.width} {height}" role="img">'
        ),
        f"<title>{escape(picture.title)}</title><style>{_STYLE}</style>",
        f'<rect class="paper" width="{drawn.width}" height="{height}"/>',
        *_heads(drawn),
        f'<g transform="translate(0 {HEAD})">',
        *_body(drawn),
        "</g></svg>",
    ]
    return "\n".join(parts) + "\n"


def page(picture: Picture, *, again: str = "") -> str:
    """One HTML page that stands alone; `again` is the command that has this history again."""
    drawn = _Drawn(picture)
    broken = [row.text for row in picture.rows if row.tone == "violation"]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            (
                '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
                f'content="light dark"><title>{escape(picture.title)}</title>'
            ),
            f"<style>{_STYLE}{_PAGE_STYLE}</style></head>",
            f'<body class="fp"><header><h1>{escape(picture.title)}</h1>',
            *(
                f'<p class="broken"><a href="#violated" class="broken">{escape(text)}</a></p>'
                for text in broken[:1]
            ),
            *(f"<p>{escape(note)}</p>" for note in picture.notes),
            _LEGEND.replace("{thin}", escape(picture.thin_band)),
            "</header>",
            f'<div class="heads"><svg width="{drawn.width}" height="{HEAD}">',
            *_heads(drawn),
            f'</svg></div><main><svg width="{drawn.width}" height="{drawn.height}">',
            *_body(drawn),
            "</svg></main>",
            f"<footer><p>Again: <code>{escape(again)}</code></p></footer>" if again else "",
            "</body></html>\n",
        ]
    )


_LEGEND: Final = (
    '<p class="legend">Down the page is later. <b class="k-command">grey</b> command, '
    '<b class="k-order">blue</b> order, <b class="k-receipt">green</b> receipt, '
    '<b class="k-fact">dotted</b> fact, <b class="k-bad">red</b> refused or lost, '
    '<b class="k-fault">◆</b> fault. A wide band is an epoch as the ledger has it, a thin green '
    "one {thin}, a grey one a term, a hatched one a process that is down. "
    "Rest the pointer on a row or an arrow to read all of it.</p>"
)


def _heads(drawn: _Drawn) -> Iterator[str]:
    yield f'<text class="at" x="{TIME - 10}" y="21" text-anchor="end">time</text>'
    for lane in drawn.lanes:
        title = lane.title
        if len(title) > TITLE_LETTERS:
            # Names that a machine made differ at their ends.
            title = f"{title[: TITLE_LETTERS - 7]}…{title[-6:]}"
        x = drawn.x[lane.key] + 4
        yield (
            f'<text class="title g-{lane.group}" x="{x}" y="21">{escape(title)}'
            f"<title>{escape(lane.title)}</title></text>"
        )
    yield f'<text class="at" x="{drawn.text_x}" y="21">what happened</text>'
    yield f'<line class="rule" x1="0" x2="{drawn.width}" y1="{HEAD - 1}" y2="{HEAD - 1}"/>'


def _body(drawn: _Drawn) -> Iterator[str]:
    yield "<defs>"
    yield (
        '<pattern id="down" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line class="stripes" y2="7"/></pattern>'
    )
    for tone in ("command", "order", "receipt", "fact", "refused", "lost"):
        yield (
            f'<marker id="to-{tone}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path class="h-{tone}" '
            'd="M0 0L8 4L0 8z"/></marker>'
        )
    yield "</defs>"
    for lane in drawn.lanes:
        x = drawn.x[lane.key]
        yield f'<line class="rail" x1="{x}" x2="{x}" y1="0" y2="{drawn.height}"/>'
    if drawn.picture.left_out:
        yield (
            f'<g class="quiet"><text x="{drawn.text_x}" y="14">{escape(drawn.picture.left_out)}'
            "</text></g>"
        )
    for band in drawn.picture.bands:
        yield from _band(drawn, band)
    for number, row in enumerate(drawn.picture.rows):
        if row.tone == "violation":
            y, bottom = drawn.y[number], drawn.bottom(number)
            yield f'<rect class="alarm" y="{y}" width="{drawn.width}" height="{bottom - y}"/>'
            yield f'<line class="alarm-line" x2="{drawn.width}" y1="{y}" y2="{y}"/>'
    last_at = ""
    for number, row in enumerate(drawn.picture.rows):
        yield from _row(drawn, number, row, "" if row.at == last_at else row.at)
        last_at = row.at
    for arrow in drawn.picture.arrows:
        yield from _arrow(drawn, arrow)


def _band(drawn: _Drawn, band: Band) -> Iterator[str]:
    if band.lane not in drawn.x:
        return
    left = drawn.x[band.lane]
    top = drawn.y[band.first] if band.first >= 0 else 0
    height = drawn.bottom(band.last) - top
    if band.tone == "disk":
        x, width = left + LANE - 9, 5
    elif band.tone in ("term", "down"):
        room = LANE_MARK - 14
        width = room // band.parts
        x = left + 2 + width * band.part
    else:
        x, width = left + 2, LANE - 14
    shade = band.shade % 3
    yield f'<g class="band"><rect class="{band.tone}{shade}" x="{x}" y="{top + 1}" '
    yield f'width="{width - 1}" height="{max(height - 2, 4)}" rx="3">'
    yield f"<title>{escape(band.label)}</title></rect>"
    if band.tone != "disk" and len(band.label) * 6.1 <= width:
        yield f'<text x="{x + 3}" y="{top + 14}">{escape(band.label)}</text>'
    yield "</g>"


def _row(drawn: _Drawn, number: int, row: Row, at: str) -> Iterator[str]:
    y = drawn.y[number]
    anchor = ' id="violated"' if row.tone == "violation" else ""
    yield f'<g class="row {row.tone}"{anchor}><title>{escape(row.detail)}</title>'
    yield (f'<rect class="hit" y="{y}" width="{drawn.width}" height="{drawn.bottom(number) - y}"/>')
    if at:
        yield f'<text class="at" x="{TIME - 10}" y="{y + 14}" text-anchor="end">{escape(at)}</text>'
    if row.lane in drawn.x:
        x, middle = drawn.x[row.lane] + LANE_MARK, y + ROW // 2
        if row.tone in ("fault", "violation"):
            yield f'<path class="mark" d="M{x} {middle - 6}l6 6l-6 6l-6-6z"/>'
        else:
            yield f'<circle class="mark" cx="{x}" cy="{middle}" r="4.5"/>'
    for place, words in enumerate(drawn.lines[number]):
        yield f'<text x="{drawn.text_x}" y="{y + 14 + ROW * place}">{escape(words)}</text>'
    yield "</g>"


def _arrow(drawn: _Drawn, arrow: Arrow) -> Iterator[str]:
    (lane, row), (end_lane, end_row) = arrow.start, arrow.end
    if lane not in drawn.x or end_lane not in drawn.x:
        return
    x1, y1 = _place(drawn, lane, row)
    x2, y2 = _place(drawn, end_lane, end_row)
    length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1)
    gap = 7 / length
    x1, y1, x2, y2 = (
        x1 + (x2 - x1) * gap,
        y1 + (y2 - y1) * gap,
        x2 - (x2 - x1) * gap,
        y2 - (y2 - y1) * gap,
    )
    if arrow.tone == "lost":
        x2, y2 = x1 + (x2 - x1) * 0.55, y1 + (y2 - y1) * 0.55
    line = f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"
    yield f"<g><title>{escape(arrow.detail)}</title>"
    yield f'<path class="wide" d="{line}"/>'
    head = "" if arrow.tone == "lost" else f' marker-end="url(#to-{arrow.tone})"'
    yield f'<path class="arrow a-{arrow.tone}" d="{line}"{head}/>'
    if arrow.tone == "lost":
        cross = f"M{x2 - 4:.1f} {y2 - 4:.1f}l8 8m0-8l-8 8"
        yield f'<path class="arrow a-refused" d="{cross}"/>'
    yield "</g>"


def _place(drawn: _Drawn, lane: str, row: int) -> tuple[float, float]:
    y = drawn.y[row] + ROW // 2 if row >= 0 else ROW // 2
    return float(drawn.x[lane] + LANE_MARK), float(y)
