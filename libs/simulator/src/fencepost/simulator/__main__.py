"""
The command: `python -m fencepost.simulator --seed N` or `--runs N`.

Exit code 0 when nothing was violated, 1 when something was, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import msgspec
from fencepost.simulator import batches, runs
from fencepost.simulator.options import FAULTS, Options, draw

TRACE_LINES_MAX = 400


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fencepost.simulator", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="run this seed alone, and show its options")
    which.add_argument("--runs", type=int, default=100, help="run so many seeds (default 100)")
    which.add_argument("--replay", type=pathlib.Path, help="run again what --save has written")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, help="step commands per run (default: drawn)")
    parser.add_argument("--faults", help="only these classes, separated by commas; 'none' for none")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--trace", action="store_true", help="with --seed: print all that happens")
    parser.add_argument("--save", type=pathlib.Path, help="write the shrunk failure there")
    parser.add_argument("--report", type=pathlib.Path, help="write the guarantees page there")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args(argv)
    if arguments.faults is not None:
        names = () if arguments.faults == "none" else tuple(arguments.faults.split(","))
        unknown = [name for name in names if name not in FAULTS]
        if unknown:
            parser.error(f"no such fault: {', '.join(unknown)}. There are: {', '.join(FAULTS)}")
        arguments.faults = names
    return arguments


def _options_words(options: Options) -> str:
    rates = ", ".join(f"{name}={rate}" for name, rate in options.rates.items()) or "no faults"
    return (
        f"shards={options.shards} planners={options.planners} gateways={options.gateways} "
        f"sandboxes={options.sandboxes} steps={options.steps} "
        f"external={options.external_share} commands={options.command_share}\n  {rates}"
    )


def _show_failure(report: runs.Report, save: pathlib.Path | None) -> None:
    """Shrinks a failure, prints its trace, and says how to have it again."""
    violation = report.violations[0]
    _say(f"\nseed {report.seed}: {violation.invariant} violated: {violation.detail}")
    _say(f"options: {_options_words(report.options)}")
    small = runs.shrink(report.seed, report.options, violation.invariant)
    again = runs.run(report.seed, small, tracing=True)
    _say(f"shrunk to: {_options_words(small)}")
    shown = again.trace[-TRACE_LINES_MAX:]
    if len(again.trace) > len(shown):
        _say(f"(the last {len(shown)} of {len(again.trace)} lines; --trace shows all)")
    _say("\n".join(shown))
    _say(f"replay: python -m fencepost.simulator --seed {report.seed} --trace")
    if save is not None:
        save.write_bytes(
            msgspec.json.format(msgspec.json.encode({"seed": report.seed, "options": small}))
        )
        _say(f"replay the shrunk one: python -m fencepost.simulator --replay {save}")


class _Saved(msgspec.Struct):
    seed: int
    options: Options


def _progress(done: int, of: int) -> None:
    if done % 10 == 0 or done == of:
        sys.stderr.write(f"\r{done}/{of} runs")
        if done == of:
            sys.stderr.write("\n")
        sys.stderr.flush()


def _one(seed: int, options: Options, *, trace: bool) -> batches.Summary:
    summary = batches.Summary()
    _say(f"seed {seed}: {_options_words(options)}")
    began = time.perf_counter()
    report = runs.run(seed, options, tracing=trace)
    summary.seconds = time.perf_counter() - began
    if trace:
        _say("\n".join(report.trace))
    summary.add(report)
    return summary


def main(argv: list[str] | None = None) -> int:
    if not __debug__:
        sys.stderr.write("the simulator judges with assertions: run it without -O\n")
        return 2
    arguments = _arguments(argv)
    if arguments.replay is not None:
        saved = msgspec.json.decode(arguments.replay.read_bytes(), type=_Saved)
        summary = _one(saved.seed, saved.options, trace=True)
    elif arguments.seed is not None:
        options = draw(arguments.seed, faults=arguments.faults, steps=arguments.steps)
        summary = _one(arguments.seed, options, trace=arguments.trace)
    else:
        jobs = [
            batches.Job(seed, arguments.faults, arguments.steps)
            for seed in range(arguments.first, arguments.first + arguments.runs)
        ]
        summary = batches.run_many(
            jobs,
            processes=arguments.jobs,
            progress=_progress if sys.stderr.isatty() else None,
        )
    if summary.failures and arguments.replay is None:
        _show_failure(summary.failures[0], arguments.save)
    _finish(summary, arguments)
    return 1 if summary.failures else 0


def _finish(summary: batches.Summary, arguments: argparse.Namespace) -> None:
    seeds = [report.seed for report in summary.failures]
    _say(
        f"{summary.seeds} runs, {summary.events:,} events, {summary.batches:,} batches, "
        f"{sum(summary.faults.values()):,} faults of {len(summary.faults)} classes: "
        f"{len(seeds)} with a violation" + (f" (seeds {seeds[:20]})" if seeds else "")
    )
    if arguments.report is not None:
        arguments.report.write_text(batches.guarantees(summary))
        _say(f"written: {arguments.report}")
    if arguments.json:
        said = {
            "events": summary.events,
            "events_per_s": summary.events_per_s,
            "violations": len(seeds),
            "seeds": summary.seeds,
            "failed_seeds": seeds,
            "faults": summary.faults,
            "checks": summary.checks,
        }
        _say(msgspec.json.encode(said).decode())


if __name__ == "__main__":
    sys.exit(main())
