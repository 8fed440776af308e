"""
Draws docs/late-receipt.svg: a receipt that comes after its disk was lost, out of a simulated run.

The run is the first seed in which a late receipt is refused and its step commits all the same, on
the next disk. `make golden ARGS=--renew` writes it anew when the world was meant to change.
"""

from pathlib import Path

from fencepost.simulator import drawing, pictures, runs, trace
from fencepost.simulator.options import Options

FILE = Path(__file__).parent.parent / "docs" / "late-receipt.svg"
SEEDS = 400
LINES_MAX = 60
OPTIONS = Options(
    shards=1,
    planners=1,
    gateways=1,
    sandboxes=1,
    steps=2,
    dags=0,
    safety_ms=4_000,
    external_share=0.0,
    command_share=0.0,
    rates={"receipt_delayed": 0.5, "sandbox_preempted": 0.04},
)


def example() -> tuple[int, list[str]]:
    """A seed, and the lines of its trace that tell the story."""
    for seed in range(SEEDS):
        lines = runs.run(seed, OPTIONS, tracing=True).trace
        told = trace.read_all(lines)
        end = next(place for place, one in enumerate(told) if one.kind == "phase")
        entries = [(one.words[1], one.named) for one in told[:end] if one.kind == "ledger"]
        late = [named for kind, named in entries if kind == "receipt_refused"]
        done = {named.get("step") for kind, named in entries if kind == "committed"}
        if end <= LINES_MAX and len(late) == 1 and late[0].get("step") in done:
            return seed, lines[:end]
    raise LookupError(f"none of {SEEDS} seeds has a late receipt whose step commits")


def draw() -> str:
    seed, lines = example()
    title = f"Simulated, seed {seed}: a receipt of epoch 1 comes in epoch 2, and commits nothing"
    return drawing.svg(pictures.of_trace(lines, title=title))


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
