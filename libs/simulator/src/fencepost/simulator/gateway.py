"""
A simulated sandbox-gateway: sessions, leases, attachments, stamping. Decides nothing durable.

Facts are durable once their stream has them and are repeated until then; receipts and heartbeats
are not. Everything a session holds dies with it; a session whose lease is past ends itself, and
another one starts under another id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
from fencepost.contracts.messages import ListReply
from fencepost.core import facts, receipts
from fencepost.core.facts import Ref
from fencepost.core.sandbox.inputs import GatewaySeen, Heartbeat, Heartbeats, ReceiptReceived
from fencepost.core.sandbox.orders import (
    AttachOrder,
    CheckpointOrder,
    CreateOrder,
    Dispatch,
    MarkOrder,
    PruneOrder,
    RestoreOrder,
    StopOrder,
)
from fencepost.core.sandbox.reported import Reported
from fencepost.simulator.disks import Marker
from fencepost.simulator.provider import (
    AUTHORITIES,
    AUTHORITY,
    OTHER_AUTHORITY,
    Created,
    CreateRefused,
    Instance,
    Provider,
)
from fencepost.simulator.storing import PutBack, RestoreCall, Spoiled, TakeCall, Taken, Workspace
from fencepost.simulator.toolhost import Marked, Toolhost
from fencepost.simulator.world import Process, World

LEASE_MS: Final = 2_000
WRITES_STOP_PERCENT: Final = 60
BEAT_MS: Final = 300
FACT_WAIT_MS: Final = 300
HELLO_MS: Final = 1_500
MARK_WAIT_MS: Final = 6_000
GONE_WITHIN_MS: Final = 5_000
AUTHORITY_OF: Final = {"process": AUTHORITY, "other": OTHER_AUTHORITY}

_encode = msgspec.json.Encoder().encode


class Attachment:
    """One session with one sandbox, from its channel to its end."""

    def __init__(self, order: AttachOrder, *, session: str, now_ms: int) -> None:
        self.sandbox = order.sandbox
        self.session = session
        self.nonce = f"nonce-{session}"
        self.ref = order.ref
        self.asked = order.asked
        self.toolhost: Toolhost | None = None
        self.found: facts.Found | None = None
        self.marked: facts.Marked | None = None
        self.wanted: MarkOrder | None = None
        self.heard_at_ms = now_ms
        self.beat: tuple[Marker, int] | None = None
        self.ended = False
        self.due_ms = 0
        self.back_ms = 0


class Gateway(Process):
    """
    One gateway process. `put_fact(gateway, fact, answered)` publishes into a durable stream;
    `say(sandbox, value)` and `say_all(value)` send what need not survive.
    """

    def __init__(
        self,
        world: World,
        name: str,
        provider: Provider,
        *,
        put_fact: Callable[[Gateway, facts.Fact, Callable[[], None]], None],
        say: Callable[[str, Any], None],
        say_all: Callable[[Any], None],
    ) -> None:
        super().__init__(world, name)
        self.provider = provider
        self.cut_off_until_ms = 0
        self.session = ""
        self.reaches: tuple[str, ...] = AUTHORITIES
        self.home = dict(AUTHORITY_OF)
        self.places = self.home
        self.sessions = 0
        self.attached: dict[str, Attachment] = {}
        self._minted = 0
        self._renewed_ms: int | None = None
        self._busy: dict[str, None] = {}
        self._reported = Reported()
        self._facts: deque[facts.Fact] = deque()
        self._put_fact = put_fact
        self._say = say
        self._say_all = say_all

    # --- life -----------------------------------------------------------------------------

    def start(self) -> None:
        self.alive = True
        self.sessions += 1
        self.session = f"{self.name}-{self.sessions}"
        self.attached = {}
        self._busy = {}
        self._reported = Reported()
        self._facts = deque()
        self._renewed_ms = None
        self.reaches = AUTHORITIES
        if (
            self.sessions == 1
            and self.world.options.observes_gone
            and self.world.hit("gateway_creates_elsewhere")
        ):
            # Another host, for good: providers of these names are at one authority here. One that
            # cannot see what is gone would never have anything built again.
            self.home = dict.fromkeys(AUTHORITY_OF, AUTHORITIES[self.world.between(0, 1)])
        self.places = self.home
        if self.world.hit("gateway_reaches_one"):
            self.reaches = (AUTHORITIES[self.world.between(0, 1)],)
            self.places = {name: at for name, at in self.home.items() if at in self.reaches}
        self.world.tell("session", self.session)
        self.after(self.world.between(0, 50), self._beat)

    def crash(self) -> None:
        toolhosts = [a.toolhost for a in self.attached.values()]
        self.kill()
        for toolhost in toolhosts:
            if toolhost is not None:
                # Its standard input ends; it notices a moment later.
                toolhost.after(self.world.between(0, 50), toolhost.end)
        self.attached = {}
        self.world.after(self.world.between(50, 4_000), self._start_again)

    def _start_again(self) -> None:
        if not self.alive:
            self.start()

    def _session_over(self) -> None:
        """The lease is past: drop everything, and be another session from now on."""
        self.world.tell("lease over", self.session)
        toolhosts = [a.toolhost for a in self.attached.values()]
        self.kill()
        for toolhost in toolhosts:
            if toolhost is not None:
                toolhost.end()
        self.start()

    @property
    def is_cut_off(self) -> bool:
        return self.world.now_ms < self.cut_off_until_ms

    def lease_is_over(self) -> bool:
        renewed_ms = self._renewed_ms
        return renewed_ms is not None and self.world.now_ms - renewed_ms >= LEASE_MS

    def may_write(self) -> bool:
        renewed_ms = self._renewed_ms
        if renewed_ms is None:
            return False
        return (self.world.now_ms - renewed_ms) * 100 < LEASE_MS * WRITES_STOP_PERCENT

    def _beat(self) -> None:
        if self.lease_is_over():
            self._session_over()
            return
        world = self.world
        if not self.is_cut_off:
            self.after(world.between(0, 10), self._renewed, world.now_ms)
            if not world.hit("heartbeat_lost"):
                self._say_all(
                    GatewaySeen(
                        gateway=self.session,
                        authorities=list(self.reaches),
                        providers=list(self.places),
                        places=self.places,
                        sandboxes=len(self.attached),
                    )
                )
        for attachment in list(self.attached.values()):
            self._say_beat(attachment)
        self.after(BEAT_MS, self._beat)

    def _renewed(self, sent_ms: int) -> None:
        if self.lease_is_over():
            return
        self._renewed_ms = max(self._renewed_ms or 0, sent_ms)
        for attachment in self.attached.values():
            self._grant(attachment)

    def _grant(self, attachment: Attachment) -> None:
        toolhost = attachment.toolhost
        if self.may_write() and toolhost is not None and self._renewed_ms is not None:
            left_ms = self._renewed_ms + LEASE_MS - self.world.now_ms
            self._to(attachment, toolhost, toolhost.grant, left_ms)

    def _say_beat(self, attachment: Attachment) -> None:
        beat, attachment.beat = attachment.beat, None
        if self.world.now_ms - attachment.heard_at_ms > LEASE_MS:
            self._lose(attachment, "toolhost_silent")
        elif beat is not None and not self.is_cut_off and not self.world.hit("heartbeat_lost"):
            marker, journal_seq = beat
            said = Heartbeat(
                sandbox=attachment.sandbox,
                gateway=self.session,
                epoch=marker.epoch,
                session=attachment.session,
                journal_seq=journal_seq,
            )
            self._say(attachment.sandbox, Heartbeats(gateway=self.session, beats=[said]))

    def list_page(self, authority: str, token: str, answer: Callable[[ListReply], None]) -> None:
        """Answers a sweeper with one page of what a provider of this session lists."""
        if authority not in self.reaches:
            answer(ListReply(problem="another_authority"))
        else:
            self.provider.list_page(self, authority, token, answer)

    # --- facts ----------------------------------------------------------------------------

    def _crashes_here(self) -> bool:
        """A crash between two effects of this process, if one happens now."""
        if not self.world.hit("gateway_crash_at_point"):
            return False
        self.crash()
        return True

    def put(self, fact: facts.Fact) -> None:
        if self._crashes_here():
            return
        self._facts.append(fact)
        if len(self._facts) == 1:
            self._push_fact()

    def _push_fact(self) -> None:
        """Publishes the oldest fact until the stream has it, then the next: in order."""
        if not self._facts:
            return
        fact = self._facts[0]

        def answered() -> None:
            if self._facts and self._facts[0] is fact:
                self._facts.popleft()
                self._push_fact()

        def again() -> None:
            if self._facts and self._facts[0] is fact:
                self._push_fact()

        if not self.is_cut_off:
            self._put_fact(self, fact, answered)
        self.after(FACT_WAIT_MS, again)

    # --- orders ---------------------------------------------------------------------------

    def take(self, order: Any) -> None:
        if self.lease_is_over():
            self._session_over()
            return
        if self._crashes_here():
            return
        match order:
            case Dispatch():
                self._dispatch(order)
            case CreateOrder():
                self._once(f"create/{order.create_id}", lambda done: self._create(order, done))
            case AttachOrder():
                self._once(f"attach/{order.sandbox}", lambda done: self._attach(order, done))
            case MarkOrder():
                self._mark(order)
            case CheckpointOrder() | RestoreOrder():
                self._about_workspace(order)
            case PruneOrder():
                keep = {*order.keep, *self._reported.unknown(order.sandbox, order.keep)}
                self.provider.outside.store.prune(order.sandbox, keep, self.world.now_ms)
            case StopOrder():
                about = order.create_id if order.ref is None else order.ref.instance
                self._once(f"stop/{about}", lambda done: self._stop(order, done))

    def _once(self, key: str, work: Callable[[Callable[[], None]], None]) -> None:
        """Orders are repeated until answered: the same thing is not begun while under way."""
        if key not in self._busy:
            self._busy[key] = None
            work(lambda: self._busy.pop(key, None))

    def _dispatch(self, order: Dispatch) -> None:
        attachment = self.attached.get(order.fence.sandbox)
        if (
            attachment is not None
            and attachment.session == order.fence.session
            and attachment.toolhost is not None
            and self.may_write()
        ):
            self._to(attachment, attachment.toolhost, attachment.toolhost.dispatch, order)

    def _to(self, attachment: Attachment, toolhost: Toolhost, call: Any, *args: Any) -> None:
        """A frame on the channel: in order, and for no other life of the toolhost."""
        at_ms = max(self.world.now_ms + self.world.between(0, 2), attachment.due_ms)
        attachment.due_ms = at_ms
        toolhost.after(at_ms - self.world.now_ms, call, *args)

    # --- creating ---------------------------------------------------------------------------

    def _create(self, order: CreateOrder, done: Callable[[], None]) -> None:
        authority = self.places.get(order.spec.provider, AUTHORITY)

        def answered(said: Any) -> None:
            done()
            match said:
                case Created():
                    self._put_assigned(order.sandbox, order.create_id, said.ref)
                case CreateRefused():
                    self._create_failed(order.sandbox, order.create_id, said.reason)
                case _:
                    self._create_failed(order.sandbox, order.create_id, "no answer", ambiguous=True)

        self.provider.create(
            self,
            order.create_id,
            order.sandbox,
            answered,
            authority=authority,
            labels=order.labels,
        )

    def _put_assigned(self, sandbox: str, create_id: str, ref: Ref) -> None:
        self.put(
            facts.Assigned(
                sandbox=sandbox,
                create_id=create_id,
                gateway=self.session,
                ref=ref,
                capabilities=self.provider.capabilities(ref.authority),
            )
        )

    def _create_failed(
        self,
        sandbox: str,
        create_id: str,
        reason: str,
        *,
        ambiguous: bool = False,
        settled: bool = False,
    ) -> None:
        self.put(
            facts.CreateFailed(
                sandbox=sandbox,
                create_id=create_id,
                gateway=self.session,
                reason=reason,
                ambiguous=ambiguous,
                settled=settled,
            )
        )

    # --- attaching --------------------------------------------------------------------------

    def _attach(self, order: AttachOrder, done: Callable[[], None]) -> None:
        world = self.world
        current = self.attached.get(order.sandbox)
        if current is not None:
            if self._was_told(current, order):
                done()
                return
            self._forget(current)
        self._minted += 1
        session = f"{self.session}.s{self._minted}"
        attachment = Attachment(order, session=session, now_ms=world.now_ms)

        def opened(said: tuple[Instance, Toolhost] | str) -> None:
            if isinstance(said, str):
                done()
                self._attach_failed(attachment, "channel_refused", said, condemned=False)
                return
            instance, toolhost = said
            attachment.toolhost = toolhost
            attachment.ref = instance.ref
            self.attached[order.sandbox] = attachment
            self._grant(attachment)
            self._to(attachment, toolhost, toolhost.hello)
            self.after(HELLO_MS, hello_over)
            done()

        def hello_over() -> None:
            if attachment.found is None and self.attached.get(order.sandbox) is attachment:
                self._give_up(attachment, "toolhost_silent", condemned=False)

        def heard(kind: str, value: Any) -> None:
            at_ms = max(world.now_ms + world.between(0, 2), attachment.back_ms)
            attachment.back_ms = at_ms
            world.answer(at_ms - world.now_ms, self, life, self._hear, (attachment, kind, value))

        def cut(reason: str) -> None:
            if self.life == life:
                self.after(0, self._lose, attachment, reason)

        life = self.life
        self.provider.channel(self, order.ref, heard, cut, opened)

    def _was_told(self, current: Attachment, order: AttachOrder) -> bool:
        """Answers an order that was sent before the shard saw our answer to the last one."""
        if current.ended or current.found is None or order.asked > current.asked:
            return False
        if order.asked < current.asked:
            return True
        self.put(current.found)
        if current.marked is not None:
            self.put(current.marked)
        return True

    def _attach_failed(
        self, attachment: Attachment, reason: str, observed: str, *, condemned: bool
    ) -> None:
        self.put(
            facts.AttachFailed(
                sandbox=attachment.sandbox,
                gateway=self.session,
                session=attachment.session,
                ref=attachment.ref,
                reason=reason,
                observed=observed,  # type: ignore[arg-type]
                condemned=condemned,
            )
        )

    def _mark(self, order: MarkOrder) -> None:
        attachment = self.attached.get(order.sandbox)
        if attachment is None or attachment.session != order.session:
            return
        marked, toolhost = attachment.marked, attachment.toolhost
        if marked is not None and (marked.epoch, marked.nonce) == (order.epoch, order.nonce):
            self.put(marked)
            return
        if attachment.wanted is not None or toolhost is None or not self.may_write():
            return
        attachment.wanted = order
        self._to(attachment, toolhost, toolhost.mark, order.epoch, order.session, order.nonce)

        def over() -> None:
            if attachment.wanted is order and self.attached.get(order.sandbox) is attachment:
                self._give_up(attachment, "toolhost_silent", condemned=False)

        self.after(MARK_WAIT_MS, over)

    def _give_up(self, attachment: Attachment, reason: str, *, condemned: bool) -> None:
        self._forget(attachment)
        self.provider.observe(
            self,
            attachment.ref,
            lambda said: self._attach_failed(attachment, reason, said, condemned=condemned),
        )

    def _forget(self, attachment: Attachment) -> None:
        if self.attached.get(attachment.sandbox) is attachment:
            del self.attached[attachment.sandbox]
        attachment.ended = True
        if attachment.toolhost is not None:
            attachment.toolhost.after(self.world.between(0, 5), attachment.toolhost.end)

    def _lose(self, attachment: Attachment, reason: str) -> None:
        if self.attached.get(attachment.sandbox) is not attachment:
            return
        self._forget(attachment)
        epoch = attachment.marked.epoch if attachment.marked is not None else 0

        def observed(said: Literal["present", "terminating", "gone", "unknown"]) -> None:
            self.put(
                facts.Lost(
                    sandbox=attachment.sandbox,
                    gateway=self.session,
                    session=attachment.session,
                    epoch=epoch,
                    ref=attachment.ref,
                    reason=reason,
                    observed=said,
                )
            )

        self.provider.observe(self, attachment.ref, observed)

    # --- checkpoints ------------------------------------------------------------------------

    def _about_workspace(self, order: CheckpointOrder | RestoreOrder) -> None:
        attachment = self.attached.get(order.sandbox)
        toolhost = attachment.toolhost if attachment is not None else None
        if attachment is None or attachment.session != order.session or toolhost is None:
            return
        if not self.may_write():
            return
        call: TakeCall | RestoreCall
        if isinstance(order, CheckpointOrder):
            reported = self._reported.answer(order)
            if reported is not None:
                self.put(reported)
                return
            call = TakeCall(order)
        else:
            found = self.provider.outside.store.get(order.namespace, order.manifest)
            if self.world.hit("restore_fails"):
                self._put_about(facts.RestoreFailed, order, reason="unreachable")
                return
            if not isinstance(found, Workspace):
                self._put_about(facts.RestoreFailed, order, reason=found or "missing")
                return
            call = RestoreCall(order, found)
        delay_ms = self.world.between(1, 150)
        self.after(delay_ms, self._to, attachment, toolhost, toolhost.store, call)

    def _put_about(self, kind: Any, order: CheckpointOrder | RestoreOrder, **more: Any) -> None:
        self.put(self._about(kind, order, **more))

    def _about(self, kind: Any, order: CheckpointOrder | RestoreOrder, **more: Any) -> Any:
        return kind(
            sandbox=order.sandbox,
            gateway=self.session,
            session=order.session,
            epoch=order.epoch,
            checkpoint=order.checkpoint,
            **more,
        )

    def _said_taken(self, said: Taken) -> None:
        if self.world.hit("checkpoint_fails"):
            self._put_about(facts.CheckpointFailed, said.order, reason="unreachable")
            return
        spoiled: Spoiled = ""
        if self.world.hit("checkpoint_spoiled"):
            spoiled = "missing" if self.world.rng.random() < 0.5 else "corrupt"
        store = self.provider.outside.store
        manifest = store.put(said.order.sandbox, said.workspace, self.world.now_ms, spoiled=spoiled)
        if self._crashes_here():
            return
        fact = self._about(
            facts.Checkpointed,
            said.order,
            nonce=said.nonce,
            manifest=manifest,
            journal_seq=said.journal_seq,
        )
        self._reported.add(fact)
        self.put(fact)

    def _said_put_back(self, said: PutBack) -> None:
        if said.reason:
            self._put_about(facts.RestoreFailed, said.order, reason=said.reason)
            return
        self._put_about(
            facts.Restored,
            said.order,
            manifest=said.order.manifest,
            journal_seq=said.journal_seq,
        )

    def announce(self, ref: Ref, grace_ms: int) -> None:
        """The provider says that it will take this instance away."""
        for attachment in self.attached.values():
            if attachment.ref == ref and attachment.marked is not None:
                said = facts.Preempting(
                    sandbox=attachment.sandbox,
                    gateway=self.session,
                    session=attachment.session,
                    epoch=attachment.marked.epoch,
                    ref=ref,
                    grace_ms=grace_ms,
                )
                self.put(said)
                return

    # --- what toolhosts say -------------------------------------------------------------------

    def _hear(self, attachment: Attachment, kind: str, value: Any) -> None:
        if attachment.ended:
            return
        attachment.heard_at_ms = self.world.now_ms
        if kind == "receipt":
            self._receipt(attachment, value)
        elif kind == "heartbeat":
            marker, _ = value
            marked = attachment.marked
            if marked is None:
                return
            if (marker.epoch, marker.session, marker.nonce) != (
                marked.epoch,
                attachment.session,
                marked.nonce,
            ):
                self._lose(attachment, "marker_moved")
                return
            attachment.beat = value
        elif kind == "hello":
            self._said_hello(attachment, *value)
        elif kind == "marked":
            self._said_marked(attachment, value)
        elif kind == "taken":
            self._said_taken(value)
        elif kind == "put back":
            self._said_put_back(value)

    def _said_hello(self, attachment: Attachment, marker: Marker | None, journal_seq: int) -> None:
        attachment.found = facts.Found(
            sandbox=attachment.sandbox,
            gateway=self.session,
            session=attachment.session,
            ref=attachment.ref,
            marker=None
            if marker is None
            else receipts.Marker(
                marker.epoch, marker.session, marker.nonce, attachment.ref.instance
            ),
            journal_seq=journal_seq,
            nonce_fresh=attachment.nonce,
            asked=attachment.asked,
        )
        self.put(attachment.found)

    def _said_marked(self, attachment: Attachment, said: Marked) -> None:
        order, attachment.wanted = attachment.wanted, None
        if order is None:
            return
        if said.reason:
            self._give_up(attachment, said.reason, condemned=said.reason == "tools_alive")
            return
        attachment.marked = facts.Marked(
            sandbox=attachment.sandbox,
            gateway=self.session,
            session=attachment.session,
            epoch=said.epoch,
            nonce=said.nonce,
            instance=attachment.ref.instance,
            journal_seq=said.journal_seq,
        )
        self.put(attachment.marked)

    def _receipt(self, attachment: Attachment, receipt: receipts.Receipt) -> None:
        if not self.is_cut_off:
            self._say(
                attachment.sandbox,
                ReceiptReceived(
                    sandbox=attachment.sandbox,
                    gateway=self.session,
                    mac_ok=True,
                    receipt=receipt,
                    step=receipt.step,
                    attempt=receipt.attempt,
                ),
            )
        moved = receipt.verdict in ("refused", "fault") and receipt.reason in (
            "stale_epoch",
            "stale_session",
            "no_generation",
            "marker_moved",
        )
        if moved and attachment.marked is not None:
            self._lose(attachment, "marker_moved")

    # --- stopping -----------------------------------------------------------------------------

    def _stop(self, order: StopOrder, done: Callable[[], None]) -> None:
        if order.ref is None:
            self._stop_create(order, done)
            return
        ref = order.ref
        if ref.authority not in self.reaches:
            done()
            self._stop_answered(order.sandbox, ref, "unconfigured")
            return
        attachment = self.attached.get(order.sandbox)
        if attachment is not None and attachment.ref == ref:
            self._forget(attachment)
        until_ms = self.world.now_ms + GONE_WITHIN_MS

        def answered(said: str) -> None:
            self._stop_answered(order.sandbox, ref, said)
            if self.provider.capabilities(ref.authority).observes_gone:
                self.provider.observe(self, ref, observed)
            else:
                done()

        def observed(said: str) -> None:
            if said == "gone":
                done()
                self.put(facts.Gone(sandbox=order.sandbox, gateway=self.session, ref=ref))
            elif self.world.now_ms >= until_ms:
                done()
            else:
                self.after(100, self.provider.observe, self, ref, observed)

        self.provider.stop(self, ref, answered)

    def _stop_answered(self, sandbox: str, ref: Ref, said: str) -> None:
        self.put(
            facts.StopAnswered(
                sandbox=sandbox,
                gateway=self.session,
                ref=ref,
                answer=said,  # type: ignore[arg-type]
            )
        )

    def _stop_create(self, order: StopOrder, done: Callable[[], None]) -> None:
        """First no later create may make anything; then what is there is named, and stopped."""

        def settled(said: Ref | str | None) -> None:
            done()
            if isinstance(said, Ref):
                self._put_assigned(order.sandbox, order.create_id, said)
            elif said is None:
                self._create_failed(order.sandbox, order.create_id, "settled", settled=True)
            else:
                self._create_failed(
                    order.sandbox, order.create_id, "create_ambiguous", ambiguous=True
                )

        self.provider.settle(self, order.create_id, self.reaches, settled)
