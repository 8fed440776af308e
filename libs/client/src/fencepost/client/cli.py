"""
The `fencepost` command.

Exit codes: 0 fine (of a step: committed, and the tool succeeded), 1 the tool failed or a check
found something, 2 usage or a refusal, 3 the step was not committed, 4 it is indeterminate,
5 unknown: no answer, or not in time.

Progress and colour only on a terminal. With `--json` exactly one JSON value goes to standard output
(one a line where there are many); everything else goes to standard error.
"""
# ruff: noqa: PLR0917 - an option is an argument of its command's function

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar, cast

import msgspec
import typer
from fencepost.client import arguments, command_line, commands
from fencepost.client.client import Client, ReadResult
from fencepost.client.errors import NoServerError, ToolFailedError
from fencepost.client.outcome import StepOutcome
from fencepost.core.errors import FencepostError, RefusedError, RetryLaterError
from rich.console import Console
from rich.table import Table
from rich.text import Text

OK: Final = 0
TOOL_FAILED: Final = 1
REFUSED: Final = 2
NOT_COMMITTED: Final = 3
INDETERMINATE: Final = 4
UNKNOWN: Final = 5

Result = TypeVar("Result")

app = command_line.App(
    name="fencepost",
    help="Tool steps that commit only when their receipt joins the live generation of a sandbox.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
sandbox_app = command_line.App(
    help="Create, reclaim, release and look at sandboxes.", no_args_is_help=True
)
step_app = command_line.App(help="Run, look at, cancel and resolve steps.", no_args_is_help=True)
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(step_app, name="step")

out: Final = Console(highlight=False, soft_wrap=True)
err: Final = Console(stderr=True, highlight=False, soft_wrap=True)

Url = Annotated[
    str | None,
    typer.Option(
        "--url", help="NATS address; else FENCEPOST_NATS_URL, else what `up` wrote in this folder."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
Data = Annotated[Path, typer.Option("--data", help="Folder of the embedded stack.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait.")]
SandboxId = Annotated[str, typer.Argument(metavar="SANDBOX", help="The sandbox's id.")]
StepId = Annotated[str, typer.Argument(metavar="STEP", help="The step's id.")]

DATA: Final = Path(".fencepost")


def main() -> None:
    """Runs the command; the only place that turns errors into exit codes."""
    _log_to_stderr()
    try:
        command_line.require_utf8(sys.argv[1:])
        ended = app(standalone_mode=False)
    except FencepostError as error:
        fail(error)
    except command_line.UsageError as error:
        _fail_usage(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.filename is None:
            raise  # of no file that somebody named
        told = f"{error.filename}: {error.strerror or error}"
        fail(RefusedError("unusable_file", told, expected="a file or folder that can be used"))
    sys.exit(ended if isinstance(ended, int) else OK)


def _fail_usage(error: Any) -> NoReturn:
    """Says what typer found wrong with the command line, in its words."""
    if _asks_for_json(sys.argv[1:]):
        parameter = getattr(error, "param", None)
        field = "" if parameter is None else command_line.name_of(parameter)
        detail = error.format_message()
        emit({"error": {"reason": "usage", "field": field, "expected": "", "detail": detail}})
    error.show()
    sys.exit(error.exit_code)


def fail(error: FencepostError) -> NoReturn:
    """Says an error on standard error, as JSON on standard output where that was asked for."""
    code, problem = problem_of(error)
    if _asks_for_json(sys.argv[1:]):
        emit({"error": problem})
    label = problem["reason"] if isinstance(error, RefusedError) else "error"
    err.print(Text.assemble((f"{label}: ", "bold red"), str(error)))
    sys.exit(code)


def _asks_for_json(argv: list[str]) -> bool:
    if argv[:2] == ["step", "run"]:  # its --json are a tool's arguments
        return "--format=json" in argv or ("--format" in argv and "json" in argv)
    return "--json" in argv


def problem_of(error: FencepostError) -> tuple[int, dict[str, Any]]:
    """The exit code of an error, and its form for machines."""
    match error:
        case RefusedError():
            problem = {"reason": error.reason, "field": error.field, "expected": error.expected}
            return REFUSED, {**problem, "detail": str(error)}
        case ToolFailedError():
            return TOOL_FAILED, {
                "reason": "tool_failed",
                "detail": str(error),
                "result": error.result,
            }
        case NoServerError():
            return UNKNOWN, {"reason": "no_server", "detail": str(error)}
        case RetryLaterError():
            return UNKNOWN, {"reason": "unknown", "detail": str(error), "retry_ms": error.delay_ms}
        case _:
            return TOOL_FAILED, {"reason": type(error).__name__, "detail": str(error)}


def emit(value: Any) -> None:
    """Writes one JSON value on a line of its own."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def _log_to_stderr() -> None:
    import structlog

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


# The stack


@app.command()
def up(
    data: Data = DATA,
    planners: Annotated[int, typer.Option(min=1, max=32, help="Planner replicas.")] = 1,
    gateways: Annotated[int, typer.Option(min=1, max=32, help="Gateway replicas.")] = 1,
    ledgers: Annotated[
        int | None,
        typer.Option(
            min=1,
            envvar="FENCEPOST_LEDGERS",
            help="Streams over which a new folder's shards are spread, for ever; else one.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="NATS port; 0: a free one.")] = 4222,
    postgres: Annotated[bool, typer.Option(help="Start PostgreSQL too.")] = True,
    demand_credentials: Annotated[
        bool,
        typer.Option(
            "--demand-credentials", help="Let nobody in who shows none: see DATA/credentials."
        ),
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start NATS, PostgreSQL and all services here; stop them with Ctrl-C or `fencepost down`."""
    from fencepost.client import up as running

    def show(state: dict[str, Any]) -> None:
        if as_json:
            emit(state)
        else:
            _print_up(state, detached=detach)

    try:
        if detach:
            options = [
                "--planners",
                str(planners),
                "--gateways",
                str(gateways),
                "--port",
                str(port),
            ]
            options += [] if ledgers is None else ["--ledgers", str(ledgers)]
            options += [] if postgres else ["--no-postgres"]
            options += ["--demand-credentials"] if demand_credentials else []
            show(running.detach(data, options))
            return
        run(
            running.run(
                data,
                planners=planners,
                gateways=gateways,
                ledgers=ledgers,
                nats_port=port,
                postgres=postgres,
                demand_credentials=demand_credentials,
                told=lambda text: err.print(text, style="dim"),
                ready=show,
            )
        )
    except running.AlreadyUpError as error:
        if as_json:
            emit({"error": {"reason": "already_up", "detail": str(error), "state": error.state}})
        err.print(Text.assemble(("already up: ", "bold red"), str(error)))
        raise typer.Exit(REFUSED) from error


def _print_up(state: dict[str, Any], *, detached: bool) -> None:
    out.print(f"NATS        {state['nats_url']}  (monitor {state['nats_monitor_url']})")
    if state["postgres_port"] is not None:
        out.print(f"PostgreSQL  127.0.0.1:{state['postgres_port']}")
    for name, service in state["services"].items():
        out.print(f"{name:<11} {service['http_url']}  (pid {service['pid']})")
    out.print(f"data        {state['data']}")
    if detached:
        out.print("stop it with: fencepost down --data " + str(state["data"]))
    else:
        out.print("ready; Ctrl-C stops everything")


@app.command()
def down(data: Data = DATA) -> None:
    """Stop the stack that runs on this folder."""
    from fencepost.client import up as running

    if not running.down(data):
        err.print(f"nothing runs on {data}")


@app.command()
def doctor(data: Data = DATA, as_json: AsJson = False) -> None:
    """Check what this machine offers and say what to do about what it lacks."""
    from fencepost.client import doctor as examination

    found = []
    for check in examination.checks(data):
        found.append(check)
        if not as_json:
            colour = {"ok": "green", "warning": "yellow", "failed": "red"}[check.status]
            out.print(Text.assemble((f"{check.status:<8}", colour), f"{check.name}: {check.found}"))
            if check.todo:
                out.print(f"        -> {check.todo}")
    if as_json:
        emit(found)
    if any(check.status == "failed" for check in found):
        raise typer.Exit(TOOL_FAILED)


@app.command()
def demo(
    as_json: AsJson = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the demo's folder.")] = False,
) -> None:
    """The counterexamples on real processes: a late 200, and a cancel of shared sandboxes."""
    from fencepost.client import demo as acts

    succeeded = run(acts.play(as_json=as_json, keep=keep, out=out, err=err))
    if not succeeded:
        raise typer.Exit(TOOL_FAILED)


# Everything after these two words is theirs, --help too.
PASSED_ON: Final = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


@app.command(context_settings=PASSED_ON)
def sim(context: typer.Context) -> None:
    """Run the deterministic simulator on fresh seeds, or replay one (see `sim --help`)."""
    from fencepost.simulator import __main__ as simulator

    sys.argv[0] = "fencepost sim"
    raise typer.Exit(simulator.main(context.args))


@app.command(context_settings=PASSED_ON)
def bench(context: typer.Context) -> None:
    """Measure steps per second beside a plain task queue (from a checkout: see bench/)."""
    import runpy

    root = Path.cwd() / "bench"
    if not (root / "__main__.py").is_file():
        raise RefusedError(
            "no_bench", "bench/: run this from a checkout, where bench/ is", field="bench"
        )
    sys.argv = ["fencepost bench", *context.args]
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module("bench", run_name="__main__")


# Sandboxes


@sandbox_app.command("create")
def sandbox_create(
    name: Annotated[str | None, typer.Argument(help="Its id; made up when left out.")] = None,
    provider: Annotated[str, typer.Option(help="What makes it.")] = "process",
    image: Annotated[str, typer.Option(help="Image, where the provider takes one.")] = "",
    network: Annotated[bool, typer.Option("--network", help="Let it use the network.")] = False,
    memory_mb: Annotated[int, typer.Option(help="Memory of its tools, MiB.")] = 512,
    processes: Annotated[int, typer.Option(help="Processes of its tools.")] = 128,
    rebuild: Annotated[bool, typer.Option(help="Replace a lost generation.")] = True,
    checkpoint_steps: Annotated[
        int, typer.Option("--checkpoint-every-steps", help="0: never by itself.")
    ] = 0,
    checkpoint_s: Annotated[
        int, typer.Option("--checkpoint-every-s", help="0: never by itself.")
    ] = 0,
    recovery: Annotated[
        str,
        typer.Option(help="What becomes of committed steps that a new disk lacks: replay or tell."),
    ] = "replay",
    while_recovering: Annotated[
        str, typer.Option(help="What becomes of new steps meanwhile: wait or refuse.")
    ] = "wait",
    wait: Annotated[bool, typer.Option(help="Wait until it is live.")] = True,
    timeout: Timeout = 60.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Create a sandbox, held until it is released; prints its id."""
    spec = commands.spec_of(
        {
            "provider": provider,
            "image": image,
            "network": network,
            "memory_mb": memory_mb,
            "processes": processes,
            "rebuild": rebuild,
            "checkpoint_every_steps": checkpoint_steps,
            "checkpoint_every_s": checkpoint_s,
            "recovery": recovery,
            "while_recovering": while_recovering,
        }
    )

    async def work() -> dict[str, Any]:
        async with await Client.connect(url) as client:
            sandbox = await client.create_sandbox(
                name, spec, wait=wait, timeout_s=timeout, say=lambda text: err.print(Text(text))
            )
            return await client.show(sandbox) if wait else {"sandbox": sandbox}

    found = run(work())
    if as_json:
        emit(found)
    else:
        out.print(found["sandbox"])


@sandbox_app.command("reclaim")
def sandbox_reclaim(
    sandbox: SandboxId,
    wait: Annotated[bool, typer.Option(help="Wait for the next generation.")] = True,
    timeout: Timeout = 60.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Take a sandbox away with its disk, by kill -9, as a preemption would (embedded stack)."""

    async def work() -> dict[str, Any]:
        async with await Client.connect(url) as client:
            return await client.reclaim(sandbox, wait=wait, timeout_s=timeout)

    found = run(work())
    if as_json:
        emit(found)
    elif wait:
        out.print(f"{sandbox} is live at epoch {found['epoch']}")
    else:
        out.print(f"{sandbox} was taken away at epoch {found['epoch']}")


@sandbox_app.command("release")
def sandbox_release(
    sandbox: SandboxId,
    wait: Annotated[bool, typer.Option(help="Wait until it is gone.")] = True,
    timeout: Timeout = 60.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """End the operator's hold on a sandbox; the last hold releases it."""

    async def work() -> dict[str, Any]:
        async with await Client.connect(url) as client:
            return await client.release(sandbox, wait=wait, timeout_s=timeout)

    found = run(work())
    if as_json:
        emit(found)
    else:
        out.print(f"{sandbox} is {found['state']}")


@sandbox_app.command("list")
def sandbox_list(url: Url = None, as_json: AsJson = False) -> None:
    """List all sandboxes."""

    async def work() -> list[dict[str, Any]]:
        async with await Client.connect(url) as client:
            return await client.list_sandboxes()

    found = run(work())
    if as_json:
        emit(found)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("sandbox", "state", "epoch", "provider", "open steps", "committed", "held by"):
        table.add_column(column, no_wrap=True)
    for item in found:
        table.add_row(
            item["sandbox"],
            item["state"],
            str(item["epoch"]),
            item["provider"],
            str(item["open_steps"]),
            str(item["committed"]),
            ", ".join([*item["holders"], *item["claims"]]),
        )
    out.print(table)


@sandbox_app.command("show")
def sandbox_show(sandbox: SandboxId, url: Url = None, as_json: AsJson = False) -> None:
    """Show what the owner of its shard says of a sandbox."""

    async def work() -> dict[str, Any]:
        async with await Client.connect(url) as client:
            return await client.show(sandbox)

    print_object(run(work()), as_json=as_json)


# Steps

Arg = Annotated[list[str] | None, typer.Option("--arg", "-a", help="name=value; may be repeated.")]


@step_app.command("run")
def step_run(
    sandbox: SandboxId,
    tool: Annotated[str, typer.Argument(help="write_file, apply_patch, run_command, …")],
    argv: Annotated[list[str] | None, typer.Argument(help="After --: a command's argv.")] = None,
    arg: Arg = None,
    json_: Annotated[
        str | None, typer.Option("--json", help="Arguments as a JSON object; - reads them.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", help="File with the content or patch; - reads it.")
    ] = None,
    undo: Annotated[
        str | None, typer.Option("--undo", help="Shell line that takes the effect back.")
    ] = None,
    step: Annotated[
        str | None, typer.Option("--step", help="Its id; made up when left out.")
    ] = None,
    on_moved_epoch: Annotated[str, typer.Option(help="retry or reject.")] = "retry",
    attempts_max: Annotated[int | None, typer.Option(help="Tries at most.")] = None,
    deadline_ms: Annotated[int | None, typer.Option(help="From admission on.")] = None,
    commit_after: Annotated[
        str, typer.Option("--commit-after", help="receipt, heartbeat or checkpoint.")
    ] = "receipt",
    effect: Annotated[str, typer.Option(help="workspace or external.")] = "workspace",
    readonly: Annotated[
        bool, typer.Option("--readonly", help="The command changes nothing.")
    ] = False,
    timeout: Timeout = 300.0,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
    url: Url = None,
) -> None:
    """
    Run one mutating tool call and wait for its end.

    Exit code: 0 committed, 1 committed but the tool failed, 2 usage or refused, 3 not committed,
    4 indeterminate, 5 unknown (no answer in time; ask again with the same --step).
    """
    args = arguments.tool_arguments(tool, pairs=arg or [], text=json_, file=file, argv=argv or [])
    options: dict[str, Any] = {
        "step": step,
        "on_moved_epoch": on_moved_epoch,
        "attempts_max": attempts_max,
        "deadline_ms": deadline_ms,
        "commit_after": commit_after,
        "effect": effect,
        "timeout_s": timeout,
    }

    async def work() -> StepOutcome | ReadResult:
        async with await Client.connect(url) as client:
            if tool == "run_command":
                return await client.run_command(
                    sandbox, args, undo=undo, readonly=readonly, **options
                )
            compensation = None
            if undo is not None:
                compensation = {"kind": "command", "args": commands.command_arguments(undo)}
            return await client.step(sandbox, tool, args, compensation=compensation, **options)

    raise typer.Exit(_print_outcome(run(work()), as_json=format_ == "json"))


def _print_outcome(found: StepOutcome | ReadResult, *, as_json: bool) -> int:
    if isinstance(found, ReadResult):
        if as_json:
            emit({"state": "read", "epoch": found.epoch, "result": found.result})
        else:
            _print_result(found.result)
        return OK
    code = {
        "committed": OK if found.is_ok else TOOL_FAILED,
        "compensated": NOT_COMMITTED,
        "indeterminate": INDETERMINATE,
    }[found.state]
    if as_json:
        emit(outcome_object(found))
        return code
    colour = "green" if code == OK else "red"
    tries = f" at attempt {found.attempts}" if found.attempts > 1 else ""
    where = f" at epoch {found.epoch}" if found.epoch else ""
    line = Text.assemble((found.state, colour), f" {found.step}{where}{tries}")
    if found.state == "committed" and not found.is_ok:
        line.append(f"; the tool failed{_said(found.result)}")
    if found.reason:
        line.append(f": {found.reason}")
    if found.detail:
        line.append(f" ({found.detail})")
    if found.evidence:
        line.append(f", evidence {found.evidence}")
    err.print(line)
    if found.state == "committed":
        _print_result(found.result)
    return code


def _said(result: Any) -> str:
    """What a failed tool says of itself, where it says it in a way known here."""
    if not isinstance(result, dict):
        return ""
    if isinstance(result.get("error"), str):
        return f": {result['error']}"
    return f": exit code {result['exit_code']}" if "exit_code" in result else ""


def outcome_object(found: StepOutcome) -> dict[str, Any]:
    """A step's outcome for machines."""
    return {
        "sandbox": found.sandbox,
        "step": found.step,
        "state": found.state,
        "attempts": found.attempts,
        "epoch": found.epoch,
        "outcome": found.outcome,
        "result": found.result,
        "reason": found.reason,
        "detail": found.detail,
        "evidence": found.evidence,
        "position": found.position,
    }


def _print_result(result: Any) -> None:
    if isinstance(result, dict) and isinstance(result.get("stdout"), str):
        sys.stdout.write(result["stdout"])
        sys.stderr.write(str(result.get("stderr", "")))
    elif isinstance(result, dict) and isinstance(result.get("content"), str):
        sys.stdout.write(result["content"])
    elif result is not None:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
    sys.stdout.flush()


@step_app.command("show")
def step_show(sandbox: SandboxId, step: StepId, url: Url = None, as_json: AsJson = False) -> None:
    """Show what the owner of its shard says of a step."""

    async def work() -> dict[str, Any]:
        async with await Client.connect(url) as client:
            return await client.show_step(sandbox, step)

    print_object(run(work()), as_json=as_json)


@step_app.command("cancel")
def step_cancel(
    sandbox: SandboxId,
    step: StepId,
    reason: Annotated[str, typer.Option(help="Recorded.")] = "",
    timeout: Timeout = 60.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """
    Cancel a step and wait for its end.

    Exit code 0 when it ended uncommitted, 1 when it had committed before, 4 when indeterminate.
    """

    async def work() -> StepOutcome:
        async with await Client.connect(url) as client:
            return await client.cancel(sandbox, step, reason=reason, timeout_s=timeout)

    found = run(work())
    _print_outcome(found, as_json=as_json)
    code = {"compensated": OK, "committed": TOOL_FAILED, "indeterminate": INDETERMINATE}
    raise typer.Exit(code[found.state])


@step_app.command("resolve")
def step_resolve(
    sandbox: SandboxId,
    step: StepId,
    as_: Annotated[str, typer.Option("--as", help="committed or compensated.")],
    who: Annotated[str, typer.Option(help="Who says so; recorded.")],
    note: Annotated[str, typer.Option(help="How it was found out; recorded.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Close an indeterminate step by an operator's word."""
    if as_ not in ("committed", "compensated"):
        raise RefusedError(
            "bad_arguments", f"--as: expected committed or compensated, got {as_!r}", field="--as"
        )

    state = cast("Literal['committed', 'compensated']", as_)

    async def work() -> str:
        async with await Client.connect(url) as client:
            return await client.resolve(sandbox, step, state, who=who, note=note)

    found = run(work())
    if as_json:
        emit({"sandbox": sandbox, "step": step, "state": found})
    else:
        out.print(f"{step} is {found}")


@app.command()
def read(
    sandbox: SandboxId,
    tool: Annotated[str, typer.Argument(help="read_file, list_dir, search, stat, run_command")],
    argv: Annotated[list[str] | None, typer.Argument(help="After --: a command's argv.")] = None,
    arg: Arg = None,
    epoch_min: Annotated[int, typer.Option(help="Below it the answer is unknown.")] = 0,
    timeout: Timeout = 30.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Run a read-only tool: one request, no step. `fencepost read sbx read_file -a path=a.txt`."""
    args = arguments.tool_arguments(tool, pairs=arg or [], text=None, file=None, argv=argv or [])

    async def work() -> ReadResult:
        async with await Client.connect(url) as client:
            return await client.read(sandbox, tool, args, epoch_min=epoch_min, timeout_s=timeout)

    found = run(work())
    if as_json:
        emit({"epoch": found.epoch, "session": found.session, "result": found.result})
    else:
        _print_result(found.result)


# History


@app.command()
def replay(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", help="The sandbox's id.")] = "",
    dag: Annotated[str, typer.Option("--dag", help="Tell a DAG's instead.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows.")] = False,
    draw: Annotated[Path | None, typer.Option(help="Draw it as a page, in this file.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """
    Tell a sandbox's ledger as a timeline, or a DAG's.

    Exit code 2 where there is none: what is told then are commands that were refused.
    """
    from fencepost.client import drawn, timeline

    if bool(sandbox) == bool(dag):
        raise RefusedError("bad_arguments", "name a sandbox, or a DAG with --dag", field="SANDBOX")
    if draw is not None and (follow or as_json):
        raise RefusedError("bad_arguments", "--draw alone: it draws what there is", field="draw")

    async def work() -> int:
        if draw is not None:
            said = await drawn.write(url, draw, sandbox=sandbox, dag=dag)
            if said is not None:
                out.print(said, soft_wrap=True, highlight=False)
            return int(said is not None)
        count = 0
        async with await Client.connect(url) as client:
            told = (
                timeline.dag_lines(client, dag, follow=follow)
                if dag
                else timeline.lines(client, sandbox, follow=follow)
            )
            async for line in told:
                count += line.kind != "refused"
                if as_json:
                    emit(line)
                else:
                    print_line(out, line)
        return count

    if not run(work()):
        kind = "dag" if dag else "sandbox"
        raise RefusedError(
            f"unknown_{kind}",
            f"{kind}: there never was a {'DAG' if dag else kind} {dag or sandbox!r};"
            " the ledger has at most refusals of commands to it",
            field=kind,
        )


_COLOURS: Final = {
    "committed": "green",
    "epoch_opened": "bold cyan",
    "epoch_closed": "bold yellow",
    "receipt_refused": "red",
    "refused": "red",
    "compensated": "yellow",
    "indeterminate": "magenta",
    "checkpointed": "cyan",
    "checkpoint_failed": "yellow",
    "restored": "cyan",
    "replayed": "cyan",
    "recovered": "bold cyan",
    "owed": "yellow",
    "recovery_stopped": "bold red",
}


def print_line(console: Console, line: Any) -> None:
    """One line of a timeline: time, epoch, what happened."""
    time = line.at[11:23]
    epoch = f"epoch {line.epoch}" if line.epoch else ""
    text = (line.text, _COLOURS.get(line.kind, ""))
    console.print(
        Text.assemble(
            (f"{time}  ", "dim"),
            f"{epoch:<9}",
            ("│ ", "dim"),
            text,
        )
    )


@app.command()
def verify(url: Url = None, as_json: AsJson = False) -> None:
    """Fold the whole recorded ledger from its first entry and check every invariant."""
    from fencepost.client import verify as verification

    async def work() -> Any:
        async with await Client.connect(url) as client:
            return await verification.verify(client)

    report = run(work())
    if as_json:
        emit(report)
    else:
        for violation in report.violations:
            out.print(Text.assemble((f"{violation.invariant}: ", "bold red"), str(violation)))
        verdict = "clean" if report.is_clean else f"{len(report.violations)} violations"
        out.print(
            f"{verdict}: {report.batches} batches, {report.entries} entries,"
            f" {report.sandboxes} sandboxes, {report.dags} DAGs, {report.committed} committed"
        )
    if not report.is_clean:
        raise typer.Exit(TOOL_FAILED)


def print_object(found: dict[str, Any], *, as_json: bool) -> None:
    """A view for people, a field a line; or as one JSON value."""
    if as_json:
        emit(found)
        return
    width = max(len(name) for name in found)
    for name, value in found.items():
        shown = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        out.print(Text(f"{name:<{width}}  {shown}"))


# These add themselves to `app`, with what stands above.
from fencepost.client import (  # noqa: E402
    claim_commands,  # noqa: F401
    dag_commands,  # noqa: F401
    deploy_commands,  # noqa: F401
    import_commands,  # noqa: F401
    recovery_commands,  # noqa: F401
    reshard_commands,  # noqa: F401
    sweep_commands,  # noqa: F401
)
