"""
Plain values with keyword overrides, and a shard on a bench: the machine with everything around it.

`Bench` does what the runtime does with a machine, in memory and in one thread: ticks what is due,
decides, evolves, makes the effects, and shows every batch to the auditor.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from fencepost.core import facts, ids
from fencepost.core.invariants import ShardAuditor
from fencepost.core.machine import Effect, Place
from fencepost.core.receipts import Marker, Receipt
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import inputs, orders, owed
from fencepost.core.sandbox.admission import undo_call
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.core.sandbox.state import Sandbox, Step

SANDBOX = "sbx"
GATEWAY = "gw1"
CALL = {"path": "a.txt", "content": "x"}
UNDO = {"kind": "command", "args": {"argv": ["undo"]}}


def ref(instance: str = "i1", **over: Any) -> facts.Ref:
    return facts.Ref(
        **{
            "authority": "host",
            "provider": "process",
            "native_id": "n1",
            "instance": instance,
            **over,
        }
    )


def body(tool: str = "write_file", args: Any = None, **over: Any) -> dict[str, Any]:
    """A step command as a client writes it."""
    return {"tool": tool, "args": CALL if args is None else args, **over}


def external(**over: Any) -> dict[str, Any]:
    return body(
        "run_command", {"argv": ["pay"]}, **{"effect": "external", "compensation": UNDO, **over}
    )


def receipt(sandbox: Sandbox, step: Step, name: str, *, session: str = "", **over: Any) -> Receipt:
    """What a faithful toolhost says of a step's current fence."""
    tool, digest, attempt = step.spec.tool, step.spec.digest, step.attempt
    verdict = "applied"
    if step.phase == "undo":
        tool, _, digest = undo_call(step.spec)
        attempt = ids.undo_id(attempt, step.no)
    elif step.phase == "revoke":
        verdict = "revoked"
    marker = {
        "epoch": sandbox.epoch,
        "session": session or sandbox.session,
        "nonce": sandbox.nonce,
        "instance": sandbox.instance,
    }
    fields: dict[str, Any] = {
        "sandbox": sandbox.id,
        "step": name,
        "attempt": attempt,
        "direction": step.phase,
        "no": step.no,
        "verdict": verdict,
        **marker,
        "after": Marker(**marker),
        "tool": tool,
        "digest": digest,
        "journal_seq": sandbox.journal_seq + 1,
        "outcome": "ok" if verdict == "applied" else "",
        "of": step.of,
        **over,
    }
    return Receipt(**fields)


class Bench:
    """
    One shard's machine on a bench. `entries` is its log; `owed` the effects made so far.

    Every batch is audited, and every decision is checked to leave the state as it was.
    """

    def __init__(self, *, shard: int = 0, shards: int = 1, pure: bool = True) -> None:
        self.machine = SandboxMachine()
        self.state = self.machine.initial(shard, shards)
        self.hints = self.machine.new_hints()
        self.auditor = ShardAuditor("sandbox", shard)
        self.now_ms = 1_000_000
        self.seq = 0
        self.term = 0
        self.pure = pure
        self.batches: list[tuple[int, int, list[Any]]] = []
        self.owed: list[Effect] = []
        self.gateway = GATEWAY
        self._sessions = 0
        self.open_term()

    # --- the runtime's part -------------------------------------------------------------------

    def open_term(self) -> None:
        self.term += 1
        opened = self.machine.term_opened(self.term, f"owner{self.term}", self.state.shards, "h")
        self._accept([opened])

    def restart(self) -> None:
        """Another owner takes over from a snapshot: the same state, and no hints at all."""
        self.state = self.machine.decode_state(self.machine.encode_state(self.state))
        self.hints = self.machine.new_hints()
        self.open_term()
        self.tick()

    def take(self, value: Any) -> list[Any]:
        """Feeds one input, after what time has made due; returns the input's own entries."""
        self.tick()
        return self._decide(value)

    def tick(self, ms: int = 0) -> list[Any]:
        """Lets time pass, then ticks until nothing is due."""
        self.now_ms += ms
        entries: list[Any] = []
        for _ in range(200_000):
            due = self.machine.next_due_ms(self.state, self.hints)
            if due is None or due > self.now_ms:
                return entries
            entries += self._decide(self.machine.tick())
        raise AssertionError("something is due for ever")

    def hint(self, value: Any) -> None:
        assert self.machine.take_hint(self.state, self.hints, value, self.now_ms)

    def _decide(self, value: Any) -> list[Any]:
        before = self.machine.encode_state(self.state) if self.pure else b""
        entries = list(self.machine.decide(self.state, self.hints, value, self.now_ms))
        if self.pure:
            assert self.machine.encode_state(self.state) == before, "decide changed the state"
        if entries:
            self._accept(entries)
        return entries

    def _accept(self, entries: list[Any]) -> None:
        prev, self.seq = self.seq, self.seq + 1
        # Through bytes, as the ledger does it: what cannot be read again was never written.
        entries = list(self.machine.decode_entries(self.machine.encode_entries(entries)))
        for index, entry in enumerate(entries):
            self.machine.evolve(self.state, entry, Place(prev, index), self.now_ms)
        found = self.auditor.take(
            seq=self.seq,
            prev=prev,
            term=self.term,
            owner=f"owner{self.term}",
            now_ms=self.now_ms,
            entries=entries,
        )
        assert not found, found
        self.batches.append((self.seq, self.now_ms, entries))
        for entry in entries:
            self.owed += self.machine.effects_of(self.state, self.hints, entry)

    @property
    def entries(self) -> list[Any]:
        return [entry for _, _, entries in self.batches for entry in entries]

    def of_kind(self, kind: type) -> list[Any]:
        return [entry for entry in self.entries if type(entry) is kind]

    def effects(self) -> list[Effect]:
        return list(self.machine.effects(self.state, self.hints, self.now_ms))

    def dispatches(self) -> list[orders.Dispatch]:
        return [f.order for f in self.effects() if isinstance(f.order, orders.Dispatch)]

    # --- what clients, gateways and sandboxes do ------------------------------------------------

    def sandbox(self, name: str = SANDBOX) -> Sandbox:
        return self.state.sandboxes[name]

    def open(self, name: str, sandbox: str = SANDBOX) -> Step:
        return self.sandbox(sandbox).steps[name]

    def command(self, kind: str, id_: str, content: Any, sandbox: str = SANDBOX) -> list[Any]:
        data = content if isinstance(content, bytes) else msgspec.json.encode(content)
        subject = f"fp.v1.cmd.{kind}.{sandbox}.{id_}"
        entries: list[Any] = []
        for value in self.machine.decode("commands", subject, data):
            entries += self.take(value)
        return entries

    def step(
        self, name: str, content: Any = None, sandbox: str = SANDBOX, **over: Any
    ) -> list[Any]:
        content = body(**over) if content is None else {**content, **over}
        return self.command("step", name, content, sandbox)

    def cancel(self, name: str, reason: str = "", sandbox: str = SANDBOX) -> list[Any]:
        return self.command("cancel", name, {"reason": reason} if reason else {}, sandbox)

    def see_gateway(self, gateway: str = "", **over: Any) -> None:
        fields = {"authorities": ["host"], "providers": ["process"], **over}
        self.hint(inputs.GatewaySeen(gateway=gateway or self.gateway, **fields))

    def beat(self, sandbox: str = SANDBOX, **over: Any) -> None:
        found = self.sandbox(sandbox)
        fields = {
            "sandbox": sandbox,
            "gateway": found.gateway,
            "epoch": found.epoch,
            "session": found.session,
            "journal_seq": found.journal_seq,
            **over,
        }
        self.hint(inputs.Heartbeat(**fields))

    def create(self, sandbox: str = SANDBOX, **spec: Any) -> list[Any]:
        return self.command("create", "c1", {"spec": spec} if spec else {}, sandbox)

    def assigned(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        create = next(iter(self.sandbox(sandbox).creates.values()))
        fields = {
            "create_id": create.create_id,
            "gateway": create.gateway,
            "ref": ref(native_id=sandbox),
            "capabilities": facts.Capabilities(),
            **over,
        }
        return self.take(facts.Assigned(sandbox=sandbox, **fields))

    def found(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        """A gateway opens a channel, in a new session. `marker=...` says what the disk has."""
        self._sessions += 1
        known = self.sandbox(sandbox)
        fields = {
            "gateway": self.gateway,
            "session": f"S{self._sessions}",
            "ref": known.ref or ref(native_id=sandbox),
            "marker": None,
            "journal_seq": 0,
            "nonce_fresh": f"N{self._sessions}",
            **over,
        }
        return self.take(facts.Found(sandbox=sandbox, **fields))

    def marked(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        marking = self.sandbox(sandbox).marking
        assert marking is not None
        fields = {
            "gateway": marking.gateway,
            "session": marking.session,
            "epoch": marking.epoch,
            "nonce": marking.nonce,
            "instance": marking.ref.instance,
            "journal_seq": self.sandbox(sandbox).journal_seq,
            **over,
        }
        return self.take(facts.Marked(sandbox=sandbox, **fields))

    def marker(self, sandbox: str = SANDBOX) -> Marker:
        """What the disk of the current generation says."""
        known = self.sandbox(sandbox)
        return Marker(
            epoch=known.epoch, session=known.session, nonce=known.nonce, instance=known.instance
        )

    def live(self, sandbox: str = SANDBOX, **spec: Any) -> Bench:
        """A sandbox at epoch 1 with a session attached."""
        self.see_gateway()
        self.create(sandbox, **spec)
        self.tick()
        self.assigned(sandbox)
        self.attach(sandbox)
        return self

    def attach(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        """Found, marked, and what the new session settles."""
        entries = self.found(sandbox, **over)
        entries += self.marked(sandbox)
        return entries + self.tick()

    def reattach(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        """The same disk in a new session (a gateway restarted)."""
        fields = {
            "marker": self.marker(sandbox),
            "journal_seq": self.sandbox(sandbox).journal_seq,
            **over,
        }
        return self.attach(sandbox, **fields)

    def lose_lease(self, sandbox: str = SANDBOX) -> list[Any]:
        self.tick(600)  # met for the first time, and granted a full term from now
        entries = self.tick(self.hints.lease_ms + 600)
        self.see_gateway()
        assert not self.sandbox(sandbox).open, "the lease should have been seen to end"
        return entries

    def warm(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        """The lease is lost, the disk is not: the next epoch opens on the same bytes."""
        marker = self.marker(sandbox)
        seq = self.sandbox(sandbox).journal_seq
        entries = self.lose_lease(sandbox)
        return entries + self.attach(sandbox, **{"marker": marker, "journal_seq": seq, **over})

    def cold(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        """A new disk, so another instance, is found where the old one was."""
        known = self.sandbox(sandbox)
        assert known.ref is not None
        fresh = msgspec.structs.replace(known.ref, instance=f"i-of-{known.epoch + 1}")
        return self.attach(sandbox, **{"marker": None, "ref": fresh, **over})

    def gone(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        fields = {"gateway": self.gateway, "ref": self.sandbox(sandbox).ref, **over}
        return self.take(facts.Gone(sandbox=sandbox, **fields))

    def lost(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        known = self.sandbox(sandbox)
        fields = {
            "gateway": known.gateway,
            "session": known.session,
            "epoch": known.epoch,
            "ref": known.ref,
            "reason": "channel_closed",
            "observed": "unknown",
            **over,
        }
        return self.take(facts.Lost(sandbox=sandbox, **fields))

    def receipt(self, name: str, sandbox: str = SANDBOX, **over: Any) -> Receipt:
        return receipt(self.sandbox(sandbox), self.open(name, sandbox), name, **over)

    def receive(
        self, got: Receipt | None, sandbox: str = SANDBOX, *, gateway: str = "", **over: Any
    ) -> list[Any]:
        fields = {
            "sandbox": sandbox,
            "gateway": gateway or self.sandbox(sandbox).gateway,
            "mac_ok": True,
            "receipt": got,
            **over,
        }
        return self.take(inputs.ReceiptReceived(**fields))

    def answer(self, name: str, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        """The faithful answer to a step's current fence, with overrides."""
        return self.receive(self.receipt(name, sandbox, **over), sandbox)

    # --- checkpoints and recovery -----------------------------------------------------------------

    def recall(self) -> list[Any]:
        """What a shard's owner does: reads in the ledger what is owed, and feeds what comes next."""
        entries: list[Any] = []
        for want in self.machine.wanted(self.state):
            entries += self.take(self.recalled(want))
        return entries

    def recalled(self, want: owed.Wanted) -> Any:
        """The input that answers what the machine waits for."""
        found = owed.OwedList(want.sandbox, want.checkpoint)
        log = {seq - 1: entries for seq, _, entries in self.batches}
        for prev in range(want.after, self.seq):
            for index, entry in enumerate(log[prev]):
                found.take(entry, Place(prev, index))
        following = found.after(want.key)
        if not following:
            return inputs.OwedEnd(sandbox=want.sandbox, epoch=want.epoch)
        if want.tell:
            return owed.page_of(want, following[:2])
        one = following[0]
        first = log[one.spec_at.after][one.spec_at.index]
        return owed.step_of(want, one, first, found.accepted)

    def replay_receipt(self, sandbox: str = SANDBOX, **over: Any) -> Receipt:
        """What a faithful toolhost says of the replay under way."""
        known = self.sandbox(sandbox)
        assert known.recovering is not None
        replay = known.recovering.replay
        assert replay is not None
        marker = self.marker(sandbox)
        first = next(
            entry.receipt
            for entry in self.of_kind(e.Committed)
            if (entry.sandbox, entry.attempt) == (sandbox, replay.attempt)
        )
        fields: dict[str, Any] = {
            "attempt": replay.name,
            "direction": "replay",
            "no": replay.no,
            "verdict": "applied",
            "epoch": marker.epoch,
            "session": marker.session,
            "nonce": marker.nonce,
            "instance": marker.instance,
            "after": marker,
            "journal_seq": known.journal_seq + 1,
            "of": "",
            **over,
        }
        return msgspec.structs.replace(first, **fields)

    def replay(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        """The next owed step is fed, applied again and answered."""
        entries = self.recall()
        return entries + self.receive(self.replay_receipt(sandbox, **over), sandbox)

    def restored(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        known = self.sandbox(sandbox)
        assert known.checkpoint is not None
        fields = {
            "gateway": known.gateway,
            "session": known.session,
            "epoch": known.epoch,
            "checkpoint": known.checkpoint.id,
            "manifest": known.checkpoint.manifest,
            "journal_seq": known.journal_seq,
            **over,
        }
        return self.take(facts.Restored(sandbox=sandbox, **fields))

    def recover(self, sandbox: str = SANDBOX) -> list[Any]:
        """Whatever the generation has to get back, it gets."""
        entries: list[Any] = []
        while (recovering := self.sandbox(sandbox).recovering) is not None:
            if recovering.phase == "restore":
                entries += self.restored(sandbox)
            elif recovering.phase == "replay":
                entries += self.replay(sandbox)
            else:
                assert recovering.phase == "tell", recovering
                entries += self.recall()
        return entries + self.tick()

    def checkpointed(self, sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        """The checkpoint that is being taken is stored."""
        self.tick()
        known = self.sandbox(sandbox)
        assert known.checkpointing is not None
        fields = {
            "gateway": known.gateway,
            "session": known.session,
            "epoch": known.epoch,
            "nonce": known.nonce,
            "checkpoint": known.checkpointing.id,
            "manifest": manifest(known.checkpointing.id),
            "journal_seq": known.journal_seq,
            **over,
        }
        return self.take(facts.Checkpointed(sandbox=sandbox, **fields))

    def checkpoint(self, id_: str = "k1", sandbox: str = SANDBOX, **over: Any) -> list[Any]:
        """A checkpoint is asked for, begun and stored."""
        entries = self.command("checkpoint", id_, {}, sandbox) + self.tick()
        return entries + self.checkpointed(sandbox, **over) + self.tick()

    def final(self, name: str, sandbox: str = SANDBOX) -> str:
        finished = self.sandbox(sandbox).finished.get(name)
        return "" if finished is None else finished.state


def manifest(word: str) -> str:
    return "sha256:" + hashlib.sha256(word.encode()).hexdigest()


def kinds(entries: list[Any]) -> list[str]:
    """The entries' kinds, in order, as the ledger names them."""
    return [type(entry).__struct_config__.tag for entry in entries]


def only(entries: list[Any]) -> Any:
    assert len(entries) == 1, entries
    return entries[0]


def last_refusal(bench: Bench) -> e.ReceiptRefused:
    return bench.of_kind(e.ReceiptRefused)[-1]
