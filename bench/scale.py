"""
What a sandbox costs a shard: memory, ledger, snapshot, fold, heartbeats; and a gateway.

    python -m bench.scale [--sandboxes 20000] [--steps 10] [--json]
    python -m bench.scale --live 100 [--json]

One sandbox is driven through the real machine (created, attached, some steps committed); what it
wrote is then folded for each of the others under a name of its own. With `--live`, so many real
sandboxes are made in a stack of their own instead, and left idle: what processes use meanwhile.
`docs/scale.md` counts with the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil  # type: ignore[import-untyped]
from fencepost.client import Client
from fencepost.client.stack import Stack
from fencepost.contracts.messages import Batch, Sent
from fencepost.core import facts, ids
from fencepost.core.machine import Place
from fencepost.core.receipts import Change, Marker, Receipt
from fencepost.core.sandbox import inputs
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.core.steps import canonical

NAME: Final = "01SCALE0000000000000000000"
GATEWAY: Final = "g0123456789ab"
PER_BEAT: Final = 100
AT_ONCE: Final = 8
IDLE_S: Final = 15.0
_encode = msgspec.json.Encoder().encode


class Template:
    """One sandbox on its machine. `batches` has what each turn wrote, as bytes."""

    def __init__(self) -> None:
        self.machine = SandboxMachine()
        self.state = self.machine.initial(0, 1)
        self.hints = self.machine.new_hints()
        self.now_ms = 1_700_000_000_000
        self.batches: list[bytes] = []
        self._accept([self.machine.term_opened(1, "planner-0123456789ab", 1, "fnv1a32")])
        self.batches.clear()

    def take(self, value: Any) -> None:
        self._accept(list(self.machine.decide(self.state, self.hints, value, self.now_ms)))
        while (due := self.machine.next_due_ms(self.state, self.hints)) and due <= self.now_ms:
            self._accept(
                list(self.machine.decide(self.state, self.hints, self.machine.tick(), self.now_ms))
            )

    def _accept(self, entries: list[Any]) -> None:
        if not entries:
            return
        for index, entry in enumerate(entries):
            self.machine.evolve(self.state, entry, Place(len(self.batches), index), self.now_ms)
        self.batches.append(self.machine.encode_entries(entries))

    def command(self, kind: str, id_: str, body: Any) -> None:
        subject = f"fp.v1.in.0.{kind}.{NAME}.{id_}"
        for value in self.machine.decode("commands", subject, _encode(body)):
            self.take(value)

    def create(self) -> None:
        seen = inputs.GatewaySeen(
            gateway=GATEWAY, authorities=["host"], providers=["process"], places={"process": "host"}
        )
        self.machine.take_hint(self.state, self.hints, seen, self.now_ms)
        self.command("create", "c1", {})
        (create,) = self.state.sandboxes[NAME].creates.values()
        ref = facts.Ref(
            authority="process-0123456789abcdef01234567",
            provider="process",
            native_id=f"{NAME}-01",
            instance="i0123456789abcdef",
        )
        self.take(
            facts.Assigned(
                sandbox=NAME,
                create_id=create.create_id,
                gateway=GATEWAY,
                ref=ref,
                capabilities=facts.Capabilities(),
            )
        )
        self.take(
            facts.Found(
                sandbox=NAME,
                gateway=GATEWAY,
                session="s0123456789ab",
                ref=ref,
                marker=None,
                journal_seq=0,
                nonce_fresh="n0123456789abcdef",
            )
        )
        self.take(
            facts.Marked(
                sandbox=NAME,
                gateway=GATEWAY,
                session="s0123456789ab",
                epoch=1,
                nonce="n0123456789abcdef",
                instance=ref.instance,
                journal_seq=0,
            )
        )
        assert self.state.sandboxes[NAME].live, "the template is attached"

    def step(self, number: int) -> None:
        """Commits one `write_file` of 200 bytes."""
        name = f"01STEP{number:020d}"
        args = {"path": f"src/file{number}.txt", "content": "x" * 200}
        self.command("step", name, {"tool": "write_file", "args": args})
        sandbox = self.state.sandboxes[NAME]
        step = sandbox.steps[name]
        marker = Marker(
            epoch=1, session=sandbox.session, nonce=sandbox.nonce, instance=sandbox.instance
        )
        receipt = Receipt(
            sandbox=NAME,
            step=name,
            attempt=step.attempt,
            direction="apply",
            no=step.no,
            verdict="applied",
            epoch=1,
            session=sandbox.session,
            nonce=sandbox.nonce,
            instance=sandbox.instance,
            after=marker,
            tool="write_file",
            digest=step.spec.digest,
            journal_seq=sandbox.journal_seq + 1,
            outcome="ok",
            changes=[Change(path=args["path"], before=None, after="sha256:" + "0" * 64)],
            result=msgspec.Raw(canonical({"bytes": 200})),
        )
        self.take(
            inputs.ReceiptReceived(
                sandbox=NAME,
                gateway=GATEWAY,
                mac_ok=True,
                receipt=receipt,
                step=name,
                attempt=step.attempt,
            )
        )
        assert name not in sandbox.steps, "the step is committed"


def batch_bytes(entries: bytes) -> int:
    """How many bytes one batch of its own is in the ledger."""
    return len(
        _encode(
            Batch(
                v=1,
                id="planner-0123456789ab.1234567",
                family="sandbox",
                shard=12,
                term=12,
                owner="planner-0123456789ab",
                prev=123_456_789,
                now_ms=1_700_000_000_000,
                positions={},
                last_seen={},
                sent=Sent(events=123_456_789, messages=123_456_789),
                entries=msgspec.Raw(entries),
            )
        )
    )


def rss() -> int:
    """Resident bytes of this process, now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def names(count: int) -> Iterator[str]:
    return (f"01SCALE{number:019d}" for number in range(count))


def measure(sandboxes: int, steps: int) -> dict[str, Any]:
    """Measures one shard that holds so many live sandboxes, each with so many committed steps."""
    template = Template()
    template.create()
    created = list(template.batches)
    template.batches.clear()
    for number in range(steps):
        template.step(number)
    stepped = list(template.batches)
    machine = template.machine
    state, hints = machine.initial(0, 1), machine.new_hints()
    now_ms, seq, entries = template.now_ms, 0, 0

    def fold(batches: list[bytes]) -> float:
        nonlocal seq, entries
        began = time.process_time()
        for name in names(sandboxes):
            for data in batches:
                for index, entry in enumerate(
                    machine.decode_entries(data.replace(NAME.encode(), name.encode()))
                ):
                    machine.evolve(state, entry, Place(seq, index), now_ms)
                    entries += 1
                seq += 1
        return time.process_time() - began

    found: dict[str, Any] = {"sandboxes": sandboxes, "steps": steps}
    empty = rss()
    fold_s = fold(created)
    found["created"] = {
        "entries": entries / sandboxes,
        "ledger_bytes": sum(map(batch_bytes, created)),
        "memory_bytes": round((rss() - empty) / sandboxes),
    }
    before, with_created = entries, rss()
    fold_s += fold(stepped)
    found["step"] = {
        "entries": (entries - before) / sandboxes / max(1, steps),
        "ledger_bytes_alone": round(sum(map(batch_bytes, stepped)) / max(1, steps)),
        "ledger_bytes_shared": round(sum(len(data) - 1 for data in stepped) / max(1, steps)),
        "memory_bytes": round((rss() - with_created) / sandboxes / max(1, steps)),
    }
    found["fold_entries_s"] = round(entries / fold_s)
    found["memory_bytes_each"] = round((rss() - empty) / sandboxes)
    found |= _beats(machine, state, hints, now_ms)
    began = time.process_time()
    machine.next_due_ms(state, hints)
    owed = sum(1 for _ in machine.effects(state, hints, now_ms))
    found["tick_ms"] = round((time.process_time() - began) * 1000, 2)
    assert not owed, "an idle sandbox owes nothing"
    began = time.process_time()
    data = machine.encode_state(state)
    found["snapshot"] = {
        "bytes_each": round(len(data) / sandboxes),
        "write_s": round(time.process_time() - began, 2),
    }
    began = time.process_time()
    machine.decode_state(data)
    found["snapshot"]["read_s"] = round(time.process_time() - began, 2)
    assert ids.is_id(NAME)
    return found


def _beats(machine: SandboxMachine, state: Any, hints: Any, now_ms: int) -> dict[str, Any]:
    """Every sandbox's heartbeat, in messages of a hundred."""
    beats = [
        inputs.Heartbeat(
            sandbox=name, gateway=GATEWAY, epoch=1, session="s0123456789ab", journal_seq=9
        )
        for name in state.sandboxes
    ]
    packs = [
        _encode(inputs.Heartbeats(gateway=GATEWAY, beats=beats[at : at + PER_BEAT]))
        for at in range(0, len(beats), PER_BEAT)
    ]
    del beats
    decode = msgspec.json.Decoder(inputs.Heartbeats).decode
    before = rss()
    began = time.process_time()
    for pack in packs:
        machine.take_hint(state, hints, decode(pack), now_ms)
    took = time.process_time() - began
    return {
        "heartbeat": {
            "wire_bytes": round(sum(map(len, packs)) / len(state.sandboxes)),
            "us": round(took * 1e6 / len(state.sandboxes), 2),
            "memory_bytes": round((rss() - before) / len(state.sandboxes)),
        }
    }


async def live(count: int) -> dict[str, Any]:
    """Makes so many sandboxes, each with a step, and looks at every process while all is idle."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-bench-"))
    folder.chmod(0o755)
    stack = await Stack.start(folder, others=False, postgres=False)
    try:
        processes = {"nats": stack.nats.pid} | {x.role: x.pid for x in stack.services.values()}
        before = {name: used(pid) for name, pid in processes.items()}
        async with await Client.connect(stack.nats.url) as client:
            boxes = [f"box-{number}" for number in range(count)]
            for at in range(0, count, AT_ONCE):
                await asyncio.gather(*(client.create_sandbox(x) for x in boxes[at : at + AT_ONCE]))
            await asyncio.gather(*(client.write_file(box, "a", "x" * 200) for box in boxes))
            at_rest = {name: used(pid) for name, pid in processes.items()}
            began = time.monotonic()
            await asyncio.sleep(IDLE_S)
            after = {name: used(pid) for name, pid in processes.items()}
            seconds = time.monotonic() - began
            children = psutil.Process(processes["gateway"]).children(recursive=True)
            hosts = [x.memory_full_info() for x in children if "toolhost" in " ".join(x.cmdline())]
        return {
            "live": count,
            "memory_bytes_each": {
                name: round((after[name][0] - before[name][0]) / count) for name in processes
            },
            "cpu_us_per_sandbox_s": {
                name: round((after[name][1] - at_rest[name][1]) * 1e6 / seconds / count, 1)
                for name in processes
            },
            "toolhost": {
                "processes": len(hosts),
                "pss_bytes": round(sum(x.pss for x in hosts) / max(1, len(hosts))),
                "rss_bytes": round(sum(x.rss for x in hosts) / max(1, len(hosts))),
            },
        }
    finally:
        await stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


def used(pid: int) -> tuple[int, float]:
    """Resident bytes, and seconds of processor time so far."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    return process.memory_info().rss, times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandboxes", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=10, help="committed steps of each")
    parser.add_argument("--live", type=int, default=0, help="make so many real ones instead")
    parser.add_argument("--json", action="store_true", help="on one line")
    asked = parser.parse_args()
    found = asyncio.run(live(asked.live)) if asked.live else measure(asked.sandboxes, asked.steps)
    print(json.dumps(found, indent=None if asked.json else 2))


if __name__ == "__main__":
    main()
