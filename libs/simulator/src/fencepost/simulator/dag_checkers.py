"""
The guarantees about DAGs, sweeps and messages between shards, one class each.
"""

from __future__ import annotations

from typing import Any

from fencepost.core import ids
from fencepost.core.facts import Stray
from fencepost.core.sweeping import Result
from fencepost.simulator.auditor import Auditor, BatchJson, SandboxView
from fencepost.simulator.checking import Checker
from fencepost.simulator.dag_views import SETTLED, AcquisitionView, DagView
from fencepost.simulator.ledger import Stored
from fencepost.simulator.provider import Instance


class VerdictTrue(Checker):
    """I4: what the provider really runs is looked at, at the very moment of the answer."""

    invariant = "I4"
    promises = "no DAG is called released while a sandbox acquired for it runs"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_dag_entry.setdefault("answered", []).append(self.answered)

    def answered(self, dag: DagView, entry: dict[str, Any]) -> None:
        verdict = entry["verdict"]
        if verdict not in SETTLED:
            return
        for one in dag.acquisitions.values():
            running = [i.name for i in self._running_for(dag, one)]
            self.need(
                not running, f"{dag.name} is answered {verdict}, and {running} of {one.id} runs"
            )
        if verdict == "nothing_held":
            named = [one.sandbox for one in dag.acquisitions.values() if self._was_named(one)]
            self.need(not named, f"{dag.name} is answered nothing_held, and it held {named}")

    def _was_named(self, one: AcquisitionView) -> bool:
        view = self.auditor.sandboxes.get(one.sandbox)
        return one.fresh and view is not None and view.named_ever

    def _running_for(self, dag: DagView, one: AcquisitionView) -> list[Instance]:
        view = self.auditor.sandboxes.get(one.sandbox)
        if view is None or not (one.fresh or (dag.name, one.id) in view.held_by):
            return []
        return [i for i in self.auditor.running(view) if not self.auditor.is_as_good_as_gone(i)]


class SweepsHarmless(Checker):
    """I6, over both families: nobody is taken from a DAG which has not let go."""

    invariant = "I6"
    promises = "no sandbox with a live holder or a claim is stopped"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_entry.setdefault("holder_removed", []).append(self.holder_removed)
        auditor.on_swept.append(self.swept)

    def holder_removed(self, view: SandboxView, entry: dict[str, Any]) -> None:
        dag = self.auditor.dags.get(entry["dag"])
        one = dag.acquisitions.get(entry["acquisition"]) if dag is not None else None
        self.need(
            one is None or one.let_go,
            f"{view.name} is taken from {entry['dag']}, which holds it as {entry['acquisition']}",
        )

    def swept(self, result: Result) -> None:
        """What a sweep proposes is only asked; a neighbour's may not even be asked for."""
        assert self.auditor.provider is not None
        for fact in result.proposals:
            if isinstance(fact, Stray):
                instance = self.auditor.provider.find(fact.ref)
                self.need(
                    instance is None or instance.deployment == "ours",
                    f"a sweep proposes {fact.ref.instance}, which is a neighbour's",
                )


class MessagesOnce(Checker):
    """I8: between two shards messages are taken in order, none twice, and none is left out."""

    invariant = "I8"
    promises = "the ledger is unbroken, and every state equals its fold"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        self._shards = auditor.world.options.shards
        self._sent: dict[tuple[str, str], dict[tuple[int, int], None]] = {}
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}
        auditor.on_batch.append(self.batch)
        auditor.on_entry.setdefault("holder_added", []).append(self.holder_added)

    def batch(self, family: str, shard: int, stored: Stored, batch: BatchJson) -> None:
        me = f"{family}.{shard}"
        for sender, at in batch.last_seen.items():
            seen = (at["seq"], at["index"])
            before = self._seen.get((sender, me), (0, 0))
            if seen == before:
                continue
            self.need(seen > before, f"{me} goes back from {before} to {seen} of {sender}")
            known = seen in self._sent.get((sender, me), ())
            self.need(known, f"{me} takes {seen} of {sender}, which sent no such message")
            self._seen[(sender, me)] = seen
        count = 0
        for entry in batch.entries:
            to = _receiver(family, entry)
            if to is not None:
                receiver = f"{to[0]}.{ids.shard_of(to[1], self._shards)}"
                self._sent.setdefault((me, receiver), {})[(stored.seq, count)] = None
                count += 1

    def holder_added(self, view: SandboxView, entry: dict[str, Any]) -> None:
        held = (entry["dag"], entry["acquisition"])
        self.need(held not in view.held_by, f"{view.name} is held twice by {held}")

    def waiting(self) -> list[str]:
        """Which messages were not taken, once all should be."""
        return [
            f"{receiver} took {self._seen.get((sender, receiver), (0, 0))} of {sender}, "
            f"which sent {next(reversed(sent))}"
            for (sender, receiver), sent in self._sent.items()
            if next(reversed(sent)) != self._seen.get((sender, receiver), (0, 0))
        ]


def _receiver(family: str, entry: dict[str, Any]) -> tuple[str, str] | None:
    kind = entry["kind"]
    if family == "dag":
        return ("sandbox", entry["sandbox"]) if kind in ("intended", "release_begun") else None
    return ("dag", entry["dag"]) if kind == "told" else None
