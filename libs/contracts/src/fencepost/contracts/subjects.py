"""
Every subject, built by functions and parsed back. No other module spells a subject.

All ids in subjects are checked with `ids.is_id` before they get here; a wrong one raises
`RefusedError` naming the field, so nothing half-built is ever published.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fencepost.core import ids
from fencepost.core.errors import RefusedError

PREFIX: Final = "fp.v1"

COMMANDS: Final = f"{PREFIX}.cmd.*.*.*"
"""What clients publish: `fp.v1.cmd.<kind>.<aggregate>.<id>`."""

COMMAND_KINDS: Final = (
    "step",
    "create",
    "cancel",
    "resolve",
    "release",
    "claim",
    "unclaim",
    "checkpoint",
    "recover",
    "batch",
)
"""Those of the sandbox family."""

DAG_COMMAND: Final = "dag"
"""The one kind of the dag family: what is asked stands in the body (`core.dag.commands`)."""


def _token(field: str, value: str) -> str:
    if not ids.is_id(value):
        shown = value if isinstance(value, str) and len(value) <= 80 else repr(value)[:80]
        raise RefusedError(
            "bad_id",
            f"{field}: expected an id matching {ids.ID_PATTERN}, got {shown!r}",
            field=field,
            expected=ids.ID_PATTERN,
        )
    return value


class Command(NamedTuple):
    """A command's subject, as the server mapped it: `fp.v1.in.<shard>.<kind>.<aggregate>.<id>`."""

    shard: int
    kind: str
    aggregate: str
    id: str


def command(kind: str, aggregate: str, id_: str) -> str:
    """Where a client publishes a durable command; the server maps it to its shard."""
    return f"{PREFIX}.cmd.{kind}.{_token('sandbox', aggregate)}.{_token('id', id_)}"


def command_transform(shards: int) -> tuple[str, str]:
    """The subject transform of the commands' stream (source, destination)."""
    return (
        COMMANDS,
        f"{PREFIX}.in.{{{{partition({shards},2)}}}}.{{{{wildcard(1)}}}}.{{{{wildcard(2)}}}}.{{{{wildcard(3)}}}}",
    )


def commands_of_shard(shard: int) -> list[str]:
    """The filter of a sandbox shard's commands, as stored."""
    return [f"{PREFIX}.in.{shard}.{kind}.*.*" for kind in COMMAND_KINDS]


def commands_of_dag_shard(shard: int) -> list[str]:
    """The filter of a dag shard's commands, as stored."""
    return [f"{PREFIX}.in.{shard}.{DAG_COMMAND}.*.*"]


def parse_command(subject: str) -> Command:
    """Reads a stored command's subject back. Raises ValueError on any other subject."""
    parts = subject.split(".")
    if len(parts) != 7 or parts[:3] != ["fp", "v1", "in"]:
        raise ValueError(f"not a stored command's subject: {subject!r}")
    return Command(int(parts[3]), parts[4], parts[5], parts[6])


def now(shard: int) -> str:
    """
    Volatile commands, by core NATS, to a shard's owner: a JSON array of `contracts.messages.Now`.

    Not stored: whoever sends them repeats until the outcome comes.
    """
    return f"{PREFIX}.now.{shard}"


def ask(shard: int) -> str:
    """Questions to a shard's owner (`contracts.messages.Ask`), by core-NATS request."""
    return f"{PREFIX}.ask.{shard}"


def ask_dag(shard: int) -> str:
    """Questions to a dag shard's owner (`contracts.messages.AskDag`), by core-NATS request."""
    return f"{PREFIX}.askdag.{shard}"


FACTS: Final = f"{PREFIX}.fact.*.*"


def fact(sandbox: str, kind: str) -> str:
    """Where a gateway publishes a fact, durably."""
    return f"{PREFIX}.fact.{_token('sandbox', sandbox)}.{kind}"


def fact_transform(shards: int) -> tuple[str, str]:
    return (
        FACTS,
        f"{PREFIX}.infact.{{{{partition({shards},1)}}}}.{{{{wildcard(1)}}}}.{{{{wildcard(2)}}}}",
    )


def facts_of_shard(shard: int) -> list[str]:
    return [f"{PREFIX}.infact.{shard}.*.*"]


def receipts(shard: int) -> str:
    """Stamped receipts for a shard's owner: a JSON array of `StampedReceipt`. Core NATS (ADR 4)."""
    return f"{PREFIX}.receipt.{shard}"


def heartbeats(shard: int) -> str:
    """Heartbeats of a gateway's sandboxes in one shard (`core.sandbox.inputs.Heartbeats`)."""
    return f"{PREFIX}.heartbeat.{shard}"


GATEWAY_SEEN: Final = f"{PREFIX}.gateway.seen"
"""Every gateway session says here that it is alive (`core.sandbox.inputs.GatewaySeen`)."""


def orders(gateway: str) -> str:
    """Orders for one gateway session: a JSON array of `core.sandbox.orders.Order`."""
    return f"{PREFIX}.dispatch.{_token('gateway', gateway)}"


def gateway_list(gateway: str) -> str:
    """What a gateway's providers list, by core-NATS request (`contracts.messages.ListRequest`)."""
    return f"{PREFIX}.list.{_token('gateway', gateway)}"


SWEEP: Final = f"{PREFIX}.sweep"
"""
One census tick of the leading sweeper, by core-NATS request: looked at and counted, nothing
proposed. No body; answered by `contracts.messages.SweepReply`.
"""


def read(sandbox: str) -> str:
    """Read-only tools, by core-NATS request (`contracts.messages.ReadRequest`)."""
    return f"{PREFIX}.read.{_token('sandbox', sandbox)}"


def fault(sandbox: str) -> str:
    """Fault injection on the embedded stack: reclaim a sandbox as a preemption would."""
    return f"{PREFIX}.fault.{_token('sandbox', sandbox)}"


CHUNKS: Final = f"{PREFIX}.chunk.*.*"
"""Chunks of checkpoints: `fp.v1.chunk.<sandbox>.<sha256 in hex>`."""


def chunk(sandbox: str, digest: str) -> str:
    """Where a chunk is kept; `*` as the digest for all of a sandbox's."""
    return f"{PREFIX}.chunk.{_token('sandbox', sandbox)}.{digest}"


FAULT_AHEAD: Final = f"{PREFIX}.fault"
"""Faults for a sandbox that no gateway has attached yet: every gateway takes note."""


def ledger(family: str, shard: int) -> str:
    return f"{PREFIX}.ledger.{family}.{shard}"


LEDGER: Final = f"{PREFIX}.ledger.*.*"


def event_step(sandbox: str, step: str, state: str) -> str:
    return f"{PREFIX}.event.step.{sandbox}.{step}.{state}"


def event_sandbox(sandbox: str, kind: str) -> str:
    return f"{PREFIX}.event.sandbox.{sandbox}.{kind}"


def event_dag(dag: str, kind: str) -> str:
    """What happened to a DAG: an entry of its shard, except for its verdicts."""
    return f"{PREFIX}.event.dag.{dag}.{kind}"


def event_sweep(authority: str) -> str:
    """What a sweep of one authority saw and proposed (`core.sweeping.Report`)."""
    return f"{PREFIX}.event.sweep.{_token('authority', authority)}"


def release(dag: str) -> str:
    """Each verdict that was given on a DAG, and each change of it."""
    return f"{PREFIX}.release.{dag}"


EVENTS: Final = (f"{PREFIX}.event.>", f"{PREFIX}.release.*")


def message(family: str, shard: int) -> str:
    """Messages between shards, durable."""
    return f"{PREFIX}.message.{family}.{shard}"


MESSAGES: Final = f"{PREFIX}.message.*.*"
