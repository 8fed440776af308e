"""
The one table of streams and buckets. Servers, services, docs and grants are derived from it.

The ledger, commands, facts and messages are the truth or obligations: file-backed, and the server
runs with `sync_interval: always`. Everything else can be made again from the ledger, so it is in
memory and costs no sync.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
from fencepost.contracts import subjects
from fencepost.core import limits
from fencepost.core.errors import RefusedError

LEDGER: Final = "FP_LEDGER"
"""The one ledger stream; of several each has its number behind it (`ledger_names`)."""
COMMANDS: Final = "FP_COMMANDS"
FACTS: Final = "FP_FACTS"
MESSAGES: Final = "FP_MESSAGES"
EVENTS: Final = "FP_EVENTS"
BUCKET_OWNERS: Final = "FP_OWNERS"
BUCKET_LEASES: Final = "FP_LEASES"
BUCKET_META: Final = "FP_META"
SWEEP_MODE: Final = "sweep"
"""The key of `FP_META` that switches sweeping: "on", "census" or "off"."""
MOVING: Final = "moving"
"""The key of `FP_META` that says whether a history from elsewhere is whole, where there is one."""
MOVING_BEGUN: Final = b"begun"
MOVING_ENDED: Final = b"ended"
OBJECTS_BLOBS: Final = "FP_BLOBS"
OBJECTS_SNAPSHOTS: Final = "FP_SNAPSHOTS"
CHECKPOINTS: Final = "FP_CHECKPOINTS"

SHARDS_EMBEDDED: Final = 8
SHARDS_CLUSTER: Final = 64


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One stream's configuration: `config` is what the server's API takes, without the name."""

    name: str
    kind: Literal["stream", "kv", "objects", "chunks"]
    why: str
    config: dict[str, Any]


def ledger_names(ledgers: int) -> tuple[str, ...]:
    """The streams that a number of ledgers are, in their order. One keeps the plain name."""
    return (LEDGER,) if ledgers == 1 else tuple(f"{LEDGER}_{n}" for n in range(ledgers))


def ledger_of(shard: int, ledgers: int) -> str:
    """The stream that holds a shard's batches: of both families, whose sequence they share."""
    return LEDGER if ledgers == 1 else f"{LEDGER}_{shard % ledgers}"


def require_ledgers(ledgers: int, *, shards: int) -> None:
    """Raises `RefusedError` where a ledger would have no shard."""
    if not 1 <= ledgers <= shards:
        raise RefusedError(
            "bad_setting",
            f"ledgers: expected 1 to {shards}, the number of shards, got {ledgers}",
            field="ledgers",
        )


def table(shards: int, *, replicas: int = 1, ledgers: int = 1) -> tuple[Stream, ...]:
    """
    The whole table for a number of shards. Times in the configuration are nanoseconds.

    Raises `RefusedError` on a number of ledgers that does not fit.
    """
    require_ledgers(ledgers, shards=shards)
    file: dict[str, Any] = {"storage": "file", "num_replicas": replicas, "allow_direct": True}
    memory: dict[str, Any] = {"storage": "memory", "num_replicas": replicas, "allow_direct": True}
    ms = 1_000_000
    return (
        *_ledgers(file, shards, ledgers),
        *_inputs(file, shards),
        Stream(
            name=EVENTS,
            kind="stream",
            why="public events, made again from the ledger",
            config={
                **memory,
                "subjects": list(subjects.EVENTS),
                "retention": "limits",
                "discard": "old",
                "max_bytes": 64 * limits.MIB,
                "max_age": 3600 * 1000 * ms,
            },
        ),
        Stream(
            name=BUCKET_OWNERS,
            kind="kv",
            why="which replica runs which shard: spreads, protects nothing",
            config={**memory, "max_msgs_per_subject": 1, "max_age": 60_000 * ms},
        ),
        Stream(
            name=BUCKET_LEASES,
            kind="kv",
            why="a gateway's lease: its own proof that it may go on sending writes",
            config={**memory, "max_msgs_per_subject": 1, "max_age": 60_000 * ms},
        ),
        Stream(
            name=BUCKET_META,
            kind="kv",
            why="the deployment's id and its number of shards, for clients",
            config={**file, "max_msgs_per_subject": 1},
        ),
        *_contents(file),
    )


def _ledgers(file: dict[str, Any], shards: int, ledgers: int) -> Iterator[Stream]:
    for number, name in enumerate(ledger_names(ledgers)):
        mine = [subjects.ledger("*", shard) for shard in range(number, shards, ledgers)]
        yield Stream(
            name=name,
            kind="stream",
            why="the only authority; append-only, one message a batch",
            config={
                **file,
                # A subject is one stream's alone, so with several each names its shards.
                "subjects": [subjects.LEDGER] if ledgers == 1 else mine,
                "retention": "limits",
                "discard": "new",
                "deny_delete": True,
                "deny_purge": True,
            },
        )


def _inputs(file: dict[str, Any], shards: int) -> tuple[Stream, ...]:
    """What shards have to read, each as far as its batches say."""
    ms = 1_000_000
    command_src, command_dest = subjects.command_transform(shards)
    fact_src, fact_dest = subjects.fact_transform(shards)
    return (
        Stream(
            name=COMMANDS,
            kind="stream",
            why="durable commands, mapped to shards; a second one of a subject is refused (10077)",
            config={
                **file,
                "subjects": [subjects.COMMANDS],
                "subject_transform": {"src": command_src, "dest": command_dest},
                "retention": "limits",
                "discard": "new",
                "discard_new_per_subject": True,
                "max_msgs_per_subject": 1,
                "max_msg_size": limits.BATCH_BYTES_MAX,
                "max_age": limits.COMMANDS_AGE_MS * ms,
            },
        ),
        Stream(
            name=FACTS,
            kind="stream",
            why="what gateways saw, mapped to shards",
            config={
                **file,
                "subjects": [subjects.FACTS],
                "subject_transform": {"src": fact_src, "dest": fact_dest},
                "retention": "limits",
                "discard": "old",
                "max_age": limits.COMMANDS_AGE_MS * ms,
            },
        ),
        Stream(
            name=MESSAGES,
            kind="stream",
            why="messages between shards",
            config={
                **file,
                "subjects": [subjects.MESSAGES],
                "retention": "limits",
                "discard": "old",
                "max_age": limits.COMMANDS_AGE_MS * ms,
            },
        ),
    )


def _contents(file: dict[str, Any]) -> tuple[Stream, ...]:
    """What is too large for messages, and named by digest."""
    return (
        Stream(
            name=OBJECTS_BLOBS,
            kind="objects",
            why="contents above the inline bound, by digest",
            config={**file, "max_age": limits.COMMANDS_AGE_MS * 1_000_000},
        ),
        Stream(
            name=OBJECTS_SNAPSHOTS,
            kind="objects",
            why="snapshots of shards' states: a cache",
            config={**file},
        ),
        Stream(
            name=CHECKPOINTS,
            kind="chunks",
            why="chunks of sandboxes' checkpoints, one message each, where no other store is set",
            config={
                **file,
                "subjects": [subjects.CHUNKS],
                "retention": "limits",
                "discard": "new",
                "max_msgs_per_subject": 1,
            },
        ),
    )
