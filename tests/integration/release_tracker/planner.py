"""
A planner in miniature: the real machine, driven in this process by a seeded workload.

It makes batches as the runtime would (one message per turn, conditional on the shard's head) and
plays the gateway from the machine's state. Nothing here knows of the projection.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from fencepost.contracts import subjects
from fencepost.contracts.messages import BATCH_VERSION, HASH, Batch, Position, Sent
from fencepost.core import facts, ids
from fencepost.core.machine import Place
from fencepost.core.receipts import Marker, Receipt
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import inputs
from fencepost.core.sandbox.admission import undo_call
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.core.sandbox.state import Sandbox, Step
from fencepost.core.shard_messages import Hold, Unhold
from fencepost.runtime.ports import Log

GATEWAY = "g1"
HOSTILE = "nul \0 and half \ud800 a pair"


class Shard:
    """One shard's machine with its log. `entries` are all that were appended, in order."""

    def __init__(self, log: Log, shard: int, shards: int, machine: Any = None) -> None:
        self.machine: Any = machine or SandboxMachine()
        self.log = log
        self.shard = shard
        self.shards = shards
        self.state: Any = self.machine.initial(shard, shards)
        self.hints = self.machine.new_hints()
        self.head = 0
        self.now_ms = 1_700_000_000_000
        self.batches = 0
        self.sessions = 0

    async def open(self) -> None:
        seen = inputs.GatewaySeen(gateway=GATEWAY, authorities=["here"], providers=["process"])
        self.machine.take_hint(self.state, self.hints, seen, self.now_ms)
        opened = self.machine.term_opened(self.state.term + 1, "test", self.shards, HASH)
        await self.append(self._evolve([opened]))

    async def turn(self, *values: Any) -> list[Any]:
        """Decides inputs one after the other; what they make is one batch. Returns its entries."""
        self.now_ms += 7
        made: list[Any] = []
        for _ in range(1000):  # bounded: each tick makes at most one thing of what is due
            ticked = self.machine.decide(self.state, self.hints, inputs.Tick(), self.now_ms)
            if not ticked:
                break
            made += self._evolve(ticked, len(made))
        for value in values:
            made += self._evolve(
                self.machine.decide(self.state, self.hints, value, self.now_ms), len(made)
            )
        if made:
            await self.append(made)
            for entry in made:
                list(self.machine.effects_of(self.state, self.hints, entry))
        return made

    def command(self, kind: str, aggregate: str, id_: str, body: Any) -> Any:
        """A command as its stream would hand it over."""
        subject = f"fp.v1.in.{self.shard}.{kind}.{aggregate}.{id_}"
        (value,) = self.machine.decode("commands", subject, msgspec.json.encode(body))
        return value

    def _evolve(self, entries: Sequence[Any], at: int = 0) -> list[Any]:
        for index, entry in enumerate(entries, at):
            self.machine.evolve(self.state, entry, Place(self.head, index), self.now_ms)
        return list(entries)

    async def append(self, entries: Sequence[Any], *, prev: int | None = None) -> int:
        """Appends one batch; `prev` is for lying about what it follows."""
        batch = Batch(
            v=BATCH_VERSION,
            id=f"{self.shard}-{self.batches}",
            family=self.machine.family,
            shard=self.shard,
            term=self.state.term,
            owner="test",
            prev=self.head if prev is None else prev,
            now_ms=self.now_ms,
            positions={"FP_COMMANDS": Position("one", self.batches)},
            last_seen={},
            sent=Sent(),
            entries=msgspec.Raw(self.machine.encode_entries(entries)),
        )
        self.batches += 1
        self.head = await self.log.append(
            subjects.ledger(self.machine.family, self.shard), msgspec.json.encode(batch), self.head
        )
        return self.head

    # --- the gateway's part ---------------------------------------------------------------

    def ref(self, sandbox: str, number: int) -> facts.Ref:
        return facts.Ref(
            authority="here",
            provider="process",
            native_id=f"{sandbox}-{number}",
            instance=f"{sandbox}@{number}",
        )

    def attachments(self, sandbox: Sandbox) -> list[Any]:
        """What a gateway would say now to bring this sandbox further."""
        for create_id, made in sandbox.creates.items():
            if made.gateway:
                return [
                    facts.Assigned(
                        sandbox=sandbox.id,
                        create_id=create_id,
                        gateway=made.gateway,
                        ref=self.ref(sandbox.id, sandbox.creates_made),
                        capabilities=facts.Capabilities(),
                    )
                ]
        if sandbox.ref is None or sandbox.gone:
            return []
        if sandbox.releasing or sandbox.condemned:
            return [
                facts.StopAnswered(
                    sandbox=sandbox.id, gateway=GATEWAY, ref=sandbox.ref, answer="accepted"
                ),
                facts.Gone(sandbox=sandbox.id, gateway=GATEWAY, ref=sandbox.ref),
            ]
        if sandbox.marking is not None:
            marking = sandbox.marking
            return [
                facts.Marked(
                    sandbox=sandbox.id,
                    gateway=marking.gateway,
                    session=marking.session,
                    epoch=marking.epoch,
                    nonce=marking.nonce,
                    instance=marking.ref.instance,
                    journal_seq=sandbox.journal_seq,
                )
            ]
        if sandbox.session:
            return []
        self.sessions += 1
        marker = None
        if sandbox.nonce_on_disk:
            marker = Marker(sandbox.epoch, "former", sandbox.nonce_on_disk, sandbox.instance)
        return [
            facts.Found(
                sandbox=sandbox.id,
                gateway=GATEWAY,
                session=f"s{self.shard}-{self.sessions}",
                ref=sandbox.ref,
                marker=marker,
                journal_seq=sandbox.journal_seq,
                nonce_fresh=f"n{self.shard}-{self.sessions}",
            )
        ]

    def receipt(self, sandbox: Sandbox, name: str, step: Step, **other: Any) -> Any:
        """The receipt that joins a step's current fence; `other` changes single fields."""
        tool, digest = step.spec.tool, step.spec.digest
        verdict = "applied"
        if step.phase == "undo":
            tool, _, digest = undo_call(step.spec)
        elif step.phase == "revoke":
            verdict = "revoked"
        marker = Marker(sandbox.epoch, sandbox.session, sandbox.nonce, sandbox.instance)
        fields: dict[str, Any] = {
            "sandbox": sandbox.id,
            "step": name,
            "attempt": step.attempt,
            "direction": step.phase,
            "no": step.no,
            "verdict": verdict,
            "epoch": sandbox.epoch,
            "session": sandbox.session,
            "nonce": sandbox.nonce,
            "instance": sandbox.instance,
            "after": marker,
            "tool": tool,
            "digest": digest,
            "journal_seq": sandbox.journal_seq + 1,
            "outcome": "ok" if verdict == "applied" else "",
            "result": msgspec.Raw(b'{"bytes": 3, "text":"\\u0000\xc3\xa9"}'),
            **other,
        }
        return inputs.ReceiptReceived(
            sandbox=sandbox.id, gateway=GATEWAY, mac_ok=True, receipt=Receipt(**fields)
        )


def write_file(n: int) -> dict[str, Any]:
    return {"tool": "write_file", "args": {"path": f"f{n}", "content": "x" * (n % 50)}}


class Workload:
    """Draws what agents, gateways and faults do next, from one seed; all shards' batches mixed."""

    def __init__(self, log: Log, seed: int, *, shards: int, sandboxes: int) -> None:
        self.random = random.Random(seed)
        self.shards = [Shard(log, shard, shards) for shard in range(shards)]
        self.names = [f"box-{n}" for n in range(sandboxes)]
        self.steps = 0

    def of(self, sandbox: str) -> Shard:
        return self.shards[ids.shard_of(sandbox, len(self.shards))]

    async def open(self) -> None:
        for shard in self.shards:
            await shard.open()
        for name in self.names:
            shard = self.of(name)
            await shard.turn(shard.command("create", name, "c1", {"spec": {"network": True}}))

    async def run(self, turns: int) -> None:
        for _ in range(turns):
            await self.one()

    async def one(self) -> None:
        draw = self.random.random()
        shard = self.of(name := self.random.choice(self.names))
        sandbox = shard.state.sandboxes[name]
        if draw < 0.35:
            await shard.turn(*self._commands(shard, sandbox))
        elif draw < 0.6:
            await shard.turn(*shard.attachments(sandbox))
        elif draw < 0.96:
            await shard.turn(*self._receipts(shard, sandbox))
        else:
            await shard.turn(*self._faults(shard, sandbox))

    def _commands(self, shard: Shard, sandbox: Sandbox) -> Iterable[Any]:
        for _ in range(self.random.randint(1, 6)):
            self.steps += 1
            step = f"step-{self.steps}"
            body = write_file(self.steps)
            match self.random.randrange(10):
                case 0:
                    body = {"tool": "no_such", "args": {}}
                case 1:
                    body = {"tool": "write_file", "args": {"path": 7}, "deadline_ms": 1}
                case 2:
                    body |= {"on_moved_epoch": "reject"}
                case 3:
                    undo = {"kind": "command", "args": {"argv": ["true"]}}
                    body |= {"effect": "external", "compensation": undo}
            yield shard.command("step", sandbox.id, step, body)

    def _receipts(self, shard: Shard, sandbox: Sandbox) -> list[Any]:
        made: list[Any] = []
        for name in list(sandbox.fenced)[: self.random.randint(1, 8)]:
            other: dict[str, Any] = {}
            match self.random.randrange(8):
                case 0:
                    other = {"outcome": "failed"}
                case 1:
                    other = {"epoch": 10**30, "detail": HOSTILE.replace("\ud800", "")}
                case 2:
                    other = {"verdict": "indeterminate", "reason": "no_record"}
                case 3:
                    other = {"verdict": "refused", "reason": "bad_arguments"}
            made.append(shard.receipt(sandbox, name, sandbox.steps[name], **other))
            # Decided in turn: what one receipt wakes the next one's state has.
            break
        for name, step in sandbox.steps.items():
            draw = self.random.randrange(60)
            if draw == 0 and step.phase != "indeterminate":
                made.append(shard.command("cancel", sandbox.id, name, {"reason": "enough"}))
            elif draw < 8 and step.phase == "indeterminate":
                word = {"as": "committed", "who": "op", "note": "seen \0 there"}
                made.append(shard.command("resolve", sandbox.id, name, word))
        return made

    def _faults(self, shard: Shard, sandbox: Sandbox) -> list[Any]:
        ref = sandbox.ref
        draw = self.random.randrange(40)
        if draw >= 20:
            dag = f"dag-{draw % 3}"
            held = {"dag": dag, "acquisition": f"acq-{dag}", "sandbox": sandbox.id}
            return [Unhold(**held) if dag in sandbox.holders else Hold(**held)]
        if draw >= 12:
            return [shard.machine.poison("commands", "fp.v1.in.0.x", 4, HOSTILE[:5])]
        if draw in {1, 2}:
            return [shard.command("release", sandbox.id, "r1", {})]
        if ref is None:
            return []
        lost = {
            "sandbox": sandbox.id,
            "gateway": GATEWAY,
            "session": sandbox.session,
            "epoch": sandbox.epoch,
            "ref": ref,
            "reason": "channel",
        }
        if draw < 5:
            return [facts.Lost(**lost, observed="unknown")]
        if draw < 7:
            return [
                facts.AttachFailed(
                    sandbox=sandbox.id,
                    gateway=GATEWAY,
                    session=sandbox.session,
                    ref=ref,
                    reason="old processes",
                    observed="present",
                    condemned=True,
                )
            ]
        return [facts.Lost(**lost, observed="gone")]


def hostile_refusals() -> list[Any]:
    """Entries with what PostgreSQL would refuse: strangers can bring all of these about."""
    return [
        e.Refused(
            sandbox="s" * 40_000,
            command="step",
            id="i" * 9_000 + "\0",
            reason="bad_id",
            detail="nul \0",
        ),
        e.ReceiptRefused(
            sandbox="box-0", step="\0" * 5000, attempt="a\0", reason="stale_epoch", epoch=-(10**40)
        ),
    ]
