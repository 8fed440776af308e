"""
Makes a picture of a trace: lanes, epochs, terms, what was sent and what came of it.

Reads only what a run told of itself. A picture is bounded: around the violation, and without the
events of sandboxes that the violation is not about.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from fencepost.simulator import trace
from fencepost.simulator.drawing import Arrow, ArrowTone, Band, BandTone, Lane, Picture, Row, Tone
from fencepost.simulator.trace import Told

ROWS_MAX: Final = 120
ROWS_AFTER: Final = 12
CLIENTS: Final = "clients"

_WORD: Final = re.compile(r"[A-Za-z0-9_.@~-]+")

_LEDGER_TONES: Final[dict[str, Tone]] = {
    "committed": "good",
    "epoch_opened": "opened",
    "attached": "opened",
    "opened": "opened",
    "ready": "good",
    "answered": "good",
    "term_opened": "opened",
    "epoch_closed": "bad",
    "condemned": "bad",
    "receipt_refused": "bad",
    "refused": "bad",
    "indeterminate": "bad",
}
_TONES: Final[dict[str, Tone]] = {
    "fault": "fault",
    "VIOLATED": "violation",
    "raised": "bad",
    "session": "quiet",
    "phase": "quiet",
    "effect": "quiet",
    "fact": "quiet",
    "continued": "quiet",
    "owned": "opened",
    "marked": "opened",
    "killed": "bad",
    "paused": "bad",
    "crash": "bad",
    "vanishes": "bad",
    "restarts": "bad",
    "restored": "bad",
    "swapped": "bad",
    "rolled": "bad",
    "hold ends": "bad",
    "lease over": "bad",
    "parted": "bad",
    "suspended": "bad",
    "swept": "quiet",
}
# What a command, a fact and a receipt become in the ledger, and what an order does where it comes.
_OF_COMMAND: Final = {
    "step": ("fenced", "parked"),
    "create": ("created",),
    "cancel": ("cancelled",),
    "resolve": ("resolved",),
    "release": ("unclaimed", "releasing"),
}
_OF_FACT: Final = {
    "Assigned": ("assigned",),
    "CreateFailed": ("create_failed",),
    "Found": ("epoch_opened", "marking", "condemned"),
    "Marked": ("attached",),
    "Lost": ("detached", "epoch_closed", "condemned"),
    "AttachFailed": ("epoch_closed", "condemned"),
    "StopAnswered": ("stop_answered",),
    "Gone": ("gone", "stray_gone"),
}
_DAG_BANDS: Final = {"opened": "open", "closed": "closed", "answered": ""}
_OF_RECEIPT: Final = (
    "committed",
    "compensated",
    "indeterminate",
    "revoked",
    "receipt_refused",
)
# Evidence that an attempt ended without its receipt: what comes of it later is refused.
_WITHOUT_RECEIPT: Final = ("lost_with_epoch", "carried")
_INSTANCE_KINDS: Final = frozenset(
    {"vanishes", "restarts", "restored", "swapped", "stopping", "wrote", "receipt", "marked"}
)
_OWNERS: Final = {"p": "planner", "t": "tracker", "sw": "sweeper"}


def of_trace(
    lines: Sequence[str], *, title: str, notes: Sequence[str] = (), rows_max: int = ROWS_MAX
) -> Picture:
    """Draws at most `rows_max` events: those up to the violation, or the first ones."""
    told = trace.read_all(lines)
    names = _Names(told)
    shown, left_out = _shown(told, names, rows_max)
    drawing = _Drawing(told, names, shown)
    for place in range(len(told)):
        drawing.take(place)
    return Picture(
        title=title,
        notes=list(notes),
        lanes=names.lanes(names.violated(told), names.violated_dags(told)),
        rows=drawing.rows,
        bands=drawing.bands_at_the_end(),
        arrows=drawing.arrows,
        left_out=left_out,
    )


def relevant(lines: Sequence[str]) -> list[str]:
    """The lines without those of sandboxes and steps that the violation is not about."""
    told = trace.read_all(lines)
    return [lines[place] for place in _about(told, _Names(told))]


def _about(told: Sequence[Told], names: _Names) -> list[int]:
    """The places of what the violation may have come from: all, where it names nobody."""
    sandboxes = names.violated(told)
    steps = names.violated_steps(told)
    dags = names.violated_dags(told)
    return [
        place
        for place, one in enumerate(told)
        if (not sandboxes or names.sandbox_of(one) in (None, *sandboxes))
        and (not steps or names.step_of(one) in (None, *steps))
        and (not dags or names.dag_of(one) in (None, *dags))
        # A sweep that proposed nothing changed nothing.
        and (not sandboxes or one.kind != "swept" or "proposed" in one.text)
    ]


def _shown(told: Sequence[Told], names: _Names, rows_max: int) -> tuple[frozenset[int], str]:
    places = _about(told, names)
    others = len(told) - len(places)
    broken = next((n for n, place in enumerate(places) if told[place].kind == "VIOLATED"), None)
    # What stands after a violation is what its own event still did: a little of that is enough.
    last = min(rows_max, len(places)) if broken is None else broken + 1 + ROWS_AFTER
    shown = places[max(0, last - rows_max) : last]
    said = [
        f"{count:,} {what}"
        for count, what in (
            (others, "events of other sandboxes and steps"),
            (max(0, last - rows_max), "earlier events"),
            (max(0, len(places) - last), "later events"),
        )
        if count
    ]
    return frozenset(shown), f"({' and '.join(said)} are not drawn)" if said else ""


class _Names:
    """Who is who in a trace: which sandbox an instance, a create or a step belongs to."""

    def __init__(self, told: Sequence[Told]) -> None:
        self.sandboxes: dict[str, None] = {}
        self.dags: dict[str, dict[str, None]] = {}
        self.owners: dict[str, None] = {}
        self.gateways: dict[str, None] = {}
        self.of_create: dict[str, str] = {}
        self.of_instance: dict[str, str] = {}
        self.of_step: dict[str, str] = {}
        self._of_native: dict[str, str] = {}
        for one in told:
            self._learn(one)

    def _learn(self, one: Told) -> None:
        words = one.words
        match one.kind:
            case "command" if words[0] == "dag":
                self.dags.setdefault(words[1], {})
            case "command" | "fact":
                self.sandboxes[words[1]] = None
            case "owned" | "swept":
                self.owners[words[0]] = None
            case "session":
                self.gateways[words[0].rpartition("-")[0]] = None
            case "boots":
                # A native id may be given again: whose it is, is known by its boot alone.
                sandbox = self.of_create.get(words[-1], words[-1])
                self._of_native[_native(words[0])] = self.of_instance[words[0]] = sandbox
            case "restarts":
                self.of_instance[words[0]] = self._of_native.get(_native(words[0]), "")
            case "ledger":
                self._learn_entry(one)
            case _:
                pass

    def _learn_entry(self, one: Told) -> None:
        named = one.named
        if one.words[1] == "term_opened":
            self.owners[named.get("owner", "")] = None
        sandbox, dag = named.get("sandbox"), named.get("dag")
        if dag is not None:
            held = self.dags.setdefault(dag, {})
            if sandbox is not None:
                held[sandbox] = None
        if sandbox is not None:
            self.sandboxes[sandbox] = None
            if "create_id" in named:
                self.of_create[named["create_id"]] = sandbox
            if "step" in named:
                self.of_step[named["step"]] = sandbox

    def sandbox_of(self, one: Told) -> str | None:
        """Whose event it is; None when it is nobody's in particular."""
        words = one.words
        match one.kind:
            case "command" if words[0] == "dag":
                return None
            case "command" | "fact":
                return words[1]
            case "ledger":
                return one.named.get("sandbox")
            case "outside":
                return self.of_step.get(words[0])
            case "effect":
                return next((part for part in words[2].split("/") if part in self.sandboxes), None)
            case "swept" | "raised" | "phase" | "fault" | "VIOLATED":
                return None
            case _:
                # An instance `n1.b1`, or a toolhost on one, `th1@n1.b1`.
                return self.of_instance.get(words[0].rpartition("@")[2])

    def dag_of(self, one: Told) -> str | None:
        """Whose DAG's event it is; None when it is none's."""
        if one.kind == "command" and one.words[0] == "dag":
            return one.words[1]
        return one.named.get("dag") if one.kind == "ledger" else None

    def step_of(self, one: Told) -> str | None:
        """Whose step's event it is; None when it is no step's."""
        words = one.words
        name = ""
        match one.kind:
            case "command":
                name = words[2]
            case "ledger":
                name = one.named.get("step", "")
            case "effect" if words[1] == "Dispatch":
                name = words[2].partition("/")[0].rpartition(".")[0]
            case "outside":
                name = words[0]
            case "wrote":
                name = words[1]
            case "receipt":
                name = words[1].rpartition(".")[0]
            case _:
                pass
        return name if name in self.of_step else None

    def violated_steps(self, told: Iterable[Told]) -> frozenset[str]:
        """The steps that violations name, by themselves or by an attempt."""
        return frozenset(
            name
            for one in told
            if one.kind == "VIOLATED"
            for word in _WORD.findall(one.text)
            for name in (word, word.rpartition(".")[0])
            if name in self.of_step
        )

    def violated_dags(self, told: Iterable[Told]) -> frozenset[str]:
        return frozenset(
            word
            for one in told
            if one.kind == "VIOLATED"
            for word in _WORD.findall(one.text)
            if word in self.dags
        )

    def violated(self, told: Sequence[Told]) -> frozenset[str]:
        """
        The sandboxes that violations name, by themselves, a step, an instance or a disk; of a DAG
        those that it ever had to do with.
        """
        found = {held for dag in self.violated_dags(told) for held in self.dags[dag]}
        for one in told:
            if one.kind == "VIOLATED":
                for word in _WORD.findall(one.text):
                    name = word if word in self.sandboxes else self.of_step.get(word)
                    found.add(name or self._of_thing(word) or "")
        return frozenset(found - {""})

    def _of_thing(self, word: str) -> str | None:
        if word.startswith("disk-"):
            return self._of_native.get(word.removeprefix("disk-"))
        return self.of_instance.get(word)

    def lane_of(self, one: Told, owner: str) -> str:
        """Whose column an event stands in; `owner` is who appends to its shard."""
        match one.kind:
            case "command":
                return CLIENTS
            case "ledger":
                return owner
            case "effect" | "owned" | "hold ends" | "swept":
                return one.words[0]
            case "session" | "lease over":
                return one.words[0].rpartition("-")[0]
            case "fact":
                gateway = one.named.get("session", "").rpartition("-")[0]
                return gateway if gateway in self.gateways else one.words[1]
            case "VIOLATED":
                about = self.violated([one])
                dags = self.violated_dags([one])
                if len(dags) == 1:
                    return f"dag {next(iter(dags))}"
                return next(iter(about)) if len(about) == 1 else ""
            case _:
                name = one.words[0]
                if name in self.owners or name in self.gateways:
                    return name
                return self.sandbox_of(one) or ""

    def lanes(self, about: Collection[str] = (), dags: Collection[str] = ()) -> list[Lane]:
        """All columns; of sandboxes and DAGs those in `about` and `dags`, where these name any."""
        return [
            Lane(CLIENTS, "clients", "client"),
            *(Lane(name, _title(name), "owner") for name in sorted(self.owners)),
            *(Lane(name, f"gateway {name}", "gateway") for name in sorted(self.gateways)),
            *(Lane(f"dag {name}", f"DAG {name}", "sandbox") for name in sorted(dags or self.dags)),
            *(Lane(name, f"sandbox {name}", "sandbox") for name in sorted(about or self.sandboxes)),
        ]


def _title(owner: str) -> str:
    kind = _OWNERS.get(owner.rstrip("0123456789"))
    return f"{kind} {owner}" if kind else owner


def _native(instance: str) -> str:
    """The native id of `n1.b2`, and of `n1.b2~other` with its authority: that is another thing."""
    name, at, authority = instance.partition("~")
    return name.partition(".")[0] + at + authority


class _Open:
    """A band that has begun."""

    def __init__(self, band: tuple[str, str, BandTone], first: int, shade: int) -> None:
        self.lane, self.label, self.tone = band
        self.first = first
        self.shade = shade


class _Sent:
    """Something on its way: a row of a lane, and what it will be when it comes."""

    def __init__(self, tone: ArrowTone, lane: str, row: int, told: Told) -> None:
        self.tone: ArrowTone = tone
        self.lane = lane
        self.row = row
        self.told = told


class _Drawing:
    """Goes through a trace once, and draws the part that is shown."""

    def __init__(self, told: Sequence[Told], names: _Names, shown: frozenset[int]) -> None:
        self.told = told
        self.names = names
        self.shown = shown
        self.rows: list[Row] = []
        self.bands: list[Band] = []
        self.arrows: list[Arrow] = []
        self._ended = False
        self._owner_of: dict[str, str] = {}
        self._open: dict[tuple[str, ...], _Open] = {}
        self._sent: dict[tuple[str, ...], list[_Sent]] = {}
        self._last_receipt: _Sent | None = None
        self._last_effect: _Sent | None = None
        self._shards: dict[str, dict[str, None]] = {}

    def take(self, place: int) -> None:
        one = self.told[place]
        if place in self.shown:
            lane = self._lane_of(place)
            self.rows.append(
                Row(
                    at=f"{one.at_ms:,} ms",
                    lane=lane,
                    text=_text(one),
                    detail=f"{one.at_ms:,} ms, event {one.number}: {one.kind} {one.text}",
                    tone=_tone(one),
                )
            )
            # What comes after the window is neither drawn nor ends anything in it.
            self._ended = place == max(self.shown)
            self._take(one, lane, len(self.rows) - 1)
        elif not self.rows:
            self._take(one, self._lane_of(place), -1)
        elif not self._ended:
            self._take(one, "", len(self.rows) - 1)

    def bands_at_the_end(self) -> list[Band]:
        for key in list(self._open):
            self._close(key, len(self.rows) - 1)
        shards = {lane: sorted(of) for lane, of in self._shards.items()}
        return [
            band if band.tone != "term" else _beside(band, shards[band.lane])
            for band in self.bands
            if band.last >= 0
        ]

    def _lane_of(self, place: int) -> str:
        one = self.told[place]
        if one.kind == "fault":
            return self._lane_of_fault(place)
        owner = ""
        if one.kind == "ledger":
            owner = self._owner_of.get(_shard(one), one.named.get("owner", ""))
            if one.words[1] == "term_opened":
                owner = one.named.get("owner", owner)
        return self.names.lane_of(one, owner)

    def _lane_of_fault(self, place: int) -> str:
        """Whom it strikes: what the same event did next, or what it had done before."""
        one = self.told[place]
        for other in (place + 1, place - 1):
            if 0 <= other < len(self.told):
                near = self.told[other]
                if near.number == one.number and near.kind not in ("fault", "VIOLATED"):
                    return self._lane_of(other)
        if one.text.startswith("receipt_") and self._last_receipt is not None:
            return self._last_receipt.lane
        return CLIENTS if one.text.startswith(("command_", "step_")) else ""

    # --- what an event begins and ends --------------------------------------------------------

    def _take(self, one: Told, lane: str, row: int) -> None:
        words = one.words
        match one.kind:
            case "command":
                self._send("command", ("command", words[0], words[2]), lane, row, one)
            case "ledger":
                self._take_entry(one, lane, row)
            case "effect":
                self._last_effect = self._send("order", ("order", _order(one)), lane, row, one)
            case "fact":
                self._arrived(("order", f"attach/{words[1]}"), lane, row)
                self._send("fact", ("fact", words[1]), lane, row, one)
            case "fault":
                self._take_fault(one)
            case "owned":
                shard = words[2]
                self._shards.setdefault(words[0], {})[shard] = None
                label = f"{words[1][0]}{shard} t{words[-1]}"
                self._begin(("term", words[0], shard), (words[0], label, "term"), row, words[-1])
                self._close(("down", words[0]), row)
            case "hold ends":
                self._close(("term", words[0], words[2]), row)
            case "swept":
                self._close(("down", words[0]), row)
            case "killed" | "paused":
                self._take_down(one.kind, words[0], row)
            case "continued" | "session":
                name = words[0] if one.kind == "continued" else words[0].rpartition("-")[0]
                self._close(("down", name), row)
            case _:
                self._take_disk(one, lane, row)

    def _take_down(self, kind: str, name: str, row: int) -> None:
        if name not in self.names.owners and name not in self.names.gateways:
            return
        if kind == "killed":
            for key in [k for k in self._open if k[0] == "term" and k[1] == name]:
                self._close(key, row)
        self._begin(("down", name), (name, "down" if kind == "killed" else "paused", "down"), row)

    def _take_disk(self, one: Told, lane: str, row: int) -> None:
        words = one.words
        sandbox = self.names.sandbox_of(one) or ""
        match one.kind:
            case "boots":
                self._arrived(("order", f"create/{words[-1]}"), lane, row)
                self._begin(("disk", _native(words[0])), (sandbox, words[0], "disk"), row)
            case "restarts":
                self._begin(("disk", _native(words[0])), (sandbox, words[0], "disk"), row)
            case "vanishes":
                self._close(("disk", _native(words[0])), row)
            case "stopping":
                self._arrived(("order", f"stop/{sandbox}"), lane, row)
            case "marked":
                self._arrived(("order", f"mark/{words[-1]}"), lane, row)
            case "wrote" | "outside":
                self._arrived(("order", words[-3] if one.kind == "wrote" else words[0]), lane, row)
            case "receipt":
                attempt = words[1]
                self._arrived(("order", attempt.rpartition(".")[0]), lane, row)
                self._last_receipt = self._send("receipt", ("receipt", attempt), lane, row, one)
            case _:
                pass

    def _take_fault(self, one: Told) -> None:
        lost = {"receipt_lost": self._last_receipt, "dispatch_lost": self._last_effect}
        sent = lost.get(one.text)
        if sent is None:
            return
        for waiting in self._sent.values():
            if sent in waiting:
                waiting.remove(sent)
        lanes = [lane.key for lane in self.names.lanes()]
        toward = sent.told.named.get("session", "")
        if one.text == "dispatch_lost":
            toward = sent.told.words[-1].rpartition("-")[0]
        else:
            toward = next((owner for owner in lanes if owner in self.names.owners), "")
        if sent.row >= 0 and sent.lane and toward:
            self.arrows.append(
                Arrow(
                    tone="lost",
                    start=(sent.lane, sent.row),
                    end=(toward, sent.row),
                    detail=f"lost: {sent.told.kind} {sent.told.text}",
                )
            )

    def _take_entry(self, one: Told, lane: str, row: int) -> None:
        kind, named = one.words[1], one.named
        sandbox, step = named.get("sandbox", ""), named.get("step", "")
        if kind == "term_opened":
            self._owner_of[_shard(one)] = named.get("owner", "")
        if _shard(one).startswith("dag"):
            self._take_dag_entry(kind, named, lane, row)
            return
        if kind == "epoch_opened":
            epoch = named.get("epoch", "?")
            self._begin(("epoch", sandbox), (sandbox, f"epoch {epoch}", "epoch"), row, epoch)
        elif kind in ("epoch_closed", "gone"):
            self._close(("epoch", sandbox), row)
        for command, kinds in _OF_COMMAND.items():
            if kind in kinds:
                ids = (step,) if step else (f"c-{sandbox}", f"r-{sandbox}")
                for id_ in ids:
                    self._arrived(("command", command, id_), lane, row)
        if kind == "refused":
            self._arrived(
                ("command", named.get("command", ""), named.get("id", "")), lane, row, "refused"
            )
        if kind in _OF_RECEIPT and named.get("evidence") not in _WITHOUT_RECEIPT:
            tone: ArrowTone = "refused" if kind == "receipt_refused" else "receipt"
            self._arrived(("receipt", named.get("attempt", "")), lane, row, tone)
        for fact in list(self._sent.get(("fact", sandbox), ())):
            if kind in _OF_FACT.get(fact.told.words[0], ()):
                self._sent[("fact", sandbox)].remove(fact)
                self._draw(fact, lane, row)

    def _take_dag_entry(self, kind: str, named: dict[str, str], lane: str, row: int) -> None:
        dag = named.get("dag", "")
        if kind in _DAG_BANDS:
            label = named.get("verdict", "answered") if kind == "answered" else _DAG_BANDS[kind]
            shade = str(list(_DAG_BANDS).index(kind))
            self._begin(("dag", dag), (f"dag {dag}", label, "dag"), row, shade)
        for key in [key for key in self._sent if key[:2] == ("command", "dag")]:
            # What a DAG's command became names the command only where it was refused.
            names_it = key[2] in (named.get("id"), named.get("acquisition"), named.get("cancel"))
            waiting = self._sent[key]
            if waiting and names_it and waiting[0].told.words[1] == dag:
                self._arrived(key, lane, row, "refused" if kind == "refused" else None)

    # --- arrows -------------------------------------------------------------------------------

    def _send(
        self, tone: ArrowTone, key: tuple[str, ...], lane: str, row: int, told: Told
    ) -> _Sent:
        sent = _Sent(tone, lane, row, told)
        self._sent.setdefault(key, []).append(sent)
        return sent

    def _arrived(
        self, key: tuple[str, ...], lane: str, row: int, tone: ArrowTone | None = None
    ) -> None:
        waiting = self._sent.get(key)
        if waiting and key[0] == "order":
            # The same order may have been sent again: what comes last is the likeliest to be it.
            self._draw(waiting.pop(), lane, row, tone)
            waiting.clear()
        elif waiting:
            self._draw(waiting.pop(0), lane, row, tone)

    def _draw(self, sent: _Sent, lane: str, row: int, tone: ArrowTone | None = None) -> None:
        if sent.lane and lane and row >= 0 and sent.row >= 0:
            self.arrows.append(
                Arrow(
                    tone=tone or sent.tone,
                    start=(sent.lane, sent.row),
                    end=(lane, row),
                    detail=f"{sent.told.at_ms:,} ms: {sent.told.kind} {sent.told.text}",
                )
            )

    # --- bands --------------------------------------------------------------------------------

    def _begin(
        self, key: tuple[str, ...], band: tuple[str, str, BandTone], row: int, shade: str = "0"
    ) -> None:
        self._close(key, row)
        self._open[key] = _Open(band, row, int(shade) if shade.isdecimal() else 0)

    def _close(self, key: tuple[str, ...], row: int) -> None:
        band = self._open.pop(key, None)
        if band is not None and band.lane:
            self.bands.append(
                Band(
                    lane=band.lane,
                    first=band.first,
                    last=row,
                    label=band.label,
                    tone=band.tone,
                    shade=band.shade,
                )
            )


def _beside(band: Band, shards: Sequence[str]) -> Band:
    """Terms of several shards stand beside each other."""
    shard = band.label.split(" ")[0][1:]
    return Band(
        lane=band.lane,
        first=band.first,
        last=band.last,
        label=band.label if len(shards) > 1 else band.label.replace(f"s{shard} t", "term "),
        tone=band.tone,
        shade=band.shade,
        part=shards.index(shard),
        parts=len(shards),
    )


def _shard(one: Told) -> str:
    return one.words[0].partition("@")[2]


def _order(one: Told) -> str:
    """What an order is about: an attempt's step, or the key that its arrival is known by."""
    kind, *rest = one.words[2].split("/")
    if one.words[1] == "Dispatch":
        return kind.rpartition(".")[0]
    if one.words[1] == "MarkOrder":
        return f"mark/{rest[1]}"
    return f"{kind}/{rest[0]}" if rest else kind


def _tone(one: Told) -> Tone:
    if one.kind == "ledger":
        return _LEDGER_TONES.get(one.words[1], "plain")
    return _TONES.get(one.kind, "plain")


def _text(one: Told) -> str:
    if one.kind == "ledger":
        place, kind, *rest = one.words
        words = [word for word in rest if not word.startswith("sandbox=")]
        return f"{kind} {' '.join(words)}".rstrip() + f"  [{place}]"
    if one.kind == "effect":
        return " ".join(one.words[1:])
    if one.kind == "VIOLATED":
        invariant, _, detail = one.text.partition(" ")
        return f"{invariant} violated: {detail}"
    return f"{one.kind} {one.text}"
