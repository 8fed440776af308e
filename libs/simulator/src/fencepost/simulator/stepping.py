"""
Steps through a trace in a terminal: the event, what stood around it, and what stands now.

Keys: n next, b back, N and B ten at a time, g an event's number, f the next fault, v the violation,
0 the beginning, q quit. The trace is whole before the first key: going back costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fencepost.simulator import trace
from fencepost.simulator.trace import Told
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

AROUND: Final = 8
STANDING_MAX: Final = 14
KEYS: Final = "n next  b back  N/B by ten  g go to  f next fault  v violation  0 beginning  q quit"

_STYLES: Final = {
    "fault": "yellow",
    "VIOLATED": "bold red",
    "killed": "red",
    "paused": "red",
    "vanishes": "red",
    "restarts": "red",
    "crash": "red",
    "receipt": "green",
    "wrote": "green",
    "owned": "cyan",
    "session": "dim",
    "effect": "blue",
    "fact": "magenta",
}


def style_of(one: Told) -> str:
    """The colour that a line of a trace is shown in."""
    if one.kind == "ledger":
        return {
            "committed": "bold green",
            "epoch_opened": "bold cyan",
            "epoch_closed": "bold yellow",
            "receipt_refused": "red",
            "refused": "red",
        }.get(one.words[1], "")
    return _STYLES.get(one.kind, "")


class Stepping:
    """Where one stands in a trace. Knows no terminal."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.told = trace.read_all(lines)
        self.at = 0

    @property
    def last(self) -> int:
        return len(self.told) - 1

    def move(self, by: int) -> None:
        self.at = max(0, min(self.last, self.at + by))

    def go(self, number: int) -> None:
        """To the first line of the event `number`, or of the next one that told anything."""
        self.at = next((n for n, one in enumerate(self.told) if one.number >= number), self.last)

    def next_of(self, kind: str) -> bool:
        """To the next line of a kind; stays, and says no, where there is none."""
        for place in range(self.at + 1, len(self.told)):
            if self.told[place].kind == kind:
                self.at = place
                return True
        return False

    def standing(self) -> dict[str, str]:
        """What stands after this line: of owners, sandboxes and steps, by name."""
        stands: dict[str, str] = {}
        for one in self.told[: self.at + 1]:
            _stand(stands, one)
        return stands


def _stand(stands: dict[str, str], one: Told) -> None:
    words, named = one.words, one.named
    match one.kind:
        case "owned":
            stands[f"{words[0]} shard {words[2]}"] = f"owns, term {words[-1]}"
        case "hold ends":
            stands.pop(f"{words[0]} shard {words[2]}", None)
        case "killed" | "paused":
            stands[words[0]] = one.kind
            for name in [n for n in stands if n.startswith(f"{words[0]} shard") and words]:
                if one.kind == "killed":
                    del stands[name]
        case "continued" | "session":
            name = words[0] if one.kind == "continued" else words[0].rpartition("-")[0]
            stands.pop(name, None)
        case "ledger" if "step" in named:
            about = named.get("attempt", "")
            stands[f"step {named['step']}"] = f"{words[1]} {about}".rstrip()
        case "ledger" if "sandbox" in named:
            of = {"epoch_opened": "open", "epoch_closed": "closed", "gone": "gone"}.get(words[1])
            if words[1] == "attached":
                stands[f"sandbox {named['sandbox']}"] = (
                    f"epoch {named['epoch']} open, session {named['session']}"
                )
            elif of is not None:
                epoch = f"epoch {named['epoch']} " if "epoch" in named else ""
                stands[f"sandbox {named['sandbox']}"] = epoch + of
        case _:
            pass


def screen(stepping: Stepping, said: str = "") -> Group:
    """One screen: lines around, the one in question marked, and what stands after it."""
    lines = Table.grid(padding=(0, 1))
    lines.add_column(no_wrap=True)
    lines.add_column(justify="right", no_wrap=True)
    lines.add_column(justify="right", no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    first = max(0, min(stepping.at - AROUND, stepping.last - 2 * AROUND))
    for place in range(first, min(first + 2 * AROUND + 1, len(stepping.told))):
        one = stepping.told[place]
        here = place == stepping.at
        style = style_of(one) + (" reverse" if here else "")
        lines.add_row(
            "▶" if here else "",
            f"{one.at_ms:,} ms",
            str(one.number),
            Text(one.kind, style=style),
            Text(one.text, style=style),
        )
    stands = Table.grid(padding=(0, 2))
    known = list(stepping.standing().items())
    for name, words in known[-STANDING_MAX:]:
        stands.add_row(Text(name, style="bold"), words)
    if len(known) > STANDING_MAX:
        stands.add_row("", f"and {len(known) - STANDING_MAX} more")
    place_words = f"line {stepping.at + 1} of {len(stepping.told)}"
    return Group(
        Panel(lines, title=place_words, title_align="left"),
        Panel(stands, title="what stands now", title_align="left"),
        Text(said or KEYS, style="yellow" if said else "dim"),
    )


def step_through(
    lines: Sequence[str],
    console: Console,
    *,
    key: Callable[[], str],
    ask: Callable[[str], str],
) -> None:
    """Shows a screen per key until `q`. `key` gives one key, `ask` a line that is typed."""
    stepping = Stepping(lines)
    said = ""
    while stepping.told:
        console.clear()
        console.print(screen(stepping, said))
        try:
            pressed = key()
        except (EOFError, KeyboardInterrupt):
            return
        if pressed in ("q", "Q", "\x1b", "\x03", "\x04", ""):
            return
        said = _press(stepping, pressed, ask)


def _press(stepping: Stepping, pressed: str, ask: Callable[[str], str]) -> str:
    """Does what a key says; answers what there is to tell of it."""
    moves = {
        "n": 1,
        " ": 1,
        "\r": 1,
        "\n": 1,
        "\x1b[B": 1,
        "b": -1,
        "\x1b[A": -1,
        "N": 10,
        "B": -10,
    }
    if pressed in moves:
        stepping.move(moves[pressed])
    elif pressed == "0":
        stepping.at = 0
    elif pressed == "f":
        return "" if stepping.next_of("fault") else "no fault after this"
    elif pressed == "v":
        return "" if stepping.next_of("VIOLATED") else "no violation after this"
    elif pressed == "g":
        typed = ask("event number: ").strip().replace(",", "")
        if not typed.isdecimal():
            return f"an event's number is wanted, not {typed!r}"
        stepping.go(int(typed))
    else:
        return f"{pressed!r}: {KEYS}"
    return ""
