"""
Admission: which commands become steps, and under what fence or in what queue.

Rule 1: what is refused here never becomes a step; the refusal is an entry with its reason.
Rule 2: a repeated id is compared by its arguments' digest: equal, it is the same step and makes
        no entry; different, it is refused. Ids older than the window are refused, not guessed at.
Rule 3: only a live epoch with an attached session gets a fence; everything else is parked.
"""

from __future__ import annotations

import msgspec
from fencepost.core import ids, limits, tools
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.inputs import CommandMalformed, CommandReceived
from fencepost.core.sandbox.state import Sandbox, SandboxShard
from fencepost.core.steps import Compensation, StepCommand, StepSpec, canonical, digest_of

# Longer than any id may be: what was cut is not taken for one that is valid.
_NAME_SHOWN = 80


def refuse(
    value: CommandReceived, command: str, reason: str, *, field: str = "", detail: str = ""
) -> list[e.SandboxEntry]:
    return [
        e.Refused(
            sandbox=value.sandbox,
            command=command,
            id=value.id,
            reason=reason,
            field=field[:200],
            detail=detail[:500],
            digest=value.digest,
        )
    ]


def malformed(value: CommandMalformed) -> list[e.SandboxEntry]:
    return [
        e.Refused(
            sandbox=value.sandbox[:_NAME_SHOWN],
            command=value.command[:_NAME_SHOWN],
            id=value.id[:_NAME_SHOWN],
            reason=value.reason,
            field=value.field[:200],
            detail=value.detail[:500],
        )
    ]


def unknown_sandbox(
    state: SandboxShard, value: CommandReceived, command: str
) -> list[e.SandboxEntry]:
    if ids.shard_of(value.sandbox, state.shards) != state.shard:
        return refuse(
            value,
            command,
            "misrouted",
            field="sandbox",
            detail=f"{value.sandbox!r} belongs to shard {ids.shard_of(value.sandbox, state.shards)}"
            f", this is shard {state.shard}",
        )
    if value.sandbox in state.forgotten:
        return refuse(value, command, "sandbox_released", field="sandbox", detail="it was released")
    return refuse(
        value,
        command,
        "unknown_sandbox",
        field="sandbox",
        detail=f"there is no sandbox {value.sandbox!r}; create it first",
    )


def used_before(state: SandboxShard, sandbox: str) -> str:
    """Why an id that this shard has no sandbox under cannot be a new one's, or ""."""
    if sandbox in state.forgotten:
        return "this id was used before"
    minted_ms = ids.ulid_ms(sandbox)
    if minted_ms is None:
        return "expected a ULID: too many names were used" if state.names_used_up else ""
    if minted_ms <= state.forgotten_floor_ms:
        return "this id is as old as ids that were used before: expected a fresh ULID"
    return ""


def admit(
    state: SandboxShard, value: CommandReceived, command: StepCommand, now_ms: int
) -> list[e.SandboxEntry]:
    """Decides a step command; see the rules above."""
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return unknown_sandbox(state, value, "step")
    repeated = _repeated(sandbox, value)
    if repeated is not None:
        return repeated
    if sandbox.releasing or sandbox.gone:
        return refuse(value, "step", "sandbox_released", field="sandbox", detail="it was released")
    problem = _problem(command)
    if problem is not None:
        return refuse(value, "step", problem[0], field=problem[1], detail=problem[2])
    if sandbox.capabilities is not None and not sandbox.capabilities.generation:
        return refuse(
            value,
            "step",
            "no_generation",
            field="sandbox",
            detail="its provider shows no generation, so no receipt could ever join",
        )
    if sandbox.recovering is not None and sandbox.spec.while_recovering == "refuse":
        detail = "committed work is being brought back; send the same step id again later"
        return refuse(value, "step", "recovering", field="sandbox", detail=detail)
    if (
        len(sandbox.parked) >= limits.PARKED_STEPS_PER_SANDBOX_MAX
        or state.open_steps >= limits.OPEN_STEPS_PER_SHARD_MAX
    ):
        return refuse(value, "step", "overloaded", detail="send the same step id again later")
    return _take(sandbox, value, spec_of(command, value.digest, now_ms))


def _repeated(sandbox: Sandbox, value: CommandReceived) -> list[e.SandboxEntry] | None:
    step = sandbox.steps.get(value.id)
    known = step.spec.digest if step is not None else None
    if known is None:
        finished = sandbox.finished.get(value.id)
        known = finished.digest if finished is not None else None
    if known is not None:
        if known == value.digest:
            return []
        return refuse(
            value,
            "step",
            "id_reused",
            field="step",
            detail="this step id was used with other arguments; a new call needs a new id",
        )
    minted_ms = ids.ulid_ms(value.id)
    if minted_ms is not None and minted_ms <= sandbox.finished_floor_ms:
        return refuse(
            value,
            "step",
            "too_old",
            field="step",
            detail=f"older than the last {limits.FINISHED_WINDOW} final steps of this sandbox",
        )
    return None


def _problem(command: StepCommand) -> tuple[str, str, str] | None:
    """The first thing wrong with a command: (reason, field, detail)."""
    args = msgspec.json.decode(command.args)
    fault = tools.check(command.tool, args)
    if fault is not None:
        reason = "unknown_tool" if fault.field == "tool" else "bad_arguments"
        return reason, fault.field, f"expected {fault.expected}: {fault.detail}"
    if tools.classify(command.tool) == "read_only":
        return "read_only_tool", "tool", "a read-only tool needs no step: send it as a read"
    if len(bytes(command.args)) > limits.INLINE_BYTES_MAX:
        return (
            "too_large",
            "args",
            f"expected at most {limits.INLINE_BYTES_MAX} bytes inline; larger ones by reference",
        )
    if command.commit_after != "receipt" and command.effect == "external":
        return "unsupported", "commit_after", "expected 'receipt': no disk holds an external effect"
    return _problem_of_bounds(command) or _problem_of_compensation(command)


def _problem_of_bounds(command: StepCommand) -> tuple[str, str, str] | None:
    attempts = command.attempts_max
    if attempts is not None and not 1 <= attempts <= limits.ATTEMPTS_MAX:
        return "out_of_range", "attempts_max", f"expected 1 to {limits.ATTEMPTS_MAX}"
    deadline = command.deadline_ms
    if deadline is not None and not limits.DEADLINE_MS_MIN <= deadline <= limits.DEADLINE_MS_MAX:
        return (
            "out_of_range",
            "deadline_ms",
            f"expected {limits.DEADLINE_MS_MIN} to {limits.DEADLINE_MS_MAX}",
        )
    return None


def _problem_of_compensation(command: StepCommand) -> tuple[str, str, str] | None:
    tool = tools.TABLE[command.tool]
    given = command.compensation
    if given is None:
        if tool.pre_image or command.tool == "run_migration":
            return None
        return (
            "no_compensation",
            "compensation",
            f'{command.tool} needs an undo: {{"kind": "command", "args": {{"argv": [...]}}}}',
        )
    if given.kind == "pre_image":
        if tool.pre_image:
            return None
        return "no_compensation", "compensation.kind", f"expected 'command' for {command.tool}"
    if bytes(given.args) == b"":
        return "no_compensation", "compensation.args", "expected the undo command's arguments"
    if len(bytes(given.args)) > limits.INLINE_BYTES_MAX:
        return (
            "too_large",
            "compensation.args",
            f"expected at most {limits.INLINE_BYTES_MAX} bytes",
        )
    try:
        undo = msgspec.json.decode(given.args)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        return "malformed", "compensation.args", f"expected a JSON object: {error}"
    fault = tools.check_undo(undo)
    if fault is not None:
        return "bad_arguments", fault.field, f"expected {fault.expected}: {fault.detail}"
    return None


def spec_of(command: StepCommand, digest: str, now_ms: int) -> StepSpec:
    """Fills in what the command left out; the deadline becomes absolute ledger time."""
    compensation = command.compensation
    if compensation is None and command.tool == "run_migration":
        down = msgspec.json.decode(command.args)["down"]
        compensation = Compensation(kind="command", args=msgspec.Raw(canonical(down)))
    return StepSpec(
        tool=command.tool,
        args=command.args,
        digest=digest,
        compensation=compensation or _PRE_IMAGE,
        attempts_max=command.attempts_max or limits.ATTEMPTS_MAX_DEFAULT,
        deadline_at_ms=now_ms + (command.deadline_ms or limits.DEADLINE_MS_DEFAULT),
        on_moved_epoch=command.on_moved_epoch,
        commit_after=command.commit_after,
        effect=command.effect,
    )


_DIGEST_OF_NOTHING = digest_of(b"")
_PRE_IMAGE = Compensation(kind="pre_image")


def _take(sandbox: Sandbox, value: CommandReceived, spec: StepSpec) -> list[e.SandboxEntry]:
    attempt = ids.attempt_id(value.id, 1)
    reason = why_parked(sandbox)
    if reason:
        return [
            e.Parked(
                sandbox=sandbox.id,
                step=value.id,
                attempt=attempt,
                ordinal=1,
                reason=reason,
                spec=spec,
            )
        ]
    return [
        e.Fenced(
            sandbox=sandbox.id,
            step=value.id,
            attempt=attempt,
            ordinal=1,
            no=sandbox.next_no,
            epoch=sandbox.epoch,
            session=sandbox.session,
            spec=spec,
        )
    ]


def why_parked(sandbox: Sandbox) -> str:
    """Why a new step of this sandbox has to wait, or "" when it has not."""
    if not sandbox.live:
        return "no_live_epoch"
    if sandbox.recovering is not None:
        return "recovering"
    if sandbox.parked or sandbox.requeued:
        return "behind_others"
    if sandbox.checkpointing is not None:
        return "checkpointing"
    if len(sandbox.fenced) >= limits.OPEN_STEPS_PER_SANDBOX_MAX:
        return "too_many_open"
    if sandbox.fences_ahead() >= limits.FENCES_AHEAD_MAX:
        return "far_ahead"  # of a step that is open still, which the journal must remember
    return ""


def undo_call(spec: StepSpec) -> tuple[str, msgspec.Raw, str]:
    """The tool, arguments and digest of a compensation; tool "" restores the pre-image."""
    if spec.compensation.kind == "pre_image":
        return "", msgspec.Raw(b"null"), _DIGEST_OF_NOTHING
    args = bytes(spec.compensation.args)
    return "run_command", spec.compensation.args, digest_of(args)
