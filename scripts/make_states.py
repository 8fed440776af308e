"""Makes docs/states.md from the tables in core. `--check`: fails when it is not up to date."""

import sys
from pathlib import Path

from fencepost.core.dag import transitions as dag
from fencepost.core.sandbox import transitions

PAGE = Path(__file__).parent.parent / "docs" / "states.md"

HEAD = """# States

Made by `scripts/make_states.py` from `core/sandbox/transitions.py` and
`core/dag/transitions.py`; change those, not this.
An arrow's letter is the row of the table below its picture. The entry is what stands in the ledger.
"""

MACHINES = (
    (
        "A step",
        "An attempt is *fenced* in `apply`, `joined`, `revoke`, `undo`; *pending* while `parked`.",
        transitions.STEP,
    ),
    (
        "An epoch and its session",
        "Fences are handed out, and receipts join, in `attached` alone.",
        transitions.EPOCH,
    ),
    (
        "What a generation has to get back",
        "Another epoch begins it anew. Nothing new is fenced before `whole`.",
        transitions.RECOVERY,
    ),
    (
        "A sandbox",
        "`gone` is final. `releasing` is in the ledger before a provider is asked to stop.",
        transitions.SANDBOX,
    ),
    (
        "An acquisition",
        "`gone` and `abandoned` are final, and leave the state.",
        dag.ACQUISITION,
    ),
    (
        "The verdict on a DAG",
        "A pure function of the DAG's state; it is given by an accepted `answered` alone.",
        dag.VERDICT,
    ),
)


def page() -> str:
    parts = [HEAD]
    for title, words, table in MACHINES:
        sources = {arrow.source for arrow in table}
        start = next(name for name in ("new", "none", "open") if name in sources)
        parts.append(f"\n## {title}\n\n{words}\n\n```mermaid\nstateDiagram-v2\n")
        for arrow in table:
            source = "[*]" if arrow.source == start else arrow.source
            parts.append(f"    {source} --> {arrow.target}: {arrow.letter}\n")
        parts.extend(
            f"    {final} --> [*]\n" for final in sorted({a.target for a in table} - sources)
        )
        parts.append("```\n\n|  | from | to | entry | when |\n|---|---|---|---|---|\n")
        parts.extend(
            f"| {a.letter} | {a.source} | {a.target} | `{a.entry}` | {a.when} |\n" for a in table
        )
    return "".join(parts)


if __name__ == "__main__":
    made = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == made else f"{PAGE} is out of date: run {__file__}")
    PAGE.write_text(made)
