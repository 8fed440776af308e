"""
Kills mutants: breaks one line at a time, and what watches over that line must turn red.

Three families: of the core, the simulator's runtime and its toolhost, killed by the simulator
within a stated number of seeds, or by one that is noted (`tests/simulation/mutants.py`); of the
core, killed by unit and scenario tests (`scripts/mutants.py`); of the runtime, the services and the
toolhost, killed by the tests that are named beside them (`scripts/edge_mutants.py`).

`kill_mutants.py [--only simulator,core,edges] [--table FILE] [word …]` takes only those that have
a word in their name. The last line is `N killed, M survived`; fails when one survived. A line that
is not there any more is an error too, and so are tests that do not run.
"""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
from fencepost.simulator import runs  # noqa: E402

from scripts import edge_mutants  # noqa: E402
from scripts import mutants as core_mutants  # noqa: E402
from tests.simulation import mutants as simulator_mutants  # noqa: E402
from tests.simulation import test_mutants as simulator_tests  # noqa: E402

FAMILIES = ("simulator", "core", "edges")
SECONDS_MAX = 300


class Result(NamedTuple):
    """`by` says what killed it, or what did not."""

    family: str
    name: str
    where: str
    killed: bool
    by: str


class Work(NamedTuple):
    family: str
    number: int
    name: str


def works(families: list[str], words: list[str]) -> list[Work]:
    found = [
        *(Work("simulator", n, m.name) for n, m in enumerate(simulator_mutants.MUTANTS)),
        *(Work("edges", n, m.name) for n, m in enumerate(edge_mutants.MUTANTS)),
        *(
            Work("core", n, f"{file}: {old.strip()}")
            for n, (file, old, _) in enumerate(core_mutants.MUTANTS)
        ),
    ]
    return [
        work
        for work in found
        if work.family in families and (not words or any(word in work.name for word in words))
    ]


def kill(work: Work) -> Result:
    try:
        return _kill(work)
    except (LookupError, AssertionError) as error:  # not what the mutant says is there
        return Result(work.family, work.name, "not run", False, str(error))


def _kill(work: Work) -> Result:
    if work.family == "simulator":
        return by_simulator(work)
    if work.family == "core":
        file, _, _ = core_mutants.MUTANTS[work.number]
        killed = core_mutants.killed(work.number)
        return Result(work.family, work.name, f"core/sandbox/{file}", killed, "unit and scenario")
    return by_tests(work)


def by_simulator(work: Work) -> Result:
    """Seeds from 0 on, in order, then one that is noted: which of them is the first to notice."""
    mutant = simulator_mutants.MUTANTS[work.number]
    where = f"{mutant.module.removeprefix('fencepost.')}.{mutant.function}"
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        noted = simulator_tests.KILLED_AT.get(mutant.name, 0)
        for seed in (*range(mutant.seeds), noted):
            violations = runs.run(seed, simulator_tests.options_of(seed, mutant)).violations
            if violations:
                among = f"of {mutant.seeds}" if seed < mutant.seeds else "noted"
                by = f"{violations[0].invariant}, seed {seed} ({among})"
                return Result(work.family, work.name, where, True, by)
    return Result(work.family, work.name, where, False, f"{mutant.seeds} seeds")


def by_tests(work: Work) -> Result:
    mutant = edge_mutants.MUTANTS[work.number]
    top = mutant.file.partition("/src/")[0]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / top / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / mutant.file.partition("/src/")[2]
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise LookupError(f"{mutant.name}: {mutant.file} has {mutant.old!r} not once")
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        path_before = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        words += [mutant.tests, *(["-k", mutant.only] if mutant.only else [])]
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": os.pathsep.join([str(copy), *path_before]),
            },
            capture_output=True,
            check=False,
            timeout=SECONDS_MAX,
        )
    if done.returncode not in (0, 1):
        said = done.stdout.decode(errors="replace")[-2000:]
        raise LookupError(f"{mutant.name}: the tests did not run:\n{said}")
    by = mutant.tests.removeprefix("tests/") + (f" -k {mutant.only!r}" if mutant.only else "")
    where = mutant.file.partition("/fencepost/")[2]
    return Result(work.family, work.name, where, done.returncode == 1, by)


def killed_all(chosen: list[Work], jobs: int) -> Iterator[Result]:
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs) as pool:
        for count, result in enumerate(pool.imap(kill, chosen), 1):
            if not result.killed:
                print(f"survived: {result.where}: {result.name}: {result.by}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{count}/{len(chosen)}", end="", file=sys.stderr, flush=True)
            yield result


def table(results: list[Result]) -> str:
    """The page docs/mutants.md."""
    core = [result for result in results if result.family == "core"]
    lines = [
        "# Mutants",
        "",
        "Written by `make mutants ARGS='--table docs/mutants.md'`. Each is one line that somebody",
        "could have written; whatever watches over it must notice. One that survives is a missing",
        "checker, fault or test.",
        "",
        "## Killed by the simulator",
        "",
        "Seeds are tried from 0 on; in brackets, within how many. Where that takes very many, a",
        "seed that a long run found is noted and tried instead.",
        "",
        "| mutation | where | first noticed by |",
        "|---|---|---|",
        *(_line(result) for result in results if result.family == "simulator"),
        "",
        "## Killed by targeted tests",
        "",
        "Of the runtime, the services and the toolhost, which the simulator replaces by its own.",
        "",
        "| mutation | where | noticed by |",
        "|---|---|---|",
        *(_line(result) for result in results if result.family == "edges"),
        "",
        "## Killed by unit and scenario tests",
        "",
        f"{len(core)} lines of the core, one at a time: the list is in `scripts/mutants.py`.",
        "",
        "| module | mutations | survived |",
        "|---|---|---|",
    ]
    for where in dict.fromkeys(result.where for result in core):
        here = [result for result in core if result.where == where]
        lines.append(f"| {where} | {len(here)} | {sum(not one.killed for one in here)} |")
    return "\n".join([*lines, "", summary(results) + ".", ""])


def _line(result: Result) -> str:
    by = result.by if result.killed else f"**survived** {result.by}"
    where = result.where.replace("|", "\\|")
    return f"| {result.name} | `{where}` | {by} |"


def summary(results: list[Result]) -> str:
    killed = sum(result.killed for result in results)
    return f"{killed} killed, {len(results) - killed} survived"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--only", default=",".join(FAMILIES), help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--table", type=Path, help="write the page there")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    families = arguments.only.split(",")
    if wrong := set(families) - set(FAMILIES):
        parser.error(f"--only: no such family: {', '.join(sorted(wrong))}")
    chosen = works(families, arguments.words)
    results = list(killed_all(chosen, arguments.jobs))
    if arguments.table is not None:
        arguments.table.write_text(table(results), encoding="utf-8")
        print(f"written: {arguments.table}")
    print(summary(results))
    sys.exit(0 if results and all(result.killed for result in results) else 1)


if __name__ == "__main__":
    main()
