"""
Volatile knowledge beside a shard's state: leases, living gateways, deadlines in order.

It may be empty at any time (a new owner starts with nothing) and safety never rests on it: a
lease seen late only delays the notice of a loss, a gateway thought dead only costs a message.
"""

from __future__ import annotations

import heapq
from typing import Final

import msgspec
from fencepost.core import ids, limits
from fencepost.core.sandbox.inputs import GatewaySeen, Heartbeat
from fencepost.core.sandbox.state import Sandbox, SandboxShard

_FORGET_MS: Final = 10 * limits.LEASE_MS
_DUE_SLACK: Final = 4096


class GatewayHint(msgspec.Struct):
    gateway: str
    authorities: list[str]
    providers: list[str]
    places: dict[str, str]
    seen_ms: int
    sandboxes: int


class Lease(msgspec.Struct):
    session: str
    seen_ms: int
    journal_seq: int


class Hints(msgspec.Struct, kw_only=True):
    """
    `due` is a heap of (ledger ms, sandbox, step); stale items are dropped when they come up.
    `unsettled` names sandboxes whose new session has yet to settle what a former one left.
    """

    lease_ms: int = limits.LEASE_MS
    gateway_silent_ms: int = limits.GATEWAY_SILENT_MS
    gateways: dict[str, GatewayHint] = {}
    leases: dict[str, Lease] = {}
    due: list[tuple[int, str, str]] = []
    unsettled: dict[str, None] = {}
    check_at_ms: int = 0
    to_check: list[str] = []
    latest_ms: int = 0
    synced: bool = False

    def sync(self, state: SandboxShard) -> None:
        """Fills the order of deadlines from the state, once, at takeover."""
        if self.synced:
            return
        self.synced = True
        for sandbox in state.sandboxes.values():
            if sandbox.steps:
                self.unsettled[sandbox.id] = None
            for name, step in sandbox.steps.items():
                self.push_due(state, step.spec.deadline_at_ms, sandbox.id, name)

    def push_due(self, state: SandboxShard, at_ms: int, sandbox: str, step: str) -> None:
        if len(self.due) > 2 * state.open_steps + _DUE_SLACK:
            # Most steps end long before their deadline; what they left here is dropped at times.
            self.due = [
                item
                for item in self.due
                if (known := state.sandboxes.get(item[1])) is not None and item[2] in known.steps
            ]
            heapq.heapify(self.due)
        heapq.heappush(self.due, (at_ms, sandbox, step))

    def pop_due(self) -> tuple[int, str, str]:
        return heapq.heappop(self.due)

    def gateway_seen(self, seen: GatewaySeen, now_ms: int) -> None:
        if seen.closing:
            self.gateways.pop(seen.gateway, None)
            self.check_at_ms = 0
            return
        if seen.gateway not in self.gateways:
            self.check_at_ms = 0
            # A restarted gateway comes under a new name; the old one is of no use any more.
            for name in [n for n, h in self.gateways.items() if now_ms - h.seen_ms > _FORGET_MS]:
                del self.gateways[name]
        self.gateways[seen.gateway] = GatewayHint(
            seen.gateway, seen.authorities, seen.providers, seen.places, now_ms, seen.sandboxes
        )

    def heartbeat(self, sandbox: Sandbox, beat: Heartbeat, now_ms: int) -> None:
        """
        Renews the lease of the attached session; a former one's toolhost may live on.

        Taking that one's beats for a lease would keep renewing what nobody holds.
        """
        if (beat.session, beat.gateway, beat.epoch) != (
            sandbox.session,
            sandbox.gateway,
            sandbox.epoch,
        ):
            return
        self.leases[beat.sandbox] = Lease(beat.session, now_ms, beat.journal_seq)
        if sandbox.joined:
            self.unsettled[sandbox.id] = None

    def lease_expired(self, sandbox: Sandbox, now_ms: int) -> bool:
        """
        Tells whether the attached session has been silent for longer than a lease.

        A session not heard of yet is granted a full term from now (a new owner must not call
        dead what it only has not met).
        """
        lease = self.leases.get(sandbox.id)
        if lease is None or lease.session != sandbox.session:
            self.leases[sandbox.id] = Lease(sandbox.session, now_ms, 0)
            return False
        return now_ms - lease.seen_ms > self.lease_ms

    def is_alive(self, gateway: str, now_ms: int, *, within_ms: int | None = None) -> bool:
        hint = self.gateways.get(gateway)
        limit = self.gateway_silent_ms if within_ms is None else within_ms
        return hint is not None and now_ms - hint.seen_ms <= limit

    def choose_for_create(self, sandbox: str, provider: str, now_ms: int, place: str = "") -> str:
        """
        Names a living gateway session that can create with `provider`, or "".

        `place`: the authority at which this create was asked for before. Only there can it be found
        again, and be ended: at another one it would be another create.
        """
        found = [h for h in self._alive(now_ms) if provider in h.providers]
        if place:
            found = [h for h in found if h.places.get(provider) == place]
        return self._choose(sandbox, found)

    def place_of(self, gateway: str, provider: str) -> str:
        """The authority at which this session creates with `provider`; "" where it did not say."""
        hint = self.gateways.get(gateway)
        return "" if hint is None else hint.places.get(provider, "")

    def choose_for_authority(self, sandbox: str, authority: str, prefer: str, now_ms: int) -> str:
        """Names a living gateway session that reaches `authority`, or ""."""
        found = [h for h in self._alive(now_ms) if authority in h.authorities]
        if any(h.gateway == prefer for h in found):
            return prefer
        return self._choose(sandbox, found)

    def _alive(self, now_ms: int) -> list[GatewayHint]:
        return [h for h in self.gateways.values() if now_ms - h.seen_ms <= self.gateway_silent_ms]

    @staticmethod
    def _choose(sandbox: str, found: list[GatewayHint]) -> str:
        # By hash of both names: even spread, and the same answer when asked again.
        if not found:
            return ""
        return min(
            found, key=lambda h: (ids.shard_of(sandbox + h.gateway, 1 << 16), h.gateway)
        ).gateway
