"""
The guarantees, one class each. A checker judges at the very moment at which something happens.
"""

from __future__ import annotations

from typing import Any

from fencepost.core.facts import Ref
from fencepost.simulator.auditor import Auditor, SandboxView
from fencepost.simulator.checking import Checker as Checker  # noqa: PLC0414 - for whoever lists them
from fencepost.simulator.dag_checkers import MessagesOnce, SweepsHarmless, VerdictTrue
from fencepost.simulator.ledger_checkers import LedgerUnbroken as LedgerUnbroken  # noqa: PLC0414
from fencepost.simulator.provider import DEPLOYMENT, Instance
from fencepost.simulator.toolhost import Toolhost


class CommitJoins(Checker):
    """I1: the receipt is of the current, open epoch and session, in the state it extends."""

    invariant = "I1"
    promises = "a committed step has exactly one receipt, of the live epoch and session"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_entry.setdefault("committed", []).append(self.committed)

    def committed(self, view: SandboxView, entry: dict[str, Any]) -> None:
        name, receipt = entry["step"], entry["receipt"]
        step = view.steps.get(name)
        if step is None:
            self.need(False, f"{name} is committed and was never fenced")
            return
        marker = receipt["after"]
        epochs = (receipt["epoch"], marker["epoch"], step.epoch)
        sessions = (receipt["session"], marker["session"], step.session)
        self.need(step.state == "fenced", f"{name} is committed while {step.state}")
        self.need(step.direction == "apply", f"{name} is committed while {step.direction}")
        self.need(view.open, f"{name} is committed on a closed epoch {view.epoch}")
        self.need(
            all(type(e) is int and e == view.epoch for e in epochs),
            f"{name}: epochs {epochs}, the live one is {view.epoch}",
        )
        self.need(
            bool(view.session) and all(s == view.session for s in sessions),
            f"{name}: sessions {sessions}, the live one is {view.session!r}",
        )
        self.need(
            receipt["nonce"] == view.nonce == marker["nonce"],
            f"{name}: nonce {receipt['nonce']}, the live one is {view.nonce}",
        )
        self.need(
            receipt["instance"] == view.instance == marker["instance"],
            f"{name}: instance {receipt['instance']}, the live one is {view.instance}",
        )
        self.need(entry["gateway"] == view.gateway, f"{name}: stamped by {entry['gateway']}")
        self.need(
            (receipt["attempt"], receipt["no"], receipt["digest"])
            == (step.attempt, step.no, step.digest)
            and entry["attempt"] == step.attempt,
            f"{name}: the receipt is of another fence than {step.attempt} no {step.no}",
        )
        self.need(
            receipt["verdict"] in ("applied", "attested")
            and receipt.get("outcome") in ("ok", "failed"),
            f"{name}: verdict {receipt['verdict']}",
        )


class CommitIsOnDisk(Checker):
    """I2: the write was there when the receipt was made, and what is lost is owed."""

    invariant = "I2"
    promises = "a committed write was on the disk of its epoch; a lost one is owed"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_entry.setdefault("committed", []).append(self.committed)
        auditor.on_entry.setdefault("epoch_opened", []).append(self.epoch_opened)
        auditor.on_entry.setdefault("attached", []).append(self.attached)
        auditor.on_entry.setdefault("recovered", []).append(self.recovered)
        auditor.on_entry.setdefault("checkpointed", []).append(self.checkpointed)

    def checkpointed(self, view: SandboxView, entry: dict[str, Any]) -> None:
        """It holds what was committed, once, and nothing that may yet be taken back."""
        stored = self.auditor.outside.store.truth(view.name, entry["manifest"])
        if stored is None:
            self.need(False, f"{view.name}: {entry['checkpoint']} was never stored")
            return
        for name in view.committed:
            self.need(
                stored.held.get(name, 0) == 1,
                f"{view.name}: {entry['checkpoint']} does not hold the committed {name}",
            )
        for name in stored.held:
            step = view.steps[name]
            self.need(
                step.state in ("committed", "indeterminate") or step.joined or step.doubted,
                f"{view.name}: {entry['checkpoint']} holds {name}, which is {step.state}",
            )

    def committed(self, view: SandboxView, entry: dict[str, Any]) -> None:
        receipt = entry["receipt"]
        if view.steps[entry["step"]].commit_after == "checkpoint":
            stored = self.auditor.outside.store.truth(view.name, view.manifest)
            self.need(
                stored is not None and stored.held.get(entry["step"], 0) == 1,
                f"{entry['step']} is committed after a checkpoint, and is in none",
            )
        made = self.auditor.receipts.get((view.name, receipt["attempt"], receipt["no"]))
        if made is None:
            self.need(False, f"{entry['step']} is committed by a receipt that no disk gave")
            return
        self.need(made.held > 0, f"{entry['step']} is committed and its effect was not there")
        self.need(
            made.epoch_on_disk == receipt["epoch"],
            f"{entry['step']}: the disk was at epoch {made.epoch_on_disk}",
        )

    def recovered(self, view: SandboxView, entry: dict[str, Any]) -> None:
        """What the present disk lacks and nobody was told of, is silently absent."""
        disks = [i.disk.contents for i in self.auditor.running(view) if i.name == view.instance]
        for contents in disks:
            marker = contents.marker
            if marker is None or marker.session != view.session:
                continue
            if entry["mode"] == "accepted" or entry.get("without") or entry.get("lost"):
                continue  # a person took the disk as it is, or gave the checkpoint up
            for name in view.committed:
                self.need(
                    contents.held.get(name, 0) > 0,
                    f"{view.name}: epoch {view.epoch} is called recovered and lacks {name}",
                )

    def epoch_opened(self, view: SandboxView, entry: dict[str, Any]) -> None:
        if entry["disk"] == "warm" and entry.get("recovering"):
            view.excused = dict(view.committed)
        if entry["disk"] == "warm":
            return
        owed = entry.get("owed", 0)
        if entry.get("checkpoint"):
            view.excused = dict(view.committed)
            return  # what it starts from, and what is owed beyond, is seen once it recovered
        self.need(
            owed >= len(view.committed),
            f"{view.name} opens a {entry['disk']} epoch {entry['epoch']} that owes {owed}, "
            f"{len(view.committed)} steps are committed",
        )
        view.excused = dict(view.committed)

    def attached(self, view: SandboxView, entry: dict[str, Any]) -> None:
        held = self.auditor.marked_with.get(entry["session"])
        if held is None:
            self.need(False, f"{view.name} is attached in {entry['session']}, never marked")
            return
        for name in view.committed:
            if name not in view.excused:
                self.need(
                    held.get(name, 0) > 0,
                    f"{view.name}: epoch {view.epoch} silently lacks the committed {name}",
                )


class EffectsOnce(Checker):
    """I3: at most once per disk, external ones at most once in all, and none after the end."""

    invariant = "I3"
    promises = "an effect is applied at most once, and never after its step ended"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_wrote.append(self.wrote)
        auditor.on_acted.append(self.acted)
        auditor.on_entry.setdefault("compensated", []).append(self.compensated)

    def wrote(self, toolhost: Toolhost, step: str, restored: bool) -> None:
        held = toolhost.contents.held.get(step, 0)
        self.need(0 <= held <= 1, f"{step} is {held} times on {toolhost.disk.name}")
        view = self.auditor.sandbox_of_step.get(step)
        if held == 0 or view is None or toolhost.disk.pulled:
            return
        ended = view.steps[step]
        if restored and ended.resolved:
            # A person's word, which nobody else can check: what the step left was in the checkpoint
            # when it was taken, and comes back with it. Applying it anew is another thing.
            return
        marker = toolhost.contents.marker
        if marker is not None and marker.epoch == view.epoch and view.open:
            self.need(
                ended.state not in ("compensated", "refused"),
                f"{step} is applied after it ended as {ended.state}",
            )

    def acted(self, step: str) -> None:
        count = self.auditor.outside.done[step]
        self.need(count == 1, f"the external {step} took effect {count} times")
        view = self.auditor.sandbox_of_step.get(step)
        if view is not None:
            ended = view.steps[step].state
            self.need(ended != "compensated", f"the external {step} acts after it ended")

    def compensated(self, view: SandboxView, entry: dict[str, Any]) -> None:
        name, evidence = entry["step"], entry["evidence"]
        if not entry["final"]:
            return
        step = view.steps[name]
        self.need(not step.is_final, f"{name} ends twice")
        if step.effect == "external":
            outside = self.auditor.outside
            if evidence == "undone":
                taken_back = outside.undone.get(name, 0) or not outside.done.get(name, 0)
                self.need(bool(taken_back), f"the external {name} is called undone and is not")
            else:
                self.need(
                    not outside.done.get(name, 0), f"the external {name} is called {evidence}"
                )
            return
        held = self.auditor.held_now(view, name, lost=evidence == "lost_with_epoch")
        self.need(held == 0, f"{name} is called {evidence} and is {held} times on the disk")


class AllNamed(Checker):
    """I5: whatever runs is named by the ledger."""

    invariant = "I5"
    promises = "every running sandbox is named by the ledger at every instant"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_started.append(self.started)
        for kind in ("created", "rebuild_intended", "assigned", "create_failed", "gone"):
            auditor.after_entry.setdefault(kind, []).append(self.changed)

    def started(self, instance: Instance) -> None:
        view = self.auditor.sandboxes.get(instance.sandbox)
        self.need(
            view is not None and not view.gone and instance.create_id in view.creates,
            f"{instance.name} starts for {instance.create_id}, which no ledger names",
        )

    def changed(self, view: SandboxView, entry: dict[str, Any]) -> None:
        for instance in self.auditor.running(view):
            if self.auditor.is_as_good_as_gone(instance):
                continue
            named = (instance.authority, instance.native_id) == (view.authority, view.native_id)
            self.need(
                named
                or instance.create_id in view.creates
                or self.auditor.is_known_stray(instance),
                f"{instance.name} of {view.name} runs, unnamed after {entry['kind']}",
            )


class HeldNotStopped(Checker):
    """I6: what is held or claimed is not stopped; a condemned instance is replaced."""

    invariant = "I6"
    promises = "no sandbox with a live holder or a claim is stopped"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_stop.append(self.stopping)
        auditor.on_entry.setdefault("releasing", []).append(self.releasing)
        for kind in ("holder_added", "claimed"):
            auditor.on_entry.setdefault(kind, []).append(self.kept)

    def stopping(self, instance: Instance) -> None:
        if instance.deployment != DEPLOYMENT:
            self.need(False, f"{instance.name} of {instance.deployment} is stopped")
            return
        view = self.auditor.sandboxes.get(instance.sandbox)
        stray = self.auditor.is_known_stray(instance)
        if instance.stray:
            self.need(stray, f"{instance.name}, which is nobody's, is stopped under no name")
            return
        current = view is not None and instance.key == f"{view.authority}/{view.native_id}"
        allowed = view is not None and (view.releasing or view.condemned)
        self.need(
            allowed or (stray and not current),
            f"{instance.name} is stopped while {instance.sandbox} is held",
        )

    def kept(self, view: SandboxView, entry: dict[str, Any]) -> None:
        self.need(not view.releasing, f"{view.name} is {entry['kind']} while it is released")

    def releasing(self, view: SandboxView, entry: dict[str, Any]) -> None:
        del entry
        self.need(not view.keepers, f"{view.name} is released while kept by {list(view.keepers)}")


class UnknownStaysUnknown(Checker):
    """I7: what the ledger calls gone was gone."""

    invariant = "I7"
    promises = "unknown never becomes absent: what is called gone is gone"

    def __init__(self, auditor: Auditor) -> None:
        super().__init__(auditor)
        auditor.on_stray_gone.append(self.stray_gone)
        auditor.on_entry.setdefault("gone", []).append(self.gone)
        auditor.on_entry.setdefault("epoch_closed", []).append(self.epoch_closed)
        auditor.on_entry.setdefault("compensated", []).append(self.compensated)

    def _is_gone(self, view: SandboxView, instance_name: str) -> bool:
        assert self.auditor.provider is not None
        ref = Ref(
            authority=view.authority,
            provider="sim",
            native_id=instance_name.partition(".")[0],
            instance=instance_name,
        )
        return self._is_what_it_names_gone(ref)

    def _is_what_it_names_gone(self, ref: Ref) -> bool:
        assert self.auditor.provider is not None
        instance = self.auditor.provider.find(ref)
        return instance is None or self.auditor.is_as_good_as_gone(instance)

    def stray_gone(self, ref: Ref) -> None:
        self.need(self._is_what_it_names_gone(ref), f"the stray {ref.instance} is called gone")

    def gone(self, view: SandboxView, entry: dict[str, Any]) -> None:
        if entry["instance"]:
            self.need(self._is_gone(view, entry["instance"]), f"{entry['instance']} is called gone")
        else:
            left = [
                instance
                for instance in self.auditor.running(view)
                if entry["evidence"] != "stop_accepted"
                or not self.auditor.is_as_good_as_gone(instance)
            ]
            self.need(not left, f"{view.name} is called {entry['evidence']}, and is there")

    def epoch_closed(self, view: SandboxView, entry: dict[str, Any]) -> None:
        if entry["reason"] == "disk_gone":
            self.need(self._is_gone(view, view.instance), f"the disk of {view.name} is called gone")

    def compensated(self, view: SandboxView, entry: dict[str, Any]) -> None:
        if entry["evidence"] == "lost_with_epoch":
            held = self.auditor.held_now(view, entry["step"], lost=True)
            self.need(held == 0, f"{entry['step']} is called lost and is on the disk")


class AllSettles(Checker):
    """I9: once faults stop, everything ends, or says what it waits for."""

    invariant = "I9"
    promises = "once faults stop every step ends, and what is released goes"

    def judge(self, waiting: list[str]) -> None:
        self.need(not waiting, "still waiting for: " + "; ".join(waiting[:6]))


class NothingBlocks(Checker):
    """I10: a tick that is due always ends, and no step waits for ever behind another."""

    invariant = "I10"
    promises = "a queue never blocks itself"

    def judge(self, parked: list[str]) -> None:
        self.need(not parked, "parked on a live sandbox with room: " + ", ".join(parked[:6]))


ALL: tuple[type[Checker], ...] = (
    CommitJoins,
    CommitIsOnDisk,
    EffectsOnce,
    AllNamed,
    HeldNotStopped,
    UnknownStaysUnknown,
    VerdictTrue,
    SweepsHarmless,
    MessagesOnce,
    LedgerUnbroken,
    AllSettles,
    NothingBlocks,
)
