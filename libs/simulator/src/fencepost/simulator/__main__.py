"""
The command: `python -m fencepost.simulator --seed N`, `--runs N`, or `--replay FILE`.

Exit code 0 when nothing was violated, 1 when something was, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import pathlib
import secrets
import shlex
import sys
import time

import msgspec
from fencepost.core.errors import RefusedError
from fencepost.simulator import batches, longrun, pairs, progress, runs, showing, stepping
from fencepost.simulator.numbers import whole
from fencepost.simulator.options import FAULTS, STEPS_MAX, Options, draw
from fencepost.simulator.showing import say

FRESH_SEEDS = 1 << 40
RUNS = 100
JOBS_MAX = 1024


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=showing.program(), description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=whole(), help="run this seed alone, and show its options")
    which.add_argument("--runs", type=whole(1), help=f"run so many seeds (default {RUNS})")
    which.add_argument("--events", type=whole(1), help="run seeds until so many events were met")
    which.add_argument(
        "--replay",
        type=pathlib.Path,
        metavar="FILE",
        help="step through what --save has written; not on a terminal, print all of it",
    )
    parser.add_argument("--from", dest="first", type=whole(), help="the first seed (default 0)")
    parser.add_argument("--fresh", action="store_true", help="a first seed by chance, printed")
    parser.add_argument(
        "--steps", type=whole(1, STEPS_MAX), help="step commands per run (default: drawn)"
    )
    parser.add_argument("--faults", help="only these classes, separated by commas; 'none' for none")
    parser.add_argument("--options", help="with --seed: its options as JSON, instead of drawn ones")
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="every fault class alone and every pair of them, --runs times over (default once)",
    )
    parser.add_argument(
        "--part", metavar="K/N", help="with --pairs: every Nth of them, from the Kth"
    )
    parser.add_argument("--jobs", type=whole(1, JOBS_MAX), default=1, help="processes")
    parser.add_argument("--trace", action="store_true", help="with --seed: print all that happens")
    parser.add_argument("--plain", action="store_true", help="with --replay: print, do not step")
    parser.add_argument(
        "--save", type=pathlib.Path, metavar="FILE", help="write the shrunk failure there"
    )
    parser.add_argument(
        "--draw",
        type=pathlib.Path,
        metavar="FILE",
        nargs="?",
        const=pathlib.Path("fencepost-sim.html"),
        help="draw the seed, the replayed run or the first failure (default fencepost-sim.html)",
    )
    parser.add_argument(
        "--report",
        type=pathlib.Path,
        metavar="FILE",
        help="write the guarantees page there; of --events: the long run's page",
    )
    parser.add_argument(
        "--resume",
        type=pathlib.Path,
        metavar="STATE",
        help="with --events: keep what was met in this file, and go on from what stands there",
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.faults is not None:
        names = () if arguments.faults == "none" else tuple(arguments.faults.split(","))
        unknown = [name for name in names if name not in FAULTS]
        if unknown:
            parser.error(f"no such fault: {', '.join(unknown)}. There are: {', '.join(FAULTS)}")
        arguments.faults = names
    arguments.parts = _parts(parser, arguments)
    if arguments.fresh and arguments.first is not None:
        parser.error("--fresh and --from: name a first seed, or have one by chance")
    if arguments.resume is not None and arguments.events is None:
        parser.error("--resume goes with --events: until how many?")
    if arguments.resume is not None and arguments.fresh:
        parser.error("--resume and --fresh: what is gone on with has its first seed")
    if arguments.options is not None and arguments.seed is None:
        parser.error("--options goes with --seed")
    if arguments.fresh:
        arguments.first = secrets.randbelow(FRESH_SEEDS)
        say(f"seeds from {arguments.first} on")
    arguments.first = arguments.first or 0


def main(argv: list[str] | None = None) -> int:
    if not __debug__:
        sys.stderr.write("the simulator judges with assertions: run it without -O\n")
        return 2
    parser = command_line()
    arguments = parser.parse_args(argv)
    _check(parser, arguments)
    try:
        if arguments.events is not None:
            return _until(arguments)
        if arguments.replay is not None:
            saved = showing.load(arguments.replay)
            return _replay(saved.seed, saved.options, arguments)
        summary = _seed(arguments) if arguments.seed is not None else _many(arguments)
    except RefusedError as error:
        sys.stderr.write(f"{error.reason}: {error}\n")
        return 2
    if summary.failures:
        _show(summary.failures[0], arguments)
    _finish(summary, arguments)
    return 1 if summary.failures else 0


def _parts(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[int, int]:
    """Which part of how many `--part` names."""
    if arguments.pairs and (arguments.faults is not None or arguments.seed is not None):
        parser.error("--pairs plans which faults strike: name neither --faults nor --seed")
    if arguments.part is None:
        return 1, 1
    if not arguments.pairs:
        parser.error("--part goes with --pairs")
    part, _, parts = arguments.part.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        parser.error(f"--part: expected K/N with 1 <= K <= N, got {arguments.part!r}")
    return int(part), int(parts)


def _whole(seed: int, arguments: argparse.Namespace) -> str:
    """The command that has the run of a seed again as it was, drawn options and all."""
    words = [showing.program(), "--seed", str(seed)]
    if arguments.faults is not None:
        words += ["--faults", ",".join(arguments.faults) or "none"]
    if arguments.steps is not None:
        words += ["--steps", str(arguments.steps)]
    if arguments.options is not None:
        words += ["--options", shlex.quote(arguments.options)]
    return " ".join([*words, "--trace"])


def _show(report: runs.Report, arguments: argparse.Namespace) -> None:
    if arguments.pairs:
        whole = showing.command_of(report.seed, report.options)
    else:
        whole = _whole(report.seed, arguments)
    showing.failure(report, save=arguments.save, draw=arguments.draw, whole=whole)


def _run(seed: int, options: Options, *, tracing: bool) -> tuple[runs.Report, batches.Summary]:
    summary = batches.Summary()
    began = time.perf_counter()
    report = runs.run(seed, options, tracing=tracing)
    summary.seconds = time.perf_counter() - began
    summary.add(report)
    return report, summary


def _seed(arguments: argparse.Namespace) -> batches.Summary:
    seed = arguments.seed
    if arguments.options is not None:
        options = showing.parse_options(arguments.options)
    else:
        options = draw(seed, faults=arguments.faults, steps=arguments.steps)
    say(f"seed {seed}: {showing.options_words(options)}")
    tracing = arguments.trace or arguments.draw is not None
    report, summary = _run(seed, options, tracing=tracing)
    if arguments.trace:
        say("\n".join(report.trace))
    if arguments.draw is not None and not report.violations:
        showing.drawn(arguments.draw, report, showing.command_of(seed, options))
    return summary


def _replay(seed: int, options: Options, arguments: argparse.Namespace) -> int:
    """Steps through a saved run on a terminal, and prints it elsewhere; nothing is shrunk."""
    report, summary = _run(seed, options, tracing=True)
    if arguments.draw is not None:
        command = f"{showing.program()} --replay {shlex.quote(str(arguments.replay))}"
        showing.drawn(arguments.draw, report, command)
    elif sys.stdin.isatty() and sys.stdout.isatty() and not (arguments.plain or arguments.json):
        import typer
        from rich.console import Console

        console = Console()
        with console.screen():
            stepping.step_through(report.trace, console, key=typer.getchar, ask=console.input)
    else:
        say(f"seed {seed}: {showing.options_words(options)}")
        say("\n".join(report.trace))
    _finish(summary, arguments)
    return 1 if summary.failures else 0


def _jobs(arguments: argparse.Namespace) -> list[batches.Job]:
    if arguments.pairs:
        part, parts = arguments.parts
        return pairs.plan(
            1 if arguments.runs is None else arguments.runs,
            first=arguments.first,
            part=part,
            parts=parts,
        )
    first = arguments.first
    return [
        batches.Job(seed, arguments.faults, arguments.steps)
        for seed in range(first, first + (RUNS if arguments.runs is None else arguments.runs))
    ]


def _many(arguments: argparse.Namespace) -> batches.Summary:
    jobs = _jobs(arguments)
    with progress.shown(runs=len(jobs)) as tell:
        return batches.run_many(jobs, processes=arguments.jobs, progress=tell)


def _until(arguments: argparse.Namespace) -> int:
    faults, steps = arguments.faults, arguments.steps
    if arguments.resume is not None:
        state = longrun.load(arguments.resume, first=arguments.first, faults=faults, steps=steps)
    else:
        state = longrun.begin(first=arguments.first, faults=faults, steps=steps)
    with progress.shown(events=arguments.events) as tell:
        try:
            longrun.go_on(
                state, arguments.resume, events=arguments.events, jobs=arguments.jobs, tell=tell
            )
        except KeyboardInterrupt:
            if arguments.resume is None:
                raise
            say(f"stopped; {arguments.resume} has all but the last chunk: the same command goes on")
            return 130
    if state.failed:
        seed = state.failed[0].seed
        report, _ = _run(seed, draw(seed, faults=faults, steps=steps), tracing=False)
        if report.violations:
            _show(report, arguments)
    if arguments.report is not None:
        arguments.report.write_text(longrun.page(state), encoding="utf-8")
        say(f"written: {arguments.report}")
        arguments.report = None
    _finish(state.summary, arguments, [one.seed for one in state.failed])
    return 1 if state.failed else 0


def _finish(
    summary: batches.Summary, arguments: argparse.Namespace, failed: list[int] | None = None
) -> None:
    seeds = [report.seed for report in summary.failures] if failed is None else failed
    say(
        f"{summary.seeds:,} runs, {summary.events:,} events, {summary.batches:,} batches, "
        f"{sum(summary.faults.values()):,} faults of {len(summary.faults)} classes: "
        f"{len(seeds)} with a violation" + (f" (seeds {seeds[:20]})" if seeds else "")
    )
    if arguments.report is not None:
        arguments.report.write_text(batches.guarantees(summary), encoding="utf-8")
        say(f"written: {arguments.report}")
    if arguments.json:
        said = {
            "events": summary.events,
            "events_per_s": summary.events_per_s,
            "violations": len(seeds),
            "seeds": summary.seeds,
            "failed_seeds": seeds,
            "faults": summary.faults,
            "checks": summary.checks,
            "coverage": summary.coverage,
            "planned": len(summary.together),
            "never_together": summary.never_together(),
        }
        say(msgspec.json.encode(said).decode())


if __name__ == "__main__":
    sys.exit(main())
