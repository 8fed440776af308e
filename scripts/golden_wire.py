"""
Holds the bytes of everything that one version writes and another may read.

A sample of each message is made from its type, every field set, so nothing has to be remembered
here when a field is added. `golden_wire.py` compares the samples' bytes with the newest generation
in the repository; `--renew WHY` adds a generation, when the wire was meant to change (with
`--redo` in place of the newest, while no release has written that one). Former ones stay and must
be readable for ever. What a ledger or a snapshot holds changes only together with
its machine's version.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import msgspec
from fencepost.contracts import messages
from fencepost.core import facts, receipts, shard_messages, steps, sweeping
from fencepost.core.dag import commands as dag_commands
from fencepost.core.dag.entries import DagEntry
from fencepost.core.dag.machine import DagMachine
from fencepost.core.dag.state import DagShard
from fencepost.core.sandbox import inputs, orders
from fencepost.core.sandbox.entries import SandboxEntry
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.core.sandbox.state import SandboxShard
from fencepost.runtime import outbox, snapshots
from fencepost.sandbox_gateway import frames
from msgspec import inspect

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "unit" / "contracts" / "golden_wire.json"

UNIONS: Final[dict[str, Any]] = {
    "entry.sandbox": SandboxEntry,
    "entry.dag": DagEntry,
    "fact": facts.Fact,
    "order": orders.Order,
    "message": shard_messages.ShardMessage,
    "command.dag": dag_commands.DagCommand,
}
"""By the tag of each member."""

PLAIN: Final[dict[str, Any]] = {
    "ask": messages.Ask,
    "ask_dag": messages.AskDag,
    "batch": messages.Batch,
    "capabilities": facts.Capabilities,
    "command.cancel": steps.CancelCommand,
    "command.checkpoint": steps.CheckpointCommand,
    "command.claim": steps.ClaimCommand,
    "command.create": steps.SandboxCommand,
    "command.now": messages.Now,
    "command.pack": messages.PackedCommands,
    "command.recover": steps.RecoverCommand,
    "command.release": steps.ReleaseCommand,
    "command.resolve": steps.ResolveCommand,
    "command.step": steps.StepCommand,
    "command.unclaim": steps.UnclaimCommand,
    "envelope": outbox.Envelope,
    "gateway_seen": inputs.GatewaySeen,
    "heartbeats": inputs.Heartbeats,
    "ledger_page": sweeping.LedgerPage,
    "list_reply": messages.ListReply,
    "list_request": messages.ListRequest,
    "marker": receipts.Marker,
    "problem": messages.Problem,
    "read_reply": messages.ReadReply,
    "read_request": messages.ReadRequest,
    "receipt": receipts.Receipt,
    "ref": facts.Ref,
    "snapshot.header": snapshots.Header,
    "spec.sandbox": steps.SandboxSpec,
    "spec.step": steps.StepSpec,
    "stamped_receipt": receipts.StampedReceipt,
    "state.dag": DagShard,
    "state.sandbox": SandboxShard,
    "sweep_reply": messages.SweepReply,
}

RECORDED: Final = ("batch", "entry.", "state.", "snapshot.", "spec.", "ref")
"""What stands in ledgers and snapshots: it changes only with a machine's version."""

_encode = msgspec.json.Encoder().encode


class Message(NamedTuple):
    """One message: its type, the type by which it is read, and a sample with every field set."""

    type: Any
    read_as: Any
    sample: Any

    @property
    def data(self) -> bytes:
        return _encode(self.sample)


def sample_of(type_: inspect.Type, name: str = "x") -> Any:
    """A value of a type: no default of anything, every optional one there."""
    match type_:
        case inspect.StructType():
            return type_.cls(**{x.name: _field(x) for x in type_.fields})
        case inspect.LiteralType():
            return type_.values[-1]
        case inspect.UnionType():
            some = [x for x in type_.types if not isinstance(x, inspect.NoneType)]
            return sample_of(some[0], name)
        case inspect.ListType():
            return [sample_of(type_.item_type, name)]
        case inspect.FrozenSetType() | inspect.SetType():
            return {sample_of(type_.item_type, name)}
        case inspect.VarTupleType():
            return (sample_of(type_.item_type, name),)
        case inspect.TupleType():
            return tuple(sample_of(each, name) for each in type_.item_types)
        case inspect.DictType():
            key = sample_of(type_.key_type, "key")
            return {key: sample_of(type_.value_type, name)}
        case inspect.IntType():
            return max(7, type_.ge or 0)
        case inspect.FloatType():
            return 7.5
        case inspect.BoolType():
            return True
        case inspect.StrType():
            return name
        case inspect.RawType():
            return msgspec.Raw(b'{"raw":[1,"\\u00e9"]}')
        case inspect.NoneType():
            return None
        case inspect.AnyType():
            return [name]
    raise TypeError(f"no sample of {type_}")


def _field(field: inspect.Field) -> Any:
    found = sample_of(field.type, field.name)
    if found is True and field.default is True:
        return False
    if found == field.default and isinstance(field.type, inspect.LiteralType):
        return field.type.values[0]
    return found


def messages_known() -> dict[str, Message]:
    """Every message, by name."""
    found = {
        name: Message(type_, type_, sample_of(inspect.type_info(type_)))
        for name, type_ in PLAIN.items()
    }
    for name, union in UNIONS.items():
        for member in get_args(union):
            tag = str(member.__struct_config__.tag)
            sample = sample_of(inspect.type_info(member))
            found[f"{name}.{tag}"] = Message(member, union, sample)
    return found


def frames_sent() -> dict[str, bytes]:
    """Every frame that a gateway sends into a sandbox, whose toolhost may be of another version."""
    found: dict[str, bytes] = {}
    fence = sample_of(inspect.type_info(orders.Fence))
    call = sample_of(inspect.type_info(orders.Dispatch))
    for direction in get_args(receipts.Direction):
        fence = msgspec.structs.replace(fence, direction=direction)
        found[direction] = frames.dispatch(msgspec.structs.replace(call, fence=fence))
    taken = sample_of(inspect.type_info(orders.CheckpointOrder))
    restored = sample_of(inspect.type_info(orders.RestoreOrder))
    found |= {
        "abort": frames.abort("id"),
        "blob": frames.blob("digest", size=9, last=True, part=b"part"),
        "checkpoint": frames.checkpoint("id", taken, base="base"),
        "chunk": frames.chunk("id", "digest", size=9),
        "chunk_failed": frames.chunk_failed("id", "digest", "reason"),
        "grant": frames.grant(9),
        "hello": frames.hello("id"),
        "kept": frames.kept("manifest"),
        "mark": frames.mark("id", epoch=9, session="session", nonce="nonce"),
        "read": frames.read("id", tool="tool", args=b"{}", timeout_ms=9),
        "restore": frames.restore("id", restored),
        "want": frames.want("id", b"digests"),
    }
    return {f"frame.{name}": data for name, data in found.items()}


def made() -> dict[str, str]:
    """What this version writes, by name."""
    found = {name: message.data for name, message in messages_known().items()}
    found |= frames_sent()
    return {name: found[name].decode() for name in sorted(found)}


def versions() -> dict[str, int]:
    """The numbers that a reader compares."""
    return {
        "batch": messages.BATCH_VERSION,
        "machine.dag": DagMachine.version,
        "machine.sandbox": SandboxMachine.version,
    }


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything as one version wrote it."""

    why: str
    versions: dict[str, int]
    bytes: dict[str, str]


def kept() -> list[Generation]:
    """All generations, the oldest first."""
    return msgspec.json.decode(FILE.read_bytes(), type=list[Generation]) if FILE.exists() else []


def differing(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """The names of what is not as it was, or is on one side only."""
    return sorted(x for x in {*found, *wanted} if found.get(x) != wanted.get(x))


def is_recorded(name: str) -> bool:
    return name.startswith(RECORDED)


def unreadable(generations: Iterable[Generation]) -> Iterator[str]:
    """What a former generation wrote and this one cannot read, or reads as less than it was."""
    known = messages_known()
    for number, generation in enumerate(generations, 1):
        for name, text in generation.bytes.items():
            if name.startswith(("frame.", "state.")):
                continue  # a toolhost is carried by its gateway; a snapshot is only a cache
            message = known.get(name)
            if message is None:
                yield f"{name} of generation {number}: nobody reads it any more"
                continue
            try:
                again = json.loads(_encode(msgspec.json.decode(text, type=message.read_as)))
            except msgspec.MsgspecError as error:
                yield f"{name} of generation {number}: {error}"
                continue
            missing = lost(json.loads(text), again)
            if missing:
                yield f"{name} of generation {number}: {', '.join(missing)} is lost"


def lost(before: Any, after: Any, place: str = "") -> list[str]:
    """The places of what is in `before`, and not the same in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            name
            for key, value in before.items()
            for name in (
                lost(value, after[key], f"{place}.{key}") if key in after else [f"{place}.{key}"]
            )
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) <= len(after):
        pairs = zip(before, after, strict=False)
        return [name for at, (a, b) in enumerate(pairs) for name in lost(a, b, f"{place}[{at}]")]
    return [] if before == after else [place]


def renew(why: str, *, redo: bool = False) -> None:
    """
    Adds a generation. Raises `SystemExit` where that would break a reader.

    `redo`: in place of the newest, which no release has written yet.
    """
    before = kept()[:-1] if redo else kept()
    if problems := list(unreadable(before)):
        sys.exit("\n".join(["former generations must stay readable:", *problems]))
    found = made()
    if before:
        changed = [x for x in differing(found, before[-1].bytes) if is_recorded(x)]
        if changed and versions() == before[-1].versions:
            sys.exit(f"raise the machine's version: {', '.join(changed)} is recorded")
        if found == before[-1].bytes and versions() == before[-1].versions:
            sys.exit("nothing has changed")
    generations = [*before, Generation(why=why, versions=versions(), bytes=found)]
    text = json.dumps(msgspec.to_builtins(generations), indent=1, ensure_ascii=False)
    FILE.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renew", metavar="WHY", help="add a generation, and say why")
    parser.add_argument(
        "--redo", action="store_true", help="in place of the newest, which no release has written"
    )
    asked = parser.parse_args()
    if asked.renew:
        renew(asked.renew, redo=asked.redo)
        return
    before = kept()
    problems = [*differing(made(), before[-1].bytes), *unreadable(before)]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
