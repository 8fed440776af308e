"""
A small, faithful model of docs/toolhost-protocol.md over a simulated disk.

Check, write, journal and second check happen under the disk's lock, in phases between which the
toolhost may crash, be paused, lose its disk or have it swapped. Frames come in order and answers
go out in order, over a channel that may be cut.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
from fencepost.core import receipts
from fencepost.core.sandbox.orders import Dispatch
from fencepost.simulator.disks import Contents, Disk, Marker, Outside, Record
from fencepost.simulator.storing import RestoreCall, TakeCall, put_back, take
from fencepost.simulator.world import Process, World

HEARTBEAT_MS: Final = 300
HUNG_MS: Final = 1_000
MARK_MS: Final = 5_000
NO_MARKER: Final = Marker(0, "", "")


class MarkCall(NamedTuple):
    epoch: int
    session: str
    nonce: str
    until_ms: int


class Marked(NamedTuple):
    """The answer to a mark: `reason` is "" when the marker is written."""

    epoch: int
    session: str
    nonce: str
    journal_seq: int
    reason: str


class Run:
    """
    A tool that runs: it holds the lock.

    `contents` are the bytes that it has open, whatever is mounted there meanwhile.
    """

    __slots__ = ("call", "contents", "marker", "number", "record")

    def __init__(
        self, call: Dispatch, marker: Marker, record: Record, number: int, contents: Contents
    ) -> None:
        self.call = call
        self.marker = marker
        self.record = record
        self.number = number
        self.contents = contents


def key_of(attempt: str, direction: str) -> str:
    return "undo:" + attempt if direction == "undo" else attempt


class Toolhost(Process):
    """`send(kind, value)` is the way out; it is cut by setting it to None."""

    def __init__(
        self,
        world: World,
        name: str,
        disk: Disk,
        *,
        instance: str,
        outside: Outside,
        observer: Any,
        send: Callable[[str, Any], None],
    ) -> None:
        super().__init__(world, name)
        self.disk = disk
        disk.users = [user for user in disk.users if user.alive] + [self]
        self.instance = instance
        self.outside = outside
        self.observer = observer
        self.naive = world.hit("naive_toolhost")
        self.grant_until_ms: int | None = None
        self.send: Callable[[str, Any], None] | None = send
        self._queue: deque[Dispatch | MarkCall | TakeCall | RestoreCall] = deque()
        self._run: Run | None = None
        self._runs = 0
        self._read_seq = 0
        self.after(HEARTBEAT_MS, self._beat)

    @property
    def contents(self) -> Contents:
        return self.disk.contents

    # --- frames ---------------------------------------------------------------------------

    def hello(self) -> None:
        contents = self.contents
        self._read_seq = contents.journal_seq
        if self.disk.unmet == "unread":
            self.disk.unmet = "unmarked"
        self._say("hello", (contents.marker, contents.journal_seq))

    def mark(self, epoch: int, session: str, nonce: str) -> None:
        self._queue.appendleft(MarkCall(epoch, session, nonce, self.world.now_ms + MARK_MS))
        self._pump()

    def grant(self, ms: int) -> None:
        until_ms = self.world.now_ms + ms
        self.grant_until_ms = until_ms
        self.after(ms + 1, self._grant_over, until_ms)

    def dispatch(self, call: Dispatch) -> None:
        run = self._run
        if run is not None and call.fence.direction == "revoke":
            self._revoke_meanwhile(run, call)
            return
        if run is not None and run.record.key == self._key(call):
            self._answer(call, "running")
            return
        self._queue.append(call)
        self._pump()

    def store(self, call: TakeCall | RestoreCall) -> None:
        self._queue.append(call)
        self._pump()

    def tell(self, kind: str, value: Any) -> None:
        self._say(kind, value)

    def crashes_at(self, point: str) -> bool:
        """A crash between two things that a disk is made to be, if one happens now."""
        if not self.world.hit("toolhost_crash_at_point"):
            return False
        self._crash(point)
        return True

    def end(self) -> None:
        """The gateway is gone, or the channel: the toolhost ends, and its tools with it."""
        if self.alive:
            self.send = None
            self._drop_lock()
            self.kill()

    def _beat(self) -> None:
        contents = self.contents
        self._say("heartbeat", (contents.marker or NO_MARKER, contents.journal_seq))
        self.after(HEARTBEAT_MS, self._beat)

    def _grant_over(self, until_ms: int) -> None:
        run = self._run
        if self.grant_until_ms == until_ms and run is not None and run.record.is_command:
            self._end_run("grant_expired")

    def _say(self, kind: str, value: Any) -> None:
        if self.send is not None:
            self.send(kind, value)

    # --- the lock -------------------------------------------------------------------------

    def _try_lock(self) -> bool:
        disk = self.disk
        if disk.holder is self:
            return True
        if disk.holder is not None:
            if not any(waiting is self for waiting in disk.waiters):
                disk.waiters.append(self)
            return False
        disk.holder = self
        self._recover()
        return True

    def _recover(self) -> None:
        """Settles what began and is not done: whoever began it is gone, since we have the lock."""
        contents = self.contents
        for key in contents.order:
            record = contents.journal[key]
            if record.state != "open":
                continue
            if record.is_command:
                record.state = "broken"
                contents.steps[record.step] = key
            else:
                self._roll_back(record)

    def _roll_back(self, record: Record) -> None:
        contents = self.contents
        is_undo = record.direction == "undo"
        now = contents.files.get(record.path)
        if now != record.before if is_undo else now == record.key:
            if record.before is None:
                del contents.files[record.path]
            else:
                contents.files[record.path] = record.before
            contents.hold(record.step, 1 if is_undo else -1)
            self.observer.wrote(self, record.step)
        record.state = "rolled"
        if contents.steps.get(record.step) == record.key:
            if is_undo and record.of in contents.journal:
                contents.steps[record.step] = record.of
            else:
                del contents.steps[record.step]

    def _drop_lock(self) -> None:
        disk = self.disk
        self._run = None
        if disk.holder is self:
            disk.holder = None
            waiters, disk.waiters = disk.waiters, []
            for waiting in waiters:
                if isinstance(waiting, Toolhost):
                    waiting.after(0, waiting.wake)

    def wake(self) -> None:
        self._pump()

    def kill(self) -> None:
        self._queue.clear()
        self._drop_lock()
        super().kill()

    # --- one call after the other -----------------------------------------------------------

    def _pump(self) -> None:
        while self._queue and self.alive:
            call = self._queue[0]
            if isinstance(call, MarkCall):
                if not self._reach_for_mark(call):
                    return
                self._queue.popleft()
                self._mark(call)
            else:
                if self._run is not None:
                    return
                if not self._try_lock():
                    if isinstance(call, Dispatch) and call.fence.direction == "revoke":
                        self._revoke_other(call)
                    return
                self._queue.popleft()
                if isinstance(call, TakeCall):
                    take(self, call)
                elif isinstance(call, RestoreCall):
                    put_back(self, call)
                else:
                    self._take(call)
            if self._run is None:
                self._drop_lock()

    def _take(self, call: Dispatch) -> None:
        if self.disk.pulled and self.world.rng.random() < 0.5:
            self._refuse(call, "fault", "io_error")
        elif call.fence.direction == "revoke":
            self._revoke(call)
        elif call.fence.direction == "undo":
            self._undo(call)
        else:
            self._apply(call)

    def _key(self, call: Dispatch) -> str:
        return key_of(call.fence.attempt, call.fence.direction)

    def _check_fence(self, call: Dispatch) -> Marker | None:
        marker = self.contents.marker
        if marker is None:
            self._refuse(call, "refused", "no_generation")
        elif marker.epoch != call.fence.epoch:
            self._refuse(call, "refused", "stale_epoch")
        elif marker.session != call.fence.session:
            self._refuse(call, "refused", "stale_session")
        else:
            return marker
        return None

    def _look_up(self, call: Dispatch) -> bool:
        """Answers from the journal what it already decides; True when it did."""
        contents = self.contents
        record = contents.journal.get(self._key(call))
        if record is not None and record.state == "done":
            assert record.receipt is not None
            self._say("receipt", record.receipt)
            return True
        if record is not None and record.state == "broken":
            self._refuse(call, "indeterminate", "broken")
            return True
        attempt = call.fence.attempt
        for direction in ("apply", "undo"):
            known = contents.journal.get(key_of(attempt, direction))
            if known is not None and known.revoked:
                self._refuse(call, "refused", "revoked")
                return True
        until_ms = self.grant_until_ms
        if until_ms is not None and self.world.now_ms > until_ms:
            self._refuse(call, "refused", "grant_expired")
            return True
        return False

    def _apply(self, call: Dispatch) -> None:
        marker = self._check_fence(call)
        if marker is None or self._look_up(call):
            return
        contents = self.contents
        if contents.restoring:
            self._refuse(call, "fault", "restoring")
            return
        last = contents.journal.get(contents.steps.get(call.step, ""))
        if last is not None:
            if last.state == "broken":
                self._refuse(call, "indeterminate", "broken")
                return
            if last.state == "done" and last.direction != "undo" and last.digest == call.digest:
                self._attest(call, marker, last)
                return
            if last.no > call.fence.no:
                self._refuse(call, "refused", "revoked")
                return
        if call.fence.direction == "apply":
            contents.applied_in = marker.epoch
        self._begin(call, marker)

    def _attest(self, call: Dispatch, marker: Marker, last: Record) -> None:
        first = last.receipt
        assert first is not None
        of = last.of if last.verdict == "attested" else last.attempt
        record = self._record_of(call)
        record.of = of
        self._done(call, record, marker, self._read_marker(), "attested", outcome=first.outcome)

    def _record_of(self, call: Dispatch) -> Record:
        fence = call.fence
        record = self.contents.record(
            self._key(call),
            attempt=fence.attempt,
            direction=fence.direction,
            step=call.step,
            no=fence.no,
        )
        record.tool, record.digest = call.tool, call.digest
        return record

    def _read_marker(self) -> Marker:
        return self.contents.marker or NO_MARKER

    def _undo(self, call: Dispatch) -> None:
        marker = self._check_fence(call)
        if marker is None or self._look_up(call):
            return
        contents = self.contents
        target = self.target_of(call)
        if target is None or target.state not in ("done", "broken"):
            self._refuse(call, "refused", "nothing_to_undo")
            return
        if call.tool == "":
            if target.state == "broken":
                self._refuse(call, "indeterminate", "broken")
                return
            if target.undone:
                self._done(
                    call,
                    self._record_of(call),
                    marker,
                    self._read_marker(),
                    "applied",
                    outcome="ok",
                )
                return
            if target.receipt is not None and target.receipt.outcome != "ok":
                self._refuse(call, "refused", "nothing_to_undo")
                return
            if contents.files.get(target.path) != target.key:
                self._refuse(call, "refused", "overwritten")
                return
        self._begin(call, marker, target)

    def target_of(self, call: Dispatch) -> Record | None:
        """The record that an undo names, through attestations to the one with the pre-image."""
        journal = self.contents.journal
        target = journal.get(call.of)
        if target is not None and target.verdict == "attested":
            target = journal.get(target.of)
        return target

    # --- running a tool ---------------------------------------------------------------------

    def _begin(self, call: Dispatch, marker: Marker, target: Record | None = None) -> None:
        world = self.world
        record = self._record_of(call)
        record.is_command = call.tool == "run_command"
        record.of = target.attempt if target is not None else ""
        if target is not None:
            record.path = target.path
        elif not record.is_command:
            record.path = _path_of(call)
        record.before = self.contents.files.get(record.path)
        if world.hit("toolhost_crash_at_point"):
            self._crash("pre_saved")
            return
        record.state = "open"
        self.contents.steps[call.step] = record.key
        self._runs += 1
        self._run = Run(call, marker, record, self._runs, self.contents)
        took_ms = world.between(2, 600) if record.is_command else world.between(0, 3)
        self.after(took_ms // 2, self._act, self._runs, took_ms - took_ms // 2)

    def _act(self, number: int, left_ms: int) -> None:
        run = self._run
        if run is None or run.number != number:
            return
        world = self.world
        if world.hit("toolhost_crash_at_point"):
            self._crash("begun")
            return
        if not run.record.is_command and world.hit("disk_full"):
            self._fail(run, "no_space")
            return
        self._effect(run)
        if world.hit("toolhost_crash_at_point"):
            self._crash("acted")
            return
        self.after(left_ms, self._finish, number)

    def _effect(self, run: Run) -> None:
        """The effect itself, on the bytes that the tool has open."""
        call, record, contents = run.call, run.record, run.contents
        is_undo = call.fence.direction == "undo"
        if call.effect == "external" and record.is_command:
            if is_undo:
                self.outside.undo(call.step)
            else:
                self.outside.apply(call.step)
                self.observer.acted_outside(call.step)
            return
        if is_undo and record.is_command:
            # The caller's own undo is idempotent: it takes back what is there.
            contents.held[call.step] = 0
        elif is_undo:
            target = contents.journal.get(record.of)
            if target is not None and target.before is not None:
                contents.files[record.path] = target.before
            else:
                contents.files.pop(record.path, None)
            contents.hold(call.step, -1)
        else:
            contents.hold(call.step, 1)
            if not record.is_command:
                contents.files[record.path] = record.key
        self.observer.wrote(self, call.step)

    def _finish(self, number: int) -> None:
        run = self._run
        if run is None or run.number != number:
            return
        world, call, record = self.world, run.call, run.record
        after = self.second_reading(run)
        if after != run.marker:
            self._marker_moved(run, after)
            return
        if world.hit("record_fails"):
            self._fail(run, "io_error")
            return
        if world.hit("toolhost_crash_at_point"):
            self._crash("before_done")
            return
        self._run = None
        # The same call comes to the same, on every disk; or a replay would differ at every turn.
        fails = record.is_command and zlib.crc32(call.step.encode()) % 10 == 0
        if call.fence.direction == "replay" and world.hit("replay_differs"):
            fails = not fails
        outcome = "failed" if fails else "ok"
        if call.fence.direction == "undo":
            outcome = "ok"
            target = self.contents.journal.get(record.of)
            if target is not None:
                target.undone = True
        self._done(call, record, run.marker, after, "applied", outcome=outcome)
        if self.alive:
            self._drop_lock()
            self._pump()

    def second_reading(self, _run: Run) -> Marker:
        """Reads the marker again, from the disk, after the effect."""
        return self._read_marker()

    def _marker_moved(self, run: Run, after: Marker) -> None:
        """The disk is another one than that on which this began, which nobody has any more."""
        call, record = run.call, run.record
        self._run = None
        if self.naive:
            # It says what it read and does not judge it: the join must.
            self._say("receipt", self._receipt(call, "applied", run.marker, after, outcome="ok"))
        elif record.is_command:
            self._refuse(call, "indeterminate", "marker_moved")
        else:
            self._refuse(call, "fault", "marker_moved")
        self._drop_lock()
        self._pump()

    def _fail(self, run: Run, reason: str) -> None:
        """The disk refused a write: a file tool is rolled back, a command's effect is unknown."""
        self._run = None
        if run.record.is_command:
            run.record.state = "broken"
            self._refuse(run.call, "indeterminate", "no_record")
        else:
            self._roll_back(run.record)
            self._refuse(run.call, "fault", reason)
        self._drop_lock()
        self._pump()

    def _done(
        self,
        call: Dispatch,
        record: Record,
        marker: Marker,
        after: Marker,
        verdict: receipts.Verdict,
        *,
        outcome: str,
    ) -> None:
        contents = self.contents
        contents.journal_seq += 1
        record.state = "done"
        record.verdict = verdict
        contents.steps[call.step] = record.key
        record.seq = contents.journal_seq
        wrote = contents.journal.get(record.of) if verdict == "attested" else None
        receipt = self._receipt(
            call,
            verdict,
            marker,
            after,
            outcome=outcome,
            of=record.of,
            of_seq=0 if wrote is None else wrote.seq,
        )
        record.receipt = receipt
        self.observer.receipt_made(self, receipt, call)
        if self.world.hit("toolhost_crash_at_point"):
            self._crash("after_done")
            return
        self._say("receipt", receipt)

    def _crash(self, point: str) -> None:
        self.world.tell("crash", self.name, point)
        self.kill()

    # --- answers ----------------------------------------------------------------------------

    def _receipt(
        self,
        call: Dispatch,
        verdict: receipts.Verdict,
        marker: Marker,
        after: Marker,
        *,
        outcome: str = "",
        of: str = "",
        of_seq: int = 0,
        reason: str = "",
    ) -> receipts.Receipt:
        fence = call.fence
        return receipts.Receipt(
            sandbox=fence.sandbox,
            step=call.step,
            attempt=fence.attempt,
            direction=fence.direction,
            no=fence.no,
            verdict=verdict,
            epoch=marker.epoch,
            session=marker.session,
            nonce=marker.nonce,
            instance=self.instance,
            after=receipts.Marker(after.epoch, after.session, after.nonce, self.instance),
            tool=call.tool,
            digest=call.digest,
            journal_seq=self.contents.journal_seq,
            outcome=outcome,  # type: ignore[arg-type]
            of=of,
            of_seq=of_seq,
            reason=reason,
        )

    def _answer(self, call: Dispatch, verdict: receipts.Verdict) -> None:
        marker = self._read_marker()
        self._say("receipt", self._receipt(call, verdict, marker, marker))

    def _refuse(self, call: Dispatch, verdict: receipts.Verdict, reason: str) -> None:
        marker = self._read_marker()
        self._say("receipt", self._receipt(call, verdict, marker, marker, reason=reason))

    # --- revoking ---------------------------------------------------------------------------

    def _revoke(self, call: Dispatch) -> None:
        marker = self.contents.marker
        if marker is None or marker.epoch != call.fence.epoch:
            self._refuse(call, "refused", "no_generation" if marker is None else "stale_epoch")
            return
        contents, fence = self.contents, call.fence
        own = contents.journal.get(fence.attempt)
        if own is not None and own.state == "done":
            self._say(
                "receipt", self._receipt(call, "already_done", marker, marker, of=fence.attempt)
            )
            return
        if own is not None and own.state == "broken":
            self._refuse(call, "indeterminate", "broken")
            return
        if self.world.hit("toolhost_crash_at_point"):
            self._crash("before_revoked")
            return
        older, undone = self.carried_into(call, own)
        if own is None:
            own = contents.record(
                fence.attempt, attempt=fence.attempt, direction="apply", step=call.step, no=fence.no
            )
        own.revoked = True
        if self.world.hit("toolhost_crash_at_point"):
            self._crash("after_revoked")
            return
        if older is not None and older.state == "broken":
            self._refuse(call, "indeterminate", "broken")
        elif older is not None:
            said = self._receipt(call, "already_done", marker, marker, of=older.attempt)
            self._say("receipt", said)
        else:
            rolled = "rolled_back" if own.state == "rolled" else "never_began"
            self._refuse(call, "revoked", "undone" if undone else rolled)

    def carried_into(self, call: Dispatch, own: Record | None) -> tuple[Record | None, bool]:
        """The older attempt of this step that is on this disk; whether one was and is undone."""
        contents = self.contents
        if own is not None and own.state in ("done", "broken", "rolled"):
            return None, False
        last = contents.journal.get(contents.steps.get(call.step, ""))
        if last is None or last.state not in ("done", "broken"):
            return None, False
        if last.direction != "undo":
            return last, False
        if last.state == "done" and last.receipt is not None and last.receipt.outcome == "ok":
            return None, True
        return contents.journal[last.of], False

    def _revoke_meanwhile(self, run: Run, call: Dispatch) -> None:
        """Under our own running tool: kills it when it is the one that is revoked."""
        if run.record.attempt == call.fence.attempt and run.record.is_command:
            run.record.revoked = True
            self._end_run("revoked")
        self._queue.append(call)
        self._pump()

    def _revoke_other(self, call: Dispatch) -> None:
        record = self.contents.journal.get(call.fence.attempt)
        holder = self.disk.holder
        if (
            record is not None
            and record.state == "open"
            and record.is_command
            and isinstance(holder, Toolhost)
        ):
            record.revoked = True
            holder.tools_killed("revoked")

    def tools_killed(self, why: str) -> None:
        """Another toolhost ended the process group of our command."""
        if self._run is not None and self._run.record.is_command:
            if self.paused:
                return
            self._end_run(why)

    def _end_run(self, why: str) -> None:
        run, self._run = self._run, None
        assert run is not None
        run.record.state = "broken"
        self.contents.steps[run.call.step] = run.record.key
        self._refuse(run.call, "indeterminate", why)
        self._drop_lock()
        self._pump()

    # --- marking ----------------------------------------------------------------------------

    def _reach_for_mark(self, call: MarkCall) -> bool:
        """Ends the tools of every former session, and takes the lock from whoever hangs on it."""
        same = self.contents.marker == Marker(call.epoch, call.session, call.nonce)
        if self._refuses_mark(call) or (same and self._run is not None):
            return True
        if self._run is not None and self._run.record.is_command:
            self._end_run("ended")
        if self._run is not None:
            return False  # a file tool of ours: it is over in a moment
        holder = self.disk.holder
        if isinstance(holder, Toolhost) and holder is not self:
            holder.tools_killed("ended")
        if self._try_lock():
            return True
        holder = self.disk.holder
        if isinstance(holder, Toolhost) and holder.paused:
            self.after(HUNG_MS, self._kill_hung, holder)
        return False

    def _kill_hung(self, holder: Toolhost) -> None:
        if self.disk.holder is holder and holder.alive and holder.paused:
            holder.kill()
        self._pump()

    def _refuses_mark(self, call: MarkCall) -> str:
        marker = self.contents.marker
        if marker is not None:
            if call.epoch < marker.epoch:
                return "stale_epoch"
            if call.epoch == marker.epoch and call.nonce != marker.nonce:
                return "other_nonce"
        if self.world.now_ms > call.until_ms:
            return "tools_alive"
        return ""

    def _roll_back_disk(self) -> None:
        """A fault: an older point comes in after the hello, with a shorter journal than it read."""
        disk = self.disk
        older = [s for s in disk.snapshots if s.journal_seq < self._read_seq]
        if older and self.world.hit("disk_rolled_back_before_mark"):
            disk.roll_back(older, spared=self)
            self.world.tell("rolled", disk.name, f"back to journal {disk.contents.journal_seq}")

    def _mark(self, call: MarkCall) -> None:
        self._roll_back_disk()
        reason = self._refuses_mark(call)
        if not reason and self.world.hit("tools_unkillable"):
            reason = "tools_alive"
        if not reason:
            if self.world.hit("toolhost_crash_at_point"):
                self._crash("before_marker")
                return
            self.contents.marker = Marker(call.epoch, call.session, call.nonce)
            self.disk.unmet = ""
            self.observer.marked(self, self.contents)
            if self.world.hit("toolhost_crash_at_point"):
                self._crash("opened")
                return
        self._say(
            "marked",
            Marked(call.epoch, call.session, call.nonce, self.contents.journal_seq, reason),
        )


class _PathOnly(msgspec.Struct):
    path: str = ""


_PATH = msgspec.json.Decoder(_PathOnly)


def _path_of(call: Dispatch) -> str:
    return _PATH.decode(call.args).path
