"""
A simulated provider: instances that boot, vanish, restart, are restored and stopped, slowly.

Creates are idempotent by create id; a stop is only a request; an observation may be unknown. What
truly runs is in `instances`, which no program of the system reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from fencepost.contracts.messages import ListReply
from fencepost.core import sweeping
from fencepost.core.facts import Capabilities, Ref
from fencepost.core.sweeping import Listed
from fencepost.simulator.disks import Disk, Outside
from fencepost.simulator.toolhost import Toolhost
from fencepost.simulator.world import Process, World

AUTHORITY: Final = "sim"
OTHER_AUTHORITY: Final = "sim2"
AUTHORITIES: Final = (AUTHORITY, OTHER_AUTHORITY)
DEPLOYMENT: Final = "ours"
NEIGHBOUR: Final = "neighbour"
PAGE: Final = 3
CALL_TIMEOUT_MS: Final = 1_200
SNAPSHOTS_MAX: Final = 6

Presence: TypeAlias = Literal["present", "terminating", "gone", "unknown"]
CAPABILITIES: Final = Capabilities()
BLIND: Final = Capabilities(observes_gone=False)


class Created(NamedTuple):
    ref: Ref


class CreateRefused(NamedTuple):
    reason: str


class CreateAmbiguous(NamedTuple):
    """Sent, and no answer came."""


class Instance:
    """
    One running thing. `first_boot`: of the life that this is; the native id may have had others.

    `stray`: nobody of the system asked for it. `deployment`: whose label it has.
    """

    def __init__(
        self,
        native_id: str,
        boot: int,
        create_id: str,
        sandbox: str,
        disk: Disk,
        *,
        authority: str = AUTHORITY,
        labels: dict[str, str] | None = None,
    ) -> None:
        self.native_id = native_id
        self.authority = authority
        self.labels = labels or {}
        self.stray = False
        self.suspended = False
        self.gone_at_ms = 0
        self.boot = self.first_boot = boot
        self.create_id = create_id
        self.sandbox = sandbox
        self.disk = disk
        self.state: Literal["running", "terminating", "gone"] = "running"
        self.toolhosts: list[Toolhost] = []
        self.cuts: list[Callable[[str], None]] = []

    @property
    def name(self) -> str:
        return f"{self.native_id}.b{self.boot}"

    @property
    def label(self) -> str:
        """Its name in a trace: two authorities may have the same name for two things."""
        return self.name if self.authority == AUTHORITY else f"{self.name}~{self.authority}"

    @property
    def ref(self) -> Ref:
        return Ref(
            authority=self.authority, provider="sim", native_id=self.native_id, instance=self.name
        )

    @property
    def key(self) -> str:
        return f"{self.authority}/{self.native_id}"

    @property
    def deployment(self) -> str:
        return self.labels.get(sweeping.LABEL_DEPLOYMENT, DEPLOYMENT)

    def is_of(self, ref: Ref) -> bool:
        """Whether a name means this life of the native id, in whatever boot it was read."""
        _, _, boot = ref.instance.rpartition(".b")
        return self.first_boot <= int(boot) <= self.boot


class Provider:
    def __init__(self, world: World, outside: Outside, observer: Any) -> None:
        self.world = world
        self.outside = outside
        self.observer = observer
        self.instances: dict[str, Instance] = {}
        self.by_create: dict[tuple[str, str], Instance] = {}
        self.settled: dict[tuple[str, str], None] = {}
        self.starts = 0
        self._natives = {AUTHORITY: 0}
        self._toolhosts = 0

    # --- calls of gateways ------------------------------------------------------------------

    def _call(
        self,
        process: Process,
        work: Callable[[], Any],
        answer: Callable[[Any], None],
        cut: Any,
    ) -> None:
        """`cut`: what the caller takes for the answer when the provider cannot be reached."""
        world = self.world
        life = process.life
        if process.is_cut("provider"):
            process.after(CALL_TIMEOUT_MS, answer, cut)
            return
        if world.hit("provider_rate_limited"):
            process.after(world.between(1, 20), answer, cut)
            return
        slow = world.hit("provider_slow")

        def arrived() -> None:
            said = work()
            world.answer(world.between(1, 20), process, life, answer, (said,))

        world.after(world.between(400, 4_000) if slow else world.between(1, 20), arrived)

    def capabilities(self, authority: str) -> Capabilities:
        if authority == AUTHORITY or self.world.options.observes_gone:
            return CAPABILITIES
        return BLIND

    def create(
        self,
        process: Process,
        create_id: str,
        sandbox: str,
        answer: Callable[[Any], None],
        *,
        authority: str = AUTHORITY,
        labels: dict[str, str] | None = None,
    ) -> None:
        world = self.world

        def make() -> Created | CreateRefused:
            return self._make(create_id, sandbox, authority, labels or {})

        if world.hit("create_refused"):
            self._call(process, lambda: CreateRefused("no capacity"), answer, CreateAmbiguous())
            return
        if world.hit("create_ambiguous"):
            if world.rng.random() < 0.5:
                world.after(world.between(1, 3_000), make)
            process.after(CALL_TIMEOUT_MS, answer, CreateAmbiguous())
            return
        self._call(process, make, answer, CreateAmbiguous())

    def _make(
        self, create_id: str, sandbox: str, authority: str, labels: dict[str, str]
    ) -> Created | CreateRefused:
        known = self.by_create.get((authority, create_id))
        if known is not None:
            return Created(known.ref)
        if (authority, create_id) in self.settled:
            return CreateRefused("settled")
        labels = {**labels, sweeping.LABEL_DEPLOYMENT: DEPLOYMENT}
        instance = self.start(create_id, sandbox, authority, labels)
        self.by_create[(authority, create_id)] = instance
        self.observer.started(instance)
        return Created(instance.ref)

    def start(
        self,
        create_id: str,
        sandbox: str,
        authority: str,
        labels: dict[str, str],
        native_id: str = "",
    ) -> Instance:
        """Boots something, under a native id that a former thing may have had, or under this."""
        boot = 1
        if not native_id or f"{authority}/{native_id}" in self.instances:
            native_id, boot = self._native(authority)
        self.starts += 1
        disk = Disk(f"disk-{native_id}" if authority == AUTHORITY else f"disk2-{native_id}.{boot}")
        instance = Instance(
            native_id, boot, create_id, sandbox, disk, authority=authority, labels=labels
        )
        self.instances[instance.key] = instance
        self.world.tell("boots", instance.label, "for", create_id)
        return instance

    def _native(self, authority: str) -> tuple[str, int]:
        free = [
            known
            for known in self.instances.values()
            if known.authority == authority and known.state == "gone"
        ]
        if free and self.world.hit("native_id_recycled"):
            former = free[self.world.between(0, len(free) - 1)]
            return former.native_id, former.boot + 1
        number = self._natives.get(authority, 0) + 1
        while f"{authority}/n{number}" in self.instances:
            number += 1
        self._natives[authority] = number
        return f"n{number}", 1

    def find(self, ref: Ref) -> Instance | None:
        """What a name means now; None where that life of the native id is over."""
        instance = self.instances.get(f"{ref.authority}/{ref.native_id}")
        if instance is None or instance.state == "gone" or not instance.is_of(ref):
            return None
        return instance

    def settle(
        self,
        process: Process,
        create_id: str,
        authorities: tuple[str, ...],
        answer: Callable[[Ref | str | None], None],
    ) -> None:
        """
        Promises that no later create under this id makes anything there, and finds what it made.
        """

        def work() -> Ref | str | None:
            for authority in authorities:
                self.settled[(authority, create_id)] = None
            if self.world.hit("observe_unknown"):
                return "unknown"
            for authority in authorities:
                known = self.by_create.get((authority, create_id))
                if known is not None:
                    return known.ref
            return None

        self._call(process, work, answer, "unknown")

    def stop(self, process: Process, ref: Ref, answer: Callable[[str], None]) -> None:
        world = self.world
        if world.hit("stop_lost"):
            process.after(CALL_TIMEOUT_MS, answer, "timeout")
            return

        def work() -> str:
            instance = self.find(ref)
            if instance is None:
                return "not_found"
            # Another boot of the same life is the same sandbox here: a stop that was meant for
            # the former boot may take it.
            if world.hit("stop_refused"):
                return "refused"
            if instance.state == "running":
                self.observer.stop_taken(instance)
                instance.state = "terminating"
                stuck = world.hit("stop_stuck")
                delay_ms = world.between(3_000, 12_000) if stuck else world.between(5, 200)
                world.after(delay_ms, self.vanish, instance)
            return "timeout" if world.hit("stop_answer_lost") else "accepted"

        self._call(process, work, answer, "unreachable")

    def presence(self, ref: Ref) -> Presence:
        """The truth about one name; another boot of the same life is not gone."""
        instance = self.find(ref)
        if instance is None:
            return "gone"
        return "present" if instance.state == "running" else "terminating"

    def observe(self, process: Process, ref: Ref, answer: Callable[[Presence], None]) -> None:
        def work() -> Presence:
            if not self.capabilities(ref.authority).observes_gone:
                return "unknown"
            said: Presence = "unknown" if self.world.hit("observe_unknown") else self.presence(ref)
            if said == "gone" and self.world.hit("observe_late"):
                return "terminating"  # read from a copy that lags
            return said

        self._call(process, work, answer, "unknown")

    def list_page(
        self,
        process: Process,
        authority: str,
        token: str,
        answer: Callable[[ListReply], None],
    ) -> None:
        """One page of what runs in this deployment's name, perhaps not what it should be."""
        problem = ListReply(problem="no_answer")
        self._call(process, lambda: self._page(authority, token), answer, problem)

    def _page(self, authority: str, token: str) -> ListReply:
        world = self.world
        asked = authority
        if world.hit("list_of_other_authority"):
            asked = AUTHORITIES[1 - AUTHORITIES.index(authority)]
        unfiltered = world.hit("list_unfiltered")
        stale_ms = world.between(1, 3_000) if world.hit("list_stale") else 0
        found = [
            Listed(instance.ref, dict(instance.labels))
            for instance in self.instances.values()
            if instance.authority == asked
            and (unfiltered or instance.deployment == DEPLOYMENT)
            and (instance.state != "gone" or world.now_ms - instance.gone_at_ms < stale_ms)
        ]
        if world.hit("list_empty"):
            found = []
        elif found and world.hit("list_short"):
            del found[world.between(0, len(found) - 1)]
        start = int(token or 0)
        if start and world.hit("list_paged_wrong"):
            start = max(0, start - world.between(1, PAGE))  # what was on the last page, again
        end = start + PAGE
        complete = end >= len(found)
        return ListReply(
            deployment=NEIGHBOUR if world.hit("list_of_other_deployment") else DEPLOYMENT,
            items=found[start:end],
            token="" if complete else str(end),
            complete=complete and not world.hit("list_incomplete"),
            observes_gone=self.capabilities(authority).observes_gone,
        )

    def channel(
        self,
        process: Process,
        ref: Ref,
        send: Callable[[str, Any], None],
        cut: Callable[[str], None],
        answer: Callable[[tuple[Instance, Toolhost] | Presence], None],
    ) -> None:
        """Starts a toolhost in that sandbox, whatever instance of it runs now."""

        def work() -> tuple[Instance, Toolhost] | Presence:
            instance = self.find(ref)
            if instance is None or instance.state != "running":
                blind = not self.capabilities(ref.authority).observes_gone
                return "unknown" if blind else self.presence(ref)
            if instance.suspended:
                instance.suspended = False
                self.restart(instance)
            self._toolhosts += 1
            toolhost = Toolhost(
                self.world,
                f"th{self._toolhosts}@{instance.label}",
                instance.disk,
                instance=instance.name,
                outside=self.outside,
                observer=self.observer,
                send=send,
            )
            instance.toolhosts = [t for t in instance.toolhosts if t.alive]
            instance.toolhosts.append(toolhost)
            instance.cuts = [*instance.cuts[-8:], cut]
            return instance, toolhost

        self._call(process, work, answer, "unknown")

    # --- what happens to instances ------------------------------------------------------------

    def vanish(self, instance: Instance, *, acting_ms: int = 0) -> None:
        """Takes an instance away with its disk, telling nobody but those whose channel ends."""
        if instance.state == "gone":
            return
        instance.state = "gone"
        instance.gone_at_ms = self.world.now_ms
        self.world.tell("vanishes", instance.label)
        if acting_ms:
            # Its node was lost: the provider has it no more, its processes go on for a while.
            self.world.after(acting_ms, self._end_processes, instance, list(instance.toolhosts))
        else:
            self._end_processes(instance, list(instance.toolhosts))

    def _end_processes(self, instance: Instance, toolhosts: list[Toolhost]) -> None:
        cuts, instance.cuts = instance.cuts, []
        for toolhost in toolhosts:
            if toolhost.alive:
                toolhost.kill()
        if instance.state == "gone":
            instance.disk.pulled = True
        for cut in cuts:
            self.world.after(self.world.between(0, 300), cut, "channel_ended")

    def restart(self, instance: Instance) -> None:
        """Same native id, same disk, another boot: everything that ran is gone."""
        self._end_processes(instance, list(instance.toolhosts))
        instance.toolhosts = []
        instance.boot += 1
        self.world.tell("restarts", instance.label)

    def suspend(self, instance: Instance) -> None:
        """Its processes end; opening a channel, and nothing else, boots it again."""
        self._end_processes(instance, list(instance.toolhosts))
        instance.toolhosts = []
        instance.suspended = True
        self.world.tell("suspended", instance.label)

    def snapshot(self, instance: Instance) -> None:
        disk = instance.disk
        disk.snapshots = [*disk.snapshots[-(SNAPSHOTS_MAX - 1) :], disk.contents.copy()]

    def restore(self, instance: Instance, number: int) -> None:
        """Another boot, on an older point of the same disk."""
        self.restart(instance)
        disk = instance.disk
        disk.contents = disk.snapshots[number].copy()
        self.world.tell("restored", instance.label, f"journal {disk.contents.journal_seq}")

    def swap(self, instance: Instance, number: int) -> None:
        """
        An older point of the disk, of another epoch, comes in beneath what runs on it.

        Later points are gone: forward again within one epoch is what nothing could notice.
        """
        disk = instance.disk
        disk.roll_back(disk.snapshots[: number + 1], spared=disk.holder)
        self.world.tell("swapped", instance.label, f"journal {disk.contents.journal_seq}")
