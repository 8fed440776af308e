"""
What must be true, recomputed in the dumbest way from what the auditor alone can see.

It reads the accepted batches as plain JSON objects, the bytes of all disks and the outside world.
It shares no code with the deciding core. `checkers` judge what it collects, one guarantee each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from fencepost.core.facts import Ref
from fencepost.core.receipts import Receipt
from fencepost.core.sandbox.orders import Dispatch
from fencepost.core.sweeping import Result
from fencepost.simulator.dag_views import DagView
from fencepost.simulator.disks import Contents, Outside
from fencepost.simulator.ledger import Stored
from fencepost.simulator.provider import Instance, Provider
from fencepost.simulator.toolhost import Toolhost
from fencepost.simulator.world import World


class BatchJson(msgspec.Struct):
    """The frame of a batch as it stands in the log."""

    term: int
    owner: str
    prev: int
    now_ms: int
    positions: dict[str, dict[str, Any]]
    last_seen: dict[str, dict[str, int]]
    entries: list[dict[str, Any]]


_BATCH = msgspec.json.Decoder(BatchJson)
_MOMENTS = frozenset(
    (
        "created",
        "requested",
        "assigned",
        "create_failed",
        "rebuild_intended",
        "holder_added",
        "holder_removed",
        "epoch_opened",
        "marking",
        "attached",
        "epoch_closed",
        "claimed",
        "unclaimed",
        "stop_answered",
        "gone",
    )
)
"""What a DAG is told of at once, so that a cancel can come at that very moment."""


class StepView:
    """One step as its entries tell it."""

    __slots__ = (
        "attempt",
        "commit_after",
        "digest",
        "direction",
        "doubted",
        "effect",
        "epoch",
        "joined",
        "no",
        "resolved",
        "session",
        "state",
    )

    def __init__(self, spec: dict[str, Any]) -> None:
        self.effect: str = spec.get("effect", "workspace")
        self.digest: str = spec["digest"]
        self.attempt = ""
        self.no = 0
        self.epoch = 0
        self.session = ""
        self.direction = ""
        self.state = "pending"
        self.commit_after: str = spec.get("commit_after", "receipt")
        self.joined = False
        self.doubted = False
        self.resolved = False

    @property
    def is_final(self) -> bool:
        return self.state in ("committed", "compensated")


class SandboxView:
    """One sandbox as its entries tell it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.open = False
        self.session = ""
        self.gateway = ""
        self.nonce = ""
        self.next_no = 1
        self.releasing = False
        self.condemned = False
        self.gone = False
        self.keepers: dict[str, None] = {}
        self.creates: dict[str, None] = {}
        self.authority = ""
        self.native_id = ""
        self.instance = ""
        self.named_ever = False
        self.held_by: dict[tuple[str, str], bool] = {}
        self.steps: dict[str, StepView] = {}
        self.committed: dict[str, None] = {}
        self.excused: dict[str, None] = {}
        self.manifest = ""


class MadeReceipt(NamedTuple):
    """What was true when a toolhost made a receipt."""

    receipt: Receipt
    held: int
    epoch_on_disk: int


class Auditor:
    """
    Collects what is true. `on_entry` hooks see an entry before the view takes it, which is the
    state that the entry's batch extended; `on_batch` hooks see each accepted batch whole.
    """

    def __init__(self, world: World, outside: Outside) -> None:
        self.world = world
        self.outside = outside
        self.provider: Provider | None = None
        self.sandboxes: dict[str, SandboxView] = {}
        self.dags: dict[str, DagView] = {}
        self.strays: dict[str, list[Ref]] = {}
        self.happened: Callable[[str, str], None] | None = None
        self.sandbox_of_step: dict[str, SandboxView] = {}
        self.receipts: dict[tuple[str, str, int], MadeReceipt] = {}
        self.marked_with: dict[str, dict[str, int]] = {}
        self.batches = 0
        self.on_entry: dict[str, list[Callable[[SandboxView, dict[str, Any]], None]]] = {}
        self.on_dag_entry: dict[str, list[Callable[[DagView, dict[str, Any]], None]]] = {}
        self.on_stray_gone: list[Callable[[Ref], None]] = []
        self.on_swept: list[Callable[[Result], None]] = []
        self.after_entry: dict[str, list[Callable[[SandboxView, dict[str, Any]], None]]] = {}
        self.on_batch: list[Callable[[str, int, Stored, BatchJson], None]] = []
        self.on_wrote: list[Callable[[Toolhost, str, bool], None]] = []
        self.on_acted: list[Callable[[str], None]] = []
        self.on_started: list[Callable[[Instance], None]] = []
        self.on_stop: list[Callable[[Instance], None]] = []
        self.on_accepted: list[Callable[[Any], None]] = []
        self.on_owned: list[Callable[[Any], None]] = []

    # --- what runtimes and the world report ---------------------------------------------------

    def dag_appended(self, shard: int, expected: int, stored: Stored) -> None:
        """A batch of the dag family."""
        del expected
        batch = _BATCH.decode(stored.payload)
        self.batches += 1
        for hook in self.on_batch:
            hook("dag", shard, stored, batch)
        for entry in batch.entries:
            kind = entry["kind"]
            if self.world.trace is not None:
                self.world.tell("ledger", f"{stored.seq}@dag{shard}", _short(entry))
            name = entry.get("dag", "")
            view = self.dags.get(name)
            if view is None:
                if not name:
                    continue
                view = self.dags[name] = DagView(name)
            for check in self.on_dag_entry.get(kind, ()):
                check(view, entry)
            view.take(kind, entry)
            self._happened(name, kind)

    def _happened(self, dag: str, kind: str) -> None:
        if self.happened is not None and dag:
            self.happened(dag, kind)

    def _happened_to(self, view: SandboxView, kind: str) -> None:
        if self.happened is not None:
            for dag, _ in view.held_by:
                self.happened(dag, kind)

    def appended(self, shard: int, expected: int, stored: Stored) -> None:
        """A batch of the sandbox family."""
        del expected
        batch = _BATCH.decode(stored.payload)
        self.batches += 1
        tracing = self.world.trace is not None
        for hook in self.on_batch:
            hook("sandbox", shard, stored, batch)
        for entry in batch.entries:
            kind = entry["kind"]
            if tracing:
                self.world.tell("ledger", f"{stored.seq}@{shard}", _short(entry))
            name = entry.get("sandbox", "")
            if kind in ("stray_found", "stray_gone"):
                self._take_stray(name, kind, entry)
                continue
            view = self.sandboxes.get(name)
            if view is None:
                if kind != "created":
                    continue
                view = self.sandboxes[name] = SandboxView(name)
            for check in self.on_entry.get(kind, ()):
                check(view, entry)
            _take(self, view, kind, entry)
            for check in self.after_entry.get(kind, ()):
                check(view, entry)
            if view.held_by and kind in _MOMENTS:
                self._happened_to(view, kind)

    def _take_stray(self, name: str, kind: str, entry: dict[str, Any]) -> None:
        ref = Ref(**entry["ref"])
        others = [known for known in self.strays.get(name, []) if known != ref]
        self.strays[name] = [*others, ref] if kind == "stray_found" else others
        if kind == "stray_gone":
            for hook in self.on_stray_gone:
                hook(ref)

    def swept(self, result: Result) -> None:
        for hook in self.on_swept:
            hook(result)

    def owned(self, hold: Any) -> None:
        for hook in self.on_owned:
            hook(hold)

    def accepted(self, hold: Any) -> None:
        for hook in self.on_accepted:
            hook(hold)

    def performed(self, hold: Any, effect: Any) -> None:
        if self.world.trace is not None:
            order = type(effect.order).__name__
            self.world.tell("effect", hold.planner.name, order, effect.key, "to", effect.target)

    def started(self, instance: Instance) -> None:
        for hook in self.on_started:
            hook(instance)

    def stop_taken(self, instance: Instance) -> None:
        self.world.tell("stopping", instance.label)
        for hook in self.on_stop:
            hook(instance)

    def wrote(self, toolhost: Toolhost, step: str, *, restored: bool = False) -> None:
        self.world.tell("wrote", toolhost.name, step, f"held {toolhost.contents.held.get(step)}")
        for hook in self.on_wrote:
            hook(toolhost, step, restored)

    def acted_outside(self, step: str) -> None:
        self.world.tell("outside", step)
        for hook in self.on_acted:
            hook(step)

    def receipt_made(self, toolhost: Toolhost, receipt: Receipt, call: Dispatch) -> None:
        contents = toolhost.contents
        if call.effect == "external":
            held = self.outside.done.get(call.step, 0)
        else:
            held = contents.held.get(call.step, 0)
        epoch = contents.marker.epoch if contents.marker is not None else 0
        self.world.tell("receipt", toolhost.name, receipt.attempt, receipt.verdict, f"held {held}")
        self.receipts[(receipt.sandbox, receipt.attempt, receipt.no)] = MadeReceipt(
            receipt, held, epoch
        )

    def marked(self, toolhost: Toolhost, contents: Contents) -> None:
        marker = contents.marker
        assert marker is not None
        self.world.tell("marked", toolhost.name, marker.epoch, marker.session)
        self.marked_with[marker.session] = dict(contents.held)

    # --- the truth ----------------------------------------------------------------------------

    def running(self, view: SandboxView) -> list[Instance]:
        """The instances of a sandbox that its provider has, terminating ones included."""
        assert self.provider is not None
        return [
            instance
            for instance in self.provider.instances.values()
            if instance.sandbox == view.name and instance.state != "gone" and not instance.stray
        ]

    def is_known_stray(self, instance: Instance) -> bool:
        """Whether its sandbox's shard says that this very thing is nobody's."""
        return any(
            ref.authority == instance.authority
            and ref.native_id == instance.native_id
            and instance.is_of(ref)
            for ref in self.strays.get(instance.sandbox, ())
        )

    def is_as_good_as_gone(self, instance: Instance) -> bool:
        """Being stopped, at a provider that can never show that something is gone."""
        assert self.provider is not None
        blind = not self.provider.capabilities(instance.authority).observes_gone
        return blind and instance.state == "terminating"

    def held_now(self, view: SandboxView, step: str, *, lost: bool) -> int:
        """
        How often a step's effect is on the disk that the ledger speaks of.

        Another boot, or another point of its disk, that the ledger has not met may hold other
        bytes: it is judged when it is met. What is called lost is judged by what was read.
        """
        met = ("", "unmarked") if lost else ("",)
        return sum(
            instance.disk.contents.held.get(step, 0)
            for instance in self.running(view)
            if instance.name == view.instance and instance.disk.unmet in met
        )


def _short(entry: dict[str, Any]) -> str:
    words = []
    for key, value in entry.items():
        if key == "receipt":
            value = value["verdict"]  # noqa: PLW2901 - the rest of it was told when it was made
        if key in ("spec", "capabilities") or value in ("", 0):
            continue
        if key in ("ref", "labels") and isinstance(value, dict):
            value = value.get("instance", "")  # noqa: PLW2901
        words.append(str(value) if key == "kind" else f"{key}={value}")
    return " ".join(words)


def _take(auditor: Auditor, view: SandboxView, kind: str, entry: dict[str, Any]) -> None:
    step_name = entry.get("step")
    if step_name is not None:
        _take_step(auditor, view, kind, step_name, entry)
        return
    match kind:
        case "created" | "rebuild_intended":
            view.creates[entry["create_id"]] = None
            view.condemned = False
        case "assigned":
            view.creates.pop(entry["create_id"], None)
            view.authority = entry["ref"]["authority"]
            view.native_id = entry["ref"]["native_id"]
            view.named_ever = True
            view.instance = entry["ref"]["instance"]
        case "create_failed":
            if view.releasing and not entry["ambiguous"]:
                view.creates.pop(entry["create_id"], None)
        case "epoch_opened":
            view.epoch, view.open, view.session = entry["epoch"], True, ""
            view.nonce, view.instance = entry["nonce"], entry["instance"]
        case "marking":
            view.instance = entry["ref"]["instance"]
        case "attached":
            view.session, view.gateway = entry["session"], entry["gateway"]
        case "detached":
            if view.session == entry["session"]:
                view.session = ""
        case "epoch_closed":
            view.open, view.session = False, ""
        case "condemned":
            view.condemned = True
        case "checkpointed":
            view.manifest = entry["manifest"]
        case "owed":
            for told, *_ in entry["steps"]:
                view.committed.pop(told, None)
        case "recovered":
            view.excused = {}
            if entry.get("lost") or entry.get("without") or entry["mode"] == "accepted":
                # What the disk lacks is not listed then; it was said that nobody may count on it.
                view.committed = {}
            if entry.get("lost"):
                view.manifest = ""
        case "holder_added":
            view.keepers["dag/" + entry["dag"]] = None
            view.held_by[(entry["dag"], entry["acquisition"])] = True
        case "holder_removed":
            view.keepers.pop("dag/" + entry["dag"], None)
        case "claimed":
            view.keepers["claim/" + entry["claim"]] = None
        case "unclaimed":
            view.keepers.pop("claim/" + entry["claim"], None)
        case "releasing":
            view.releasing = True
        case "gone":
            if entry["instance"] == view.instance:
                view.native_id = view.instance = ""
            view.gone = view.releasing and not view.native_id and not view.creates


def _take_step(
    auditor: Auditor, view: SandboxView, kind: str, name: str, entry: dict[str, Any]
) -> None:
    step = view.steps.get(name)
    if step is None:
        if kind not in ("fenced", "parked"):
            return
        step = view.steps[name] = StepView(entry["spec"])
        auditor.sandbox_of_step[name] = view
    match kind:
        case "parked":
            step.state, step.attempt = "pending", entry["attempt"]
        case "fenced":
            step.state, step.attempt, step.no = "fenced", entry["attempt"], entry["no"]
            step.epoch, step.session = entry["epoch"], entry["session"]
            step.direction = entry.get("direction", "apply")
            step.joined = False
            view.next_no = entry["no"] + 1
        case "joined":
            step.joined = True
        case "replaying":
            view.next_no = entry["no"] + 1
        case "replayed":
            if entry.get("accepted"):
                view.committed.pop(name, None)
        case "committed":
            step.state = "committed"
            if step.effect == "workspace":
                view.committed[name] = None
        case "compensated":
            if entry["final"]:
                step.state = "compensated"
        case "indeterminate":
            step.state = "indeterminate"
            step.doubted = True
        case "resolved":
            step.state = entry["state"]
            step.resolved = True
