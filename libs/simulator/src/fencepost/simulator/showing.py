"""What a person is shown of a failure: seed, options, the shrunk trace, how to have it again."""

from __future__ import annotations

import pathlib
import shlex
import sys

import msgspec
from fencepost.core.errors import RefusedError
from fencepost.simulator import drawing, pictures, runs
from fencepost.simulator.options import Options
from fencepost.simulator.options import problem as options_problem

TRACE_LINES_MAX = 400


class Saved(msgspec.Struct, forbid_unknown_fields=True):
    """What `--save` writes and `--replay` reads: a run, whole."""

    seed: int
    options: Options


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def program() -> str:
    """How this command was called, for commands that are to be copied."""
    name = sys.argv[0]
    return name if name == "fencepost sim" else "python -m fencepost.simulator"


def options_words(options: Options) -> str:
    rates = ", ".join(f"{name}={rate}" for name, rate in options.rates.items()) or "no faults"
    spared = (
        f"\n  {len(options.spared)} single faults spared, {len(options.withheld)} steps withheld"
        if options.spared or options.withheld
        else ""
    )
    sizes = " ".join(
        f"{name}={value}"
        for name, value in msgspec.structs.asdict(options).items()
        if name not in ("rates", "spared", "withheld")
    )
    return f"{sizes}\n  {rates}{spared}"


def load(path: pathlib.Path) -> Saved:
    """
    Reads a saved run.

    Raises `RefusedError` when the file is not there or is not one.
    """
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    except OSError as error:
        raise RefusedError("no_file", f"{path}: {error.strerror}", field="replay") from error
    except msgspec.MsgspecError as error:
        raise RefusedError(
            "bad_file",
            f"{path}: {error}",
            field="replay",
            expected="what --save has written",
        ) from error
    if wrong := options_problem(saved.options):
        raise RefusedError("bad_file", f"{path}: {wrong}", field="replay")
    return saved


def parse_options(text: str) -> Options:
    """
    Takes options from the command line, as JSON; what is left out has its default.

    Raises `RefusedError` for anything else.
    """
    try:
        found = msgspec.json.decode(text.encode(), type=Options)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise RefusedError("bad_options", f"--options: {error}", field="options") from error
    if wrong := options_problem(found):
        raise RefusedError("bad_options", f"--options: {wrong}", field="options")
    return found


def command_of(seed: int, options: Options) -> str:
    """The command that has exactly this run again, on whatever machine, with no file."""
    plain = msgspec.structs.asdict(Options())
    told = {
        name: value
        for name, value in msgspec.structs.asdict(options).items()
        if value != plain[name]
    }
    written = msgspec.json.encode(told).decode()
    return f"{program()} --seed {seed} --options {shlex.quote(written)} --trace"


def failure(
    report: runs.Report, *, save: pathlib.Path | None, draw: pathlib.Path | None, whole: str
) -> None:
    """Shrinks a failure, prints its trace, and says how to have it again."""
    violation = report.violations[0]
    say(f"\nseed {report.seed}: {violation.invariant} violated: {violation.detail}")
    say(f"options: {options_words(report.options)}")
    small = runs.shrink(report.seed, report.options, violation.invariant)
    again = runs.run(report.seed, small, tracing=True)
    found = again.violations[0]
    say(f"\nshrunk: {found.invariant} violated: {found.detail}")
    say(f"shrunk to: {options_words(small)}")
    lines = pictures.relevant(again.trace)
    shown = lines[-TRACE_LINES_MAX:]
    if len(again.trace) > len(shown):
        say(f"({len(shown)} of {len(again.trace)} lines: the last ones of what is violated)")
    say("\n".join(shown))
    command = command_of(report.seed, small)
    if save is not None:
        save.write_bytes(msgspec.json.format(msgspec.json.encode(Saved(report.seed, small))))
        command = f"{program()} --replay {shlex.quote(str(save))}"
    if draw is not None:
        drawn(draw, again, command)
    say(f"\nthe whole run again:  {whole}")
    say(f"the shrunk one again: {command}")


def drawn(path: pathlib.Path, report: runs.Report, command: str) -> None:
    """Writes the drawing of a run that was traced."""
    if report.violations:
        title = f"Seed {report.seed}: {report.violations[0].invariant} violated"
    else:
        title = f"Seed {report.seed}: nothing violated"
    faults = ", ".join(f"{name} {count}" for name, count in report.faults.items()) or "none"
    picture = pictures.of_trace(
        report.trace,
        title=title,
        notes=[
            f"{report.events:,} events in {report.virtual_ms:,} virtual ms. Faults met: {faults}."
        ],
    )
    path.write_text(drawing.page(picture, again=command), encoding="utf-8")
    say(f"drawn: {path}")
