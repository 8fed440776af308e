"""
Compares traces of fixed seeds with the digests in the repository, which hold every interpreter.

`golden.py` compares; `--renew` writes them anew, when the simulated world was meant to change, and
the drawing in docs with them;
`--with PYTHON` does it under another interpreter that has msgspec; `--seeds N` compares seeds 0 to
N-1 between this interpreter and that one, whatever the repository says.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "simulation" / "golden.json"
SEEDS = tuple(range(8))
SOURCES = ("core", "contracts", "runtime", "simulator")
ASKED = "--digests"


def digest(seed: int) -> str:
    """The events of a run and what its trace says, all of it."""
    from fencepost.simulator import runs

    report = runs.run(seed, tracing=True)
    lines = "\n".join(report.trace)
    return f"{report.events}.{hashlib.sha256(lines.encode()).hexdigest()}"


def kept() -> dict[int, str]:
    """The digests in the repository, by seed."""
    return {int(seed): text for seed, text in json.loads(FILE.read_text()).items()}


def renew() -> None:
    found = {str(seed): digest(seed) for seed in SEEDS}
    FILE.write_text(json.dumps(found, indent=2) + "\n")


def differing(found: dict[int, str], wanted: dict[int, str]) -> list[int]:
    return [seed for seed, text in wanted.items() if found.get(seed) != text]


def under(python: str, seeds: tuple[int, ...]) -> tuple[str, dict[int, str]]:
    """What another interpreter makes of the same sources: its version, and the digests."""
    sources = [str(ROOT / "libs" / name / "src") for name in SOURCES]
    done = subprocess.run(
        [python, str(Path(__file__)), ASKED, *(str(seed) for seed in seeds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    said = json.loads(done.stdout)
    return said["python"], {int(seed): text for seed, text in said["digests"].items()}


def main() -> None:
    if ASKED in sys.argv:
        digests = {seed: digest(int(seed)) for seed in sys.argv[2:]}
        print(json.dumps({"python": platform.python_version(), "digests": digests}))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--with", dest="python", metavar="PYTHON")
    parser.add_argument("--seeds", type=int, metavar="N")
    arguments = parser.parse_args()
    if arguments.renew:
        sys.path.insert(0, str(ROOT))
        from scripts import make_drawing

        renew()
        make_drawing.FILE.write_text(make_drawing.draw(), encoding="utf-8")
        for path in (FILE, make_drawing.FILE):
            print(f"written: {path.relative_to(ROOT)}")
        return
    version, here = platform.python_version(), "the repository's"
    seeds, wanted = SEEDS, kept()
    if arguments.seeds is not None:
        seeds = tuple(range(arguments.seeds))
        wanted, here = {seed: digest(seed) for seed in seeds}, f"Python {version}'s"
    if arguments.python is not None:
        version, found = under(arguments.python, seeds)
    else:
        found = {seed: digest(seed) for seed in seeds}
    wrong = differing(found, wanted)
    print(f"Python {version}: {len(wanted) - len(wrong)} of {len(wanted)} traces are {here}")
    if wrong:
        print(f"not those of the seeds {wrong}: was the world meant to change? --renew writes them")
        sys.exit(1)


if __name__ == "__main__":
    main()
