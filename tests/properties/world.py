"""
Disks, a provider and gateways around one shard: faithful, but as unlucky as they are told to be.

The disks see all: what was applied on which disk, and how often an external effect happened. That
is what the decisions are judged by; the shard is told of it only by facts and receipts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from fencepost.core import facts
from fencepost.core.receipts import Marker, Receipt
from fencepost.core.sandbox import orders

from tests.factories import Bench, manifest, ref


@dataclass
class Record:
    attempt: str
    step: str
    direction: str
    digest: str
    state: str = ""  # "", done, broken
    revoked: bool = False
    undone: bool = False
    receipt: Receipt | None = None


@dataclass
class Disk:
    """One disk: a marker, a journal, and which steps' effects lie on it, how often each."""

    native_id: str
    instance: str
    uid: int
    epoch: int = 0
    session: str = ""
    nonce: str = ""
    seq: int = 0
    records: dict[str, Record] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)
    restored_as: str = ""

    @property
    def marker(self) -> Marker | None:
        if not self.nonce:
            return None
        return Marker(
            epoch=self.epoch, session=self.session, nonce=self.nonce, instance=self.instance
        )


class World:
    """`pending` are facts and receipts under way: to be delivered in any order, or never."""

    def __init__(self) -> None:
        self.bench = Bench(pure=False)
        self.disks: dict[str, Disk] = {}
        self.snapshots: dict[str, Disk] = {}
        self.stored: dict[tuple[str, str], dict[str, int]] = {}
        self.pending: list[Any] = []
        self.external: dict[tuple[str, str], int] = {}
        self.channels: dict[str, tuple[str, int]] = {}
        self.minted = 0
        self.break_next = False
        self.fail_restore = False
        self.slow_provider = False

    def mint(self, word: str) -> str:
        self.minted += 1
        return f"{word}{self.minted}"

    # --- orders ---------------------------------------------------------------------------------

    def carry_out(self, order: Any, gateway: str) -> list[Any]:
        """What a gateway does with one order; returns what it reports."""
        match order:
            case orders.CreateOrder():
                return self._create(order, gateway)
            case orders.AttachOrder():
                return self._attach(order, gateway)
            case orders.MarkOrder():
                return self._mark(order, gateway)
            case orders.StopOrder():
                return self._stop(order, gateway)
            case orders.Dispatch():
                return self._dispatch(order, gateway)
            case orders.CheckpointOrder():
                return self._checkpoint(order, gateway)
            case orders.RestoreOrder():
                return self._restore(order, gateway)
            case orders.PruneOrder():
                for name in [n for n in self.stored if n[0] == order.sandbox]:
                    if name[1] not in order.keep:
                        del self.stored[name]
                return []
        raise AssertionError(order)

    def _create(self, order: orders.CreateOrder, gateway: str) -> list[Any]:
        disk = next((d for d in self.disks.values() if d.native_id == order.create_id), None)
        if disk is None:
            disk = Disk(order.create_id, self.mint("i"), self.minted)
            self.disks[disk.native_id] = disk
        return [
            facts.Assigned(
                sandbox=order.sandbox,
                create_id=order.create_id,
                gateway=gateway,
                ref=ref(disk.instance, native_id=disk.native_id),
                capabilities=facts.Capabilities(),
            )
        ]

    def _attach(self, order: orders.AttachOrder, gateway: str) -> list[Any]:
        disk = self.disks.get(order.ref.native_id)
        session = self.mint("S")
        if disk is None:
            return [
                facts.AttachFailed(
                    sandbox=order.sandbox,
                    gateway=gateway,
                    session=session,
                    ref=order.ref,
                    reason="not there",
                    observed="gone",
                )
            ]
        self.channels[session] = (disk.native_id, disk.uid)
        return [
            facts.Found(
                sandbox=order.sandbox,
                gateway=gateway,
                session=session,
                ref=ref(disk.instance, native_id=disk.native_id),
                marker=disk.marker,
                journal_seq=disk.seq,
                nonce_fresh=self.mint("N"),
                asked=order.asked,
            )
        ]

    def _of_session(self, session: str) -> Disk | None:
        native_id, uid = self.channels.get(session, ("", 0))
        disk = self.disks.get(native_id)
        return disk if disk is not None and disk.uid == uid else None

    def _mark(self, order: orders.MarkOrder, gateway: str) -> list[Any]:
        disk = self._of_session(order.session)
        upwards = disk is not None and (
            order.epoch > disk.epoch or (order.epoch == disk.epoch and order.nonce == disk.nonce)
        )
        if disk is None or not (upwards or not disk.nonce):
            return [
                facts.AttachFailed(
                    sandbox=order.sandbox,
                    gateway=gateway,
                    session=order.session,
                    ref=ref("none"),
                    reason="no channel",
                    observed="unknown",
                )
            ]
        disk.epoch, disk.session, disk.nonce = order.epoch, order.session, order.nonce
        return [
            facts.Marked(
                sandbox=order.sandbox,
                gateway=gateway,
                session=order.session,
                epoch=order.epoch,
                nonce=order.nonce,
                instance=disk.instance,
                journal_seq=disk.seq,
            )
        ]

    def _stop(self, order: orders.StopOrder, gateway: str) -> list[Any]:
        native_id = order.ref.native_id if order.ref else order.create_id
        disk = self.disks.pop(native_id, None)
        if order.ref is None:
            return [
                facts.CreateFailed(
                    sandbox=order.sandbox,
                    create_id=order.create_id,
                    gateway=gateway,
                    reason="stopped" if disk else "never there",
                    ambiguous=False,
                    settled=True,
                )
            ]
        return [
            facts.StopAnswered(
                sandbox=order.sandbox,
                gateway=gateway,
                ref=order.ref,
                answer="accepted" if disk else "not_found",
            ),
            facts.Gone(sandbox=order.sandbox, gateway=gateway, ref=order.ref),
        ]

    def _checkpoint(self, order: orders.CheckpointOrder, gateway: str) -> list[Any]:
        disk = self._of_session(order.session)
        if disk is None or (disk.epoch, disk.session) != (order.epoch, order.session):
            return []
        held = {step: times for step, times in sorted(disk.applied.items()) if times}
        named = manifest(repr((order.sandbox, held)))
        self.stored[order.sandbox, named] = held
        return [
            facts.Checkpointed(
                sandbox=order.sandbox,
                gateway=gateway,
                session=order.session,
                epoch=order.epoch,
                nonce=disk.nonce,
                checkpoint=order.checkpoint,
                manifest=named,
                journal_seq=disk.seq,
            )
        ]

    def _restore(self, order: orders.RestoreOrder, gateway: str) -> list[Any]:
        disk = self._of_session(order.session)
        if disk is None or (disk.epoch, disk.session) != (order.epoch, order.session):
            return []
        about: dict[str, Any] = {
            "sandbox": order.sandbox,
            "gateway": gateway,
            "session": order.session,
            "epoch": order.epoch,
            "checkpoint": order.checkpoint,
        }
        if self.fail_restore:
            self.fail_restore = False
            return [facts.RestoreFailed(reason="unreachable", **about)]
        # That it is still there is what pruning promises.
        held = self.stored[order.namespace, order.manifest]
        if disk.restored_as != order.manifest:
            disk.applied = dict(held)
            disk.restored_as = order.manifest
            disk.last = {}
        return [facts.Restored(manifest=order.manifest, journal_seq=disk.seq, **about)]

    # --- the toolhost ---------------------------------------------------------------------------

    def _dispatch(self, order: orders.Dispatch, gateway: str) -> list[Any]:
        disk = self._of_session(order.fence.session)
        if disk is None:
            return [self._lost(order, gateway)]
        said = getattr(self, f"_{order.fence.direction}")(disk, order)
        reports: list[Any] = [(gateway, order.fence.sandbox, said)]
        if (said.epoch, said.session) != (order.fence.epoch, order.fence.session):
            reports.append(self._lost(order, gateway))
        return reports

    def _lost(self, order: orders.Dispatch, gateway: str) -> facts.Lost:
        """The channel ended, or the marker is another's: whoever had the session gives it up."""
        return facts.Lost(
            sandbox=order.fence.sandbox,
            gateway=gateway,
            session=order.fence.session,
            epoch=order.fence.epoch,
            ref=ref("none"),
            reason="channel_closed",
            observed="unknown",
        )

    def beats(self, sandbox: str) -> bool:
        """Whether the attached session's toolhost still reads that session from its marker."""
        known = self.bench.state.sandboxes[sandbox]
        disk = self._of_session(known.session)
        return disk is not None and disk.session == known.session

    def _say(self, disk: Disk, order: orders.Dispatch, verdict: str, **more: Any) -> Receipt:
        marker = disk.marker or Marker(epoch=0, session="", nonce="", instance=disk.instance)
        fence = order.fence
        return Receipt(
            **{
                "sandbox": fence.sandbox,
                "step": order.step,
                "attempt": fence.attempt,
                "direction": fence.direction,
                "no": fence.no,
                "verdict": verdict,
                "epoch": marker.epoch,
                "session": marker.session,
                "nonce": marker.nonce,
                "instance": marker.instance,
                "after": marker,
                "tool": order.tool,
                "digest": order.digest,
                "journal_seq": disk.seq,
                "of": order.of,
                **more,
            }
        )

    def _replay(self, disk: Disk, order: orders.Dispatch) -> Receipt:
        assert order.effect == "workspace", "an external effect is never applied again"
        return self._apply(disk, order)

    def _fits(self, disk: Disk, order: orders.Dispatch) -> str:
        if not disk.nonce:
            return "no_generation"
        if disk.epoch != order.fence.epoch:
            return "stale_epoch"
        return "" if disk.session == order.fence.session else "stale_session"

    def _done(
        self, disk: Disk, order: orders.Dispatch, key: str, verdict: str, of: str, **more: Any
    ) -> Receipt:
        disk.seq += 1
        if order.fence.direction == "apply":
            disk.restored_as = ""
        said = self._say(disk, order, verdict, outcome="ok", of=of, **more)
        fence = order.fence
        disk.records[key] = Record(
            fence.attempt, order.step, fence.direction, order.digest, "done", receipt=said
        )
        disk.last[order.step] = key
        return said

    def _apply(self, disk: Disk, order: orders.Dispatch) -> Receipt:
        if why := self._fits(disk, order):
            return self._say(disk, order, "refused", reason=why)
        key = order.fence.attempt
        known = disk.records.get(key)
        if known is not None and known.state == "done":
            assert known.receipt is not None
            return known.receipt
        if known is not None and known.revoked:
            return self._say(disk, order, "refused", reason="revoked")
        last = disk.records.get(disk.last.get(order.step, ""))
        if last is not None and last.state == "broken":
            return self._say(disk, order, "indeterminate", reason="broken")
        if last is not None and last.direction in ("apply", "replay"):
            return self._attest(disk, order, key, last)
        if last is not None:
            return self._say(disk, order, "refused", reason="revoked")
        disk.applied[order.step] = disk.applied.get(order.step, 0) + 1
        if order.effect == "external":
            name = (order.fence.sandbox, order.step)
            self.external[name] = self.external.get(name, 0) + 1
        if self.break_next and order.tool == "run_command":
            self.break_next = False
            disk.records[key] = Record(key, order.step, "apply", order.digest, "broken")
            disk.last[order.step] = key
            return self._say(disk, order, "indeterminate", reason="broken")
        return self._done(disk, order, key, "applied", "")

    def _attest(self, disk: Disk, order: orders.Dispatch, key: str, last: Record) -> Receipt:
        while last.receipt is not None and last.receipt.verdict == "attested":
            last = disk.records[last.receipt.of]
        assert last.receipt is not None
        seq = last.receipt.journal_seq
        return self._done(disk, order, key, "attested", last.attempt, of_seq=seq)

    def _revoke(self, disk: Disk, order: orders.Dispatch) -> Receipt:
        if why := self._fits(disk, order):
            return self._say(disk, order, "refused", reason=why)
        key = order.fence.attempt
        known = disk.records.get(key)
        if known is None:
            known = disk.records[key] = Record(key, order.step, "apply", order.digest)
        if known.state == "":
            known.revoked = True
            last = disk.records.get(disk.last.get(order.step, ""))
            if last is not None and last.direction == "undo":
                return self._say(disk, order, "revoked", reason="undone")
            if last is not None and last.state:
                known = last
        if known.state == "broken":
            return self._say(disk, order, "indeterminate", reason="broken")
        if known.state == "done":
            return self._say(disk, order, "already_done", of=known.attempt)
        return self._say(disk, order, "revoked", reason="never_began")

    def _undo(self, disk: Disk, order: orders.Dispatch) -> Receipt:
        if why := self._fits(disk, order):
            return self._say(disk, order, "refused", reason=why)
        key = "undo:" + order.fence.attempt
        known = disk.records.get(key)
        if known is not None:
            assert known.receipt is not None
            return known.receipt
        target = disk.records.get(order.of)
        while target is not None and target.receipt and target.receipt.verdict == "attested":
            target = disk.records.get(target.receipt.of)
        if target is None or target.state != "done":
            return self._say(disk, order, "refused", reason="nothing_to_undo")
        if not target.undone:
            target.undone = True
            disk.applied[order.step] -= 1
            if order.effect == "external":
                self.external[order.fence.sandbox, order.step] -= 1
        return self._done(disk, order, key, "applied", target.attempt)

    # --- bad luck -------------------------------------------------------------------------------

    def replace_disk(self, native_id: str) -> None:
        """The same name, an empty disk."""
        old = self.disks[native_id]
        instance = old.instance if self.minted % 2 else self.mint("i")
        self.mint("disk")
        self.disks[native_id] = Disk(native_id, instance, self.minted)

    def snapshot(self, native_id: str) -> None:
        self.snapshots[native_id] = copy.deepcopy(self.disks[native_id])

    def restore(self, native_id: str) -> None:
        """A snapshot comes back; under another instance, as every provider that can do it says."""
        kept = copy.deepcopy(self.snapshots[native_id])
        kept.instance = self.mint("i")
        kept.uid = self.minted
        self.disks[native_id] = kept
