"""
Faithful one-line mutations of the core, of the simulator's runtime and of its toolhost model.

Each is what somebody could have written. `seeds` is within how many seeds the simulator must kill
it; the options of a seed are drawn as ever, with `faults` added where a mutation needs one to show.
Without `dags` the runs have none, and none of the faults that only they have.
A mutant that survives is a missing checker or a missing fault.
"""

import __future__

import importlib
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import pytest
from fencepost.core.sandbox import evolve

CORE = "fencepost.core.sandbox."
SIMULATOR = "fencepost.simulator."


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str
    function: str
    old: str
    new: str
    seeds: int = 40
    faults: tuple[str, ...] = ()
    dags: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts the mutated function where the original one is called from."""
        module = importlib.import_module(self.module)
        owner: Any = module
        *path, name = self.function.split(".")
        for part in path:
            owner = getattr(owner, part)
        original = inspect.getattr_static(owner, name)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} is not there once"
        source = source.replace(self.old, self.new)
        flags = __future__.annotations.compiler_flag
        code = compile(source, f"<{self.name}>", "exec", flags=flags)
        names: dict[str, Any] = {}
        exec(code, module.__dict__, names)
        mutated = names[name]
        monkeypatch.setattr(owner, name, mutated)
        if isinstance(original, FunctionType) and module is evolve:
            for kind, function in list(evolve._BY_KIND.items()):
                if function is original:
                    monkeypatch.setitem(evolve._BY_KIND, kind, mutated)


MUTANTS = (
    Mutant(
        "drop the expected sequence",
        SIMULATOR + "ledger",
        "SimulatedLog.accepts",
        "self.head(shard) == expected",
        "True",
    ),
    Mutant(
        "append on the newest head instead of the decided one",
        SIMULATOR + "owner",
        "Hold.expected",
        "return flight.prev",
        "return self.log.head(self.shard)",
    ),
    Mutant(
        "keep the state after a lost term",
        SIMULATOR + "owner",
        "Hold.lost_term",
        "self.end(reason)",
        "self._flight = None; self.head = self.log.head(self.shard)",
    ),
    Mutant(
        "take any batch that stands there for one's own",
        SIMULATOR + "owner",
        "Hold._found_out",
        "there.id == flight.id",
        "True",
    ),
    Mutant(
        "forget a position",
        SIMULATOR + "owner",
        "Hold.recorded_positions",
        "return self.positions",
        'return {k: v for k, v in self.positions.items() if k != "facts"}',
    ),
    Mutant(
        "take a torn snapshot",
        SIMULATOR + "owner",
        "Hold._load_snapshot",
        "digest(snapshot.data) == snapshot.digest",
        "snapshot.digest",
        faults=("snapshot_torn",),
    ),
    Mutant(
        "make effects before the batch is accepted",
        SIMULATOR + "owner",
        "Hold._append",
        "flight = self._flight\n",
        "flight = self._flight\n"
        "    for entry in flight.entries if self.owning else (): "
        "[self._perform(x) for x in self.machine.effects_of(self.state, self.hints, entry)]\n",
        seeds=120,
        faults=("append_lost", "append_slow", "owner_rival", "owner_pause"),
    ),
    Mutant(
        "compare only the step id",
        CORE + "join",
        "why_not",
        "if receipt.attempt != attempt:",
        'if receipt.step:\n        return ""\n    if receipt.attempt != attempt:',
    ),
    Mutant(
        "skip the generation in the join",
        CORE + "join",
        "why_not",
        "_why_not_the_generation(sandbox, step, receipt, gateway=gateway)",
        '""',
    ),
    Mutant(
        "skip the second marker reading in the join",
        CORE + "join",
        "_why_not_the_generation",
        'return "marker_moved"',
        'return ""',
        seeds=300,
        faults=("disk_swapped_under_tool", "naive_toolhost"),
    ),
    Mutant(
        "skip the second marker reading under the tool",
        SIMULATOR + "toolhost",
        "Toolhost.second_reading",
        "return self._read_marker()",
        "return _run.marker",
        seeds=300,
        faults=("disk_swapped_under_tool",),
    ),
    Mutant(
        "trust a receipt whose stamp does not hold",
        CORE + "outcomes",
        "receipt",
        "if got is None or not value.mac_ok:",
        "if got is None:",
        faults=("receipt_corrupted",),
    ),
    Mutant(
        "commit whatever answers",
        CORE + "outcomes",
        "_applied",
        'case "applied" | "attested":',
        'case "applied" | "attested" | "fault" | "refused":',
    ),
    Mutant(
        "call a cut channel a lost disk",
        CORE + "life",
        "_lost",
        'if value.observed == "gone" and value.ref == sandbox.ref:',
        "if value.ref == sandbox.ref:",
    ),
    Mutant(
        "call an unanswered attach a lost disk",
        CORE + "life",
        "_attach_failed",
        'if value.observed == "gone" and value.ref == sandbox.ref:',
        'if value.observed in ("gone", "unknown") and value.ref == sandbox.ref:',
        seeds=80,
        faults=("observe_unknown",),
    ),
    Mutant(
        "believe a reading of the disk that is out of date",
        CORE + "life",
        "_found",
        "if value.asked is not None and value.asked != sandbox.asked:",
        "if value.asked is None:",
        faults=("fact_repeated", "fact_delayed"),
    ),
    Mutant(
        "take an older point of the disk for a blank one",
        CORE + "life",
        "_moved",
        'return "restored", "other_nonce"',
        'return "cold", "other_nonce"',
        seeds=300,
        faults=("snapshot_restored", "disk_swapped_under_tool"),
    ),
    Mutant(
        "keep the epoch of a restored disk",
        CORE + "life",
        "_moved",
        "if value.journal_seq < sandbox.journal_seq:",
        "if value.journal_seq < 0:",
        seeds=80,
        faults=("snapshot_restored",),
    ),
    Mutant(
        "owe nothing on a cold disk",
        CORE + "life",
        "_found",
        'owed=sandbox.owed if disk != "warm" else 0',
        "owed=0",
        faults=("sandbox_preempted",),
    ),
    Mutant(
        "ignore a journal that went back between finding and marking",
        CORE + "life",
        "_marked",
        "if value.journal_seq < sandbox.journal_seq:",
        "if value.journal_seq < 0:",
        seeds=200,
        faults=("disk_rolled_back_before_mark", "channel_cut"),
    ),
    Mutant(
        "retry an external effect on the next disk",
        CORE + "outcomes",
        "lost_with_disk",
        'if step.spec.effect == "external":',
        'if step.spec.effect == "none":',
        faults=("sandbox_preempted",),
    ),
    Mutant(
        "let an older snapshot vouch for external effects",
        CORE + "outcomes",
        "external_at_risk",
        'effect == "external"',
        'effect == "none"',
        seeds=200,
        faults=("snapshot_restored",),
    ),
    Mutant(
        "end a fenced step without revoking it",
        CORE + "outcomes",
        "stop_step",
        'if step.phase == "parked":',
        'if step.phase in ("parked", "apply"):',
        faults=("step_cancelled",),
    ),
    Mutant(
        "call what is already done never applied",
        CORE + "outcomes",
        "_revoked",
        'case "revoked":',
        'case "revoked" | "already_done":',
        faults=("step_cancelled", "step_deadline_short"),
    ),
    Mutant(
        "retry after a cancel",
        CORE + "outcomes",
        "lost_with_disk",
        "and not step.ended",
        "",
        seeds=300,
        faults=("step_cancelled", "sandbox_preempted"),
    ),
    Mutant(
        "start a carried attempt without its session's fence",
        CORE + "outcomes",
        "settle_on_same_disk",
        "if step.session == sandbox.session and step.epoch == sandbox.epoch:",
        "if step.epoch == sandbox.epoch:",
        faults=("channel_cut",),
    ),
    Mutant(
        "hand out a fence where no epoch is live",
        CORE + "admission",
        "why_parked",
        "if not sandbox.live:",
        "if not sandbox.open:",
    ),
    Mutant(
        "never wake what waits",
        CORE + "outcomes",
        "wake",
        "if len(woken) >= room:",
        "if True:",
    ),
    Mutant(
        "count a fence number twice",
        CORE + "evolve",
        "_fenced",
        "sandbox.next_no = entry.no + 1",
        "sandbox.next_no = entry.no",
    ),
    Mutant(
        "forget that something is owed to a sandbox",
        CORE + "evolve",
        "_note_busy",
        "state.busy[sandbox.id] = None",
        "pass",
    ),
    Mutant(
        "settle an ambiguous create as if it had failed",
        CORE + "life",
        "_create_failed",
        "if sandbox.releasing and not ambiguous:",
        "if sandbox.releasing:",
        seeds=300,
        faults=("create_ambiguous", "sandbox_released", "observe_unknown"),
    ),
    Mutant(
        "take one call's failure for the end of its create id",
        CORE + "life",
        "_create_failed",
        "not value.settled if sandbox.releasing else value.ambiguous",
        "value.ambiguous",
        seeds=400,
        rates={
            "create_refused": 0.5,
            "create_ambiguous": 0.4,
            "sandbox_preempted": 0.1,
            "sandbox_released": 0.9,
        },
    ),
    Mutant(
        "let a second disk be made for a lost one that is not gone",
        CORE + "life",
        "_gone",
        "if ref != sandbox.ref:",
        "if ref is None:",
        seeds=300,
        faults=("fact_repeated", "sandbox_preempted"),
    ),
    Mutant(
        "never give up on a dead lease",
        CORE + "life",
        "overdue",
        "hints.lease_expired(sandbox, now_ms)",
        "False",
        seeds=80,
        faults=("gateway_crash", "gateway_pause"),
    ),
    Mutant(
        "a disk that applies again what its journal has",
        SIMULATOR + "toolhost",
        "Toolhost._apply",
        'if last.state == "done" and last.direction != "undo" and last.digest == call.digest:',
        "if False:",
        faults=("channel_cut", "receipt_lost"),
    ),
    Mutant(
        "a revocation that looks at the attempt alone",
        SIMULATOR + "toolhost",
        "Toolhost.carried_into",
        'if last is None or last.direction == "undo" or last.state not in ("done", "broken"):',
        "if True:",
        seeds=300,
        faults=("step_cancelled", "receipt_lost", "channel_cut"),
    ),
    Mutant(
        "a command that is run again after a crash",
        SIMULATOR + "toolhost",
        "Toolhost._recover",
        "if record.is_command:",
        "if False:",
        faults=("toolhost_crash_at_point", "toolhost_crash"),
    ),
    Mutant(
        "go on with an undo on other bytes",
        CORE + "outcomes",
        "settle_on_same_disk",
        'if step.phase == "undo" and moved == "epoch_moved":',
        "if False:",
        seeds=400,
        rates={
            "snapshot_restored": 0.08,
            "step_cancelled": 0.5,
            "channel_cut": 0.1,
            "receipt_lost": 0.3,
            "receipt_empty": 0.2,
        },
    ),
    Mutant(
        "forget what was read of a disk when its marking comes to nothing",
        CORE + "evolve",
        "_marking",
        "sandbox.journal_seq = max(sandbox.journal_seq, entry.journal_seq)",
        "pass",
        seeds=400,
        faults=("disk_rolled_back_before_mark", "toolhost_crash_at_point", "channel_cut"),
    ),
)
