"""The sandbox machine: the whole family behind the one protocol of `core.machine`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec
from fencepost.core import facts, ids, limits
from fencepost.core.decoding import field_in
from fencepost.core.errors import LedgerBrokenError, PoisonedError
from fencepost.core.machine import Effect, Event, Message, Place, TermOpened
from fencepost.core.sandbox import (
    admission,
    checkpoints,
    effects,
    evolve,
    holding,
    inputs,
    life,
    outcomes,
    owed,
    recovery,
    views,
)
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.hints import Hints
from fencepost.core.sandbox.state import Sandbox, SandboxShard
from fencepost.core.shard_messages import Hold, Told, Unhold
from fencepost.core.steps import (
    CancelCommand,
    CheckpointCommand,
    ClaimCommand,
    RecoverCommand,
    ReleaseCommand,
    ResolveCommand,
    SandboxCommand,
    StepCommand,
    UnclaimCommand,
    canonical,
    digest_of,
)

_COMMANDS: dict[str, Any] = {
    "step": msgspec.json.Decoder(StepCommand),
    "create": msgspec.json.Decoder(SandboxCommand),
    "cancel": msgspec.json.Decoder(CancelCommand),
    "resolve": msgspec.json.Decoder(ResolveCommand),
    "release": msgspec.json.Decoder(ReleaseCommand),
    "claim": msgspec.json.Decoder(ClaimCommand),
    "unclaim": msgspec.json.Decoder(UnclaimCommand),
    "checkpoint": msgspec.json.Decoder(CheckpointCommand),
    "recover": msgspec.json.Decoder(RecoverCommand),
}


class _Pack(msgspec.Struct):
    steps: list[msgspec.Raw]


class _Names(msgspec.Struct):
    sandbox: str = ""
    step: str = ""


_PACK = msgspec.json.Decoder(_Pack)
_NAMES = msgspec.json.Decoder(_Names)
_ENTRIES = msgspec.json.Decoder(list[e.SandboxEntry])
_FACTS = msgspec.json.Decoder(facts.Fact)
_MESSAGES = msgspec.json.Decoder(Hold | Unhold)
_ENCODER = msgspec.json.Encoder()


class SandboxMachine:
    """One shard's machine. `hints` carry the bounds in time, so that tests may shorten them."""

    family: ClassVar[str] = "sandbox"
    version: ClassVar[int] = 2

    def __init__(
        self,
        *,
        lease_ms: int = limits.LEASE_MS,
        gateway_silent_ms: int = limits.GATEWAY_SILENT_MS,
    ) -> None:
        self.lease_ms = lease_ms
        self.gateway_silent_ms = gateway_silent_ms

    def initial(self, shard: int, shards: int) -> SandboxShard:
        return SandboxShard(shard=shard, shards=shards)

    def new_hints(self) -> Hints:
        return Hints(lease_ms=self.lease_ms, gateway_silent_ms=self.gateway_silent_ms)

    # --- inputs ---------------------------------------------------------------------------

    def decode(self, source: str, subject: str, data: bytes) -> Sequence[Any]:
        """
        Decodes commands (`source` "commands" or "now"), facts and dag shards' messages.

        A command's last three subject tokens are its kind, its sandbox and its id.
        """
        if source == "facts":
            try:
                fact = _FACTS.decode(data)
            except msgspec.MsgspecError as error:
                raise PoisonedError(f"not a fact: {error}") from error
            # Who may say which kind is granted by subject: a sweeper that says `lost` under the
            # subject of a proposal must not be believed.
            if not subject.endswith(f".{fact.sandbox}.{fact.__struct_config__.tag}"):
                raise PoisonedError("a fact of another sandbox or kind than its subject says")
            return [fact]
        if source == "messages":
            try:
                return [_MESSAGES.decode(data)]
            except msgspec.MsgspecError as error:
                raise PoisonedError(f"not a message to a sandbox shard: {error}") from error
        tokens = subject.split(".")
        if len(tokens) < 3:
            raise PoisonedError(f"not the subject of a command: {subject!r}")
        kind, aggregate, id_ = tokens[-3:]
        if kind == "batch":
            try:
                pack = _PACK.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise PoisonedError(f"not a pack of commands: {error}") from error
            return [_packed(raw) for raw in pack.steps]
        if kind not in _COMMANDS:
            raise PoisonedError(f"not a kind of command: {kind!r}")
        return [_command(kind, aggregate, id_, data)]

    def poison(self, source: str, subject: str, seq: int, detail: str) -> inputs.Poison:
        return inputs.Poison(source=source, subject=subject, seq=seq, detail=detail[:500])

    def tick(self) -> inputs.Tick:
        return inputs.Tick()

    def take_hint(self, state: SandboxShard, hints: Hints, value: Any, now_ms: int) -> bool:
        hints.latest_ms = max(hints.latest_ms, now_ms)
        match value:
            case inputs.Heartbeats():
                for beat in value.beats:
                    sandbox = state.sandboxes.get(beat.sandbox)
                    if sandbox is not None:
                        hints.heartbeat(sandbox, beat, now_ms)
            case inputs.Heartbeat():
                sandbox = state.sandboxes.get(value.sandbox)
                if sandbox is not None:
                    hints.heartbeat(sandbox, value, now_ms)
            case inputs.GatewaySeen():
                hints.gateway_seen(value, now_ms)
            case _:
                return False
        return True

    # --- the decision ---------------------------------------------------------------------

    def decide(
        self, state: SandboxShard, hints: Hints, value: Any, now_ms: int
    ) -> Sequence[e.SandboxEntry]:
        hints.latest_ms = max(hints.latest_ms, now_ms)
        match value:
            case inputs.ReceiptReceived():
                return outcomes.receipt(state, value)
            case inputs.CommandReceived():
                return self._decide_command(state, hints, value, now_ms)
            case inputs.Tick():
                return _tick(state, hints, now_ms)
            case Hold():
                return holding.hold(state, hints, value, now_ms)
            case Unhold():
                return holding.unhold(state, value)
            case inputs.OwedStep() | inputs.OwedPage() | inputs.OwedEnd():
                return _owed(state, value)
            case inputs.CommandMalformed():
                return admission.malformed(value)
            case inputs.Poison():
                return [
                    e.Refused(
                        sandbox="",
                        command=value.source,
                        id=str(value.seq),
                        reason="poison",
                        field=value.subject[:200],
                        detail=value.detail,
                    )
                ]
            case _:
                return life.fact(state, hints, value, now_ms)

    def _decide_command(
        self, state: SandboxShard, hints: Hints, value: inputs.CommandReceived, now_ms: int
    ) -> Sequence[e.SandboxEntry]:
        match value.command:
            case StepCommand() as command:
                return admission.admit(state, value, command, now_ms)
            case SandboxCommand() as command:
                return life.create(state, hints, value, command, now_ms)
            case CancelCommand() as command:
                return outcomes.cancel(state, value, command)
            case ResolveCommand() as command:
                return outcomes.resolve(state, value, command)
            case ReleaseCommand():
                return life.release(state, value)
            case ClaimCommand() as command:
                return holding.claim(state, value, command)
            case UnclaimCommand():
                return holding.end_claim(state, value)
            case CheckpointCommand() as command:
                return checkpoints.ask(state, value, command)
            case RecoverCommand() as command:
                return recovery.decide(state, value, command)

    def evolve(self, state: SandboxShard, entry: e.SandboxEntry, place: Place, now_ms: int) -> None:
        evolve.evolve(state, entry, place, now_ms)

    def next_due_ms(self, state: SandboxShard, hints: Hints) -> int | None:
        if not hints.synced or hints.unsettled or hints.to_check:
            return 0
        due = hints.due[0][0] if hints.due else None
        if not state.sandboxes:
            return due
        return hints.check_at_ms if due is None else min(due, hints.check_at_ms)

    # --- what follows ---------------------------------------------------------------------

    def effects_of(
        self, state: SandboxShard, hints: Hints, entry: e.SandboxEntry
    ) -> Iterable[Effect]:
        return effects.effects_of(state, hints, entry)

    def effects(self, state: SandboxShard, hints: Hints, now_ms: int) -> Iterable[Effect]:
        return effects.effects(state, hints, now_ms)

    def events_of(self, entry: e.SandboxEntry) -> Iterable[Event]:
        return effects.events_of(entry)

    def messages_of(self, entry: e.SandboxEntry) -> Iterable[Message]:
        if type(entry) is not e.ToldEntry:
            return ()
        told = Told(
            dag=entry.dag,
            acquisition=entry.acquisition,
            sandbox=entry.sandbox,
            phase=entry.phase,
            reason=entry.reason,
            evidence=entry.evidence,
            epoch=entry.epoch,
            ref=entry.ref,
        )
        return (Message("dag", entry.dag, msgspec.to_builtins(told)),)

    def wanted(self, state: SandboxShard) -> list[owed.Wanted]:
        """What is waited for of the ledger's past: the owner reads it there and feeds it."""
        found = (owed.wanted(state.sandboxes[name]) for name in state.busy)
        return [one for one in found if one is not None]

    view_step = staticmethod(views.view_step)
    view_sandbox = staticmethod(views.view_sandbox)
    view_sandboxes = staticmethod(views.view_sandboxes)
    view_sweep = staticmethod(views.view_sweep)
    place_of_final = staticmethod(views.place_of_final)

    # --- bytes ----------------------------------------------------------------------------

    def encode_entries(self, entries: Sequence[e.SandboxEntry]) -> bytes:
        return _ENCODER.encode(entries)

    def decode_entries(self, data: bytes) -> Sequence[e.SandboxEntry]:
        try:
            return _ENTRIES.decode(data)
        except msgspec.MsgspecError as error:
            raise LedgerBrokenError(f"an entry that this version cannot read: {error}") from error

    def encode_state(self, state: SandboxShard) -> bytes:
        return _ENCODER.encode(state)

    def decode_state(self, data: bytes) -> SandboxShard:
        return msgspec.json.decode(data, type=SandboxShard)

    def term_opened(self, term: int, owner: str, shards: int, hash_: str) -> TermOpened:
        return TermOpened(term=term, owner=owner, shards=shards, hash=hash_, machine=self.version)


def _tick(state: SandboxShard, hints: Hints, now_ms: int) -> Sequence[e.SandboxEntry]:
    """
    One thing that time has made due, or nothing. The runtime ticks again while something is due.

    One at a time, because each decision must see what the former one changed.
    """
    hints.sync(state)
    while hints.unsettled:
        sandbox = state.sandboxes.get(next(iter(hints.unsettled)))
        settled = [] if sandbox is None else _settle(hints, sandbox, now_ms)
        if settled:
            return settled  # this sandbox is looked at once more: there may be more to settle
        hints.unsettled.pop(next(iter(hints.unsettled)))
    while hints.due and hints.due[0][0] <= now_ms:
        _, sandbox_id, name = hints.pop_due()
        sandbox = state.sandboxes.get(sandbox_id)
        step = sandbox.steps.get(name) if sandbox is not None else None
        if sandbox is None or step is None or step.phase == "indeterminate" or step.ended:
            continue
        if step.spec.deadline_at_ms > now_ms:
            continue  # an older step of the same id, in another life of this heap
        return outcomes.stop_step(sandbox, name, step, "deadline")
    if not hints.to_check and now_ms >= hints.check_at_ms:
        # What ended is remembered, and owes nothing: a cancel must not wait for a look at it.
        hints.to_check = [name for name in state.sandboxes if name not in state.ended]
        hints.check_at_ms = now_ms + max(hints.lease_ms // 10, 20)
    while hints.to_check:
        sandbox = state.sandboxes.get(hints.to_check[-1])
        overdue = [] if sandbox is None else life.overdue(hints, sandbox, now_ms)
        if overdue:
            return overdue  # this sandbox is looked at once more: it may owe another
        hints.to_check.pop()
    return ()


def _settle(hints: Hints, sandbox: Sandbox, now_ms: int) -> Sequence[e.SandboxEntry]:
    """What a new session, a heartbeat or an ended hold makes due in one sandbox, or nothing."""
    if not sandbox.live:
        return ()
    if sandbox.recovering is not None:
        return recovery.settle(sandbox)
    return (
        outcomes.settle_on_same_disk(sandbox, now_ms)
        or checkpoints.beaten(sandbox, hints)
        or checkpoints.due(sandbox, now_ms)
    )


def _owed(
    state: SandboxShard, value: inputs.OwedStep | inputs.OwedPage | inputs.OwedEnd
) -> Sequence[e.SandboxEntry]:
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return ()
    match value:
        case inputs.OwedStep():
            return recovery.owed_step(sandbox, value)
        case inputs.OwedPage():
            return recovery.owed_page(sandbox, value)
        case inputs.OwedEnd():
            return recovery.owed_end(sandbox, value)


def _command(kind: str, aggregate: str, id_: str, data: bytes) -> Any:
    def malformed(reason: str, field: str, detail: str) -> inputs.CommandMalformed:
        return inputs.CommandMalformed(
            sandbox=aggregate, id=id_, command=kind, reason=reason, field=field, detail=detail
        )

    try:
        command = _COMMANDS[kind].decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return malformed("malformed", field_in(str(error)), str(error))
    for field, given, want in (
        ("sandbox", command.sandbox, aggregate),
        ("step", getattr(command, "step", ""), id_),
    ):
        if given and given != want:
            return malformed(
                "mismatch", field, f"the subject says {want!r}, the body says {given!r}"
            )
    about = "step" if kind in ("step", "cancel", "resolve") else "id"
    for field, value in (("sandbox", aggregate), (about, id_)):
        if not ids.is_id(value):
            return malformed("bad_id", field, f"expected {ids.ID_PATTERN}")
    if kind != "step":
        dag = getattr(command, "dag", "")
        if dag and not ids.is_id(dag):
            return malformed("bad_id", "dag", f"expected {ids.ID_PATTERN}")
        return inputs.CommandReceived(sandbox=aggregate, id=id_, command=command)
    # Canonical bytes from here on: they are digested, sent to the disk and compared.
    try:
        args = canonical(msgspec.json.decode(command.args))
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        return malformed("malformed", "args", f"expected a JSON object: {error}")
    command = msgspec.structs.replace(command, args=msgspec.Raw(args))
    return inputs.CommandReceived(
        sandbox=aggregate, id=id_, command=command, digest=digest_of(args)
    )


def _packed(raw: msgspec.Raw) -> Any:
    data = bytes(raw)
    try:
        names = _NAMES.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return inputs.CommandMalformed(
            sandbox="", id="", command="step", reason="malformed", field="steps", detail=str(error)
        )
    return _command("step", names.sandbox, names.step, data)
