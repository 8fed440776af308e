"""
A simulated provider: instances that boot, vanish, restart, are restored and stopped, slowly.

Creates are idempotent by create id; a stop is only a request; an observation may be unknown. What
truly runs is in `instances`, which no program of the system reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from fencepost.core.facts import Capabilities, Ref
from fencepost.simulator.disks import Disk, Outside
from fencepost.simulator.toolhost import Toolhost
from fencepost.simulator.world import Process, World

AUTHORITY: Final = "sim"
CALL_TIMEOUT_MS: Final = 1_200
SNAPSHOTS_MAX: Final = 6

Presence: TypeAlias = Literal["present", "terminating", "gone", "unknown"]
CAPABILITIES: Final = Capabilities()


class Created(NamedTuple):
    ref: Ref


class CreateRefused(NamedTuple):
    reason: str


class CreateAmbiguous(NamedTuple):
    """Sent, and no answer came."""


class Instance:
    """One running thing. `acting_until_ms`: gone for the provider, yet its processes still act."""

    def __init__(self, native_id: str, boot: int, create_id: str, sandbox: str, disk: Disk) -> None:
        self.native_id = native_id
        self.boot = boot
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
    def ref(self) -> Ref:
        return Ref(
            authority=AUTHORITY, provider="sim", native_id=self.native_id, instance=self.name
        )


class Provider:
    def __init__(self, world: World, outside: Outside, observer: Any) -> None:
        self.world = world
        self.outside = outside
        self.observer = observer
        self.instances: dict[str, Instance] = {}
        self.by_create: dict[str, Instance] = {}
        self.settled: dict[str, None] = {}
        self._natives = 0
        self._toolhosts = 0

    # --- calls of gateways ------------------------------------------------------------------

    def _call(
        self, process: Process, work: Callable[[], Any], answer: Callable[[Any], None]
    ) -> None:
        world = self.world
        life = process.life
        slow = world.hit("provider_slow")

        def arrived() -> None:
            said = work()
            world.answer(world.between(1, 20), process, life, answer, (said,))

        world.after(world.between(400, 4_000) if slow else world.between(1, 20), arrived)

    def create(
        self, process: Process, create_id: str, sandbox: str, answer: Callable[[Any], None]
    ) -> None:
        world = self.world
        if world.hit("create_refused"):
            self._call(process, lambda: CreateRefused("no capacity"), answer)
            return
        if world.hit("create_ambiguous"):
            if world.rng.random() < 0.5:
                world.after(world.between(1, 3_000), self._make, create_id, sandbox)
            process.after(CALL_TIMEOUT_MS, answer, CreateAmbiguous())
            return
        self._call(process, lambda: self._make(create_id, sandbox), answer)

    def _make(self, create_id: str, sandbox: str) -> Created | CreateRefused:
        known = self.by_create.get(create_id)
        if known is not None:
            return Created(known.ref)
        if create_id in self.settled:
            return CreateRefused("settled")
        self._natives += 1
        native_id = f"n{self._natives}"
        instance = Instance(native_id, 1, create_id, sandbox, Disk(f"disk-{native_id}"))
        self.instances[native_id] = instance
        self.by_create[create_id] = instance
        self.world.tell("boots", instance.name, "for", create_id)
        self.observer.started(instance)
        return Created(instance.ref)

    def settle(
        self, process: Process, create_id: str, answer: Callable[[Ref | str | None], None]
    ) -> None:
        """Promises that no later create under this id makes anything, and finds what it made."""

        def work() -> Ref | str | None:
            self.settled[create_id] = None
            if self.world.hit("observe_unknown"):
                return "unknown"
            known = self.by_create.get(create_id)
            return None if known is None else known.ref

        self._call(process, work, answer)

    def stop(self, process: Process, ref: Ref, answer: Callable[[str], None]) -> None:
        world = self.world
        if world.hit("stop_lost"):
            process.after(CALL_TIMEOUT_MS, answer, "timeout")
            return

        def work() -> str:
            instance = self.instances.get(ref.native_id)
            if instance is None or instance.state == "gone":
                return "not_found"
            # Another boot of the same native id is the same sandbox here: a stop that was meant
            # for the former boot may take it.
            if world.hit("stop_refused"):
                return "refused"
            self.observer.stop_taken(instance)
            if instance.state == "running":
                instance.state = "terminating"
                stuck = world.hit("stop_stuck")
                delay_ms = world.between(3_000, 12_000) if stuck else world.between(5, 200)
                world.after(delay_ms, self.vanish, instance)
            return "accepted"

        self._call(process, work, answer)

    def presence(self, ref: Ref) -> Presence:
        """The truth about one native id; another boot of it is not gone."""
        instance = self.instances.get(ref.native_id)
        if instance is None or instance.state == "gone":
            return "gone"
        return "present" if instance.state == "running" else "terminating"

    def observe(self, process: Process, ref: Ref, answer: Callable[[Presence], None]) -> None:
        def work() -> Presence:
            return "unknown" if self.world.hit("observe_unknown") else self.presence(ref)

        self._call(process, work, answer)

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
            instance = self.instances.get(ref.native_id)
            if instance is None or instance.state != "running":
                return self.presence(ref)
            self._toolhosts += 1
            toolhost = Toolhost(
                self.world,
                f"th{self._toolhosts}@{instance.name}",
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

        self._call(process, work, answer)

    # --- what happens to instances ------------------------------------------------------------

    def vanish(self, instance: Instance, *, acting_ms: int = 0) -> None:
        """Takes an instance away with its disk, telling nobody but those whose channel ends."""
        if instance.state == "gone":
            return
        instance.state = "gone"
        self.world.tell("vanishes", instance.name)
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
        self.world.tell("restarts", instance.name)

    def snapshot(self, instance: Instance) -> None:
        disk = instance.disk
        disk.snapshots = [*disk.snapshots[-(SNAPSHOTS_MAX - 1) :], disk.contents.copy()]

    def restore(self, instance: Instance, number: int) -> None:
        """Another boot, on an older point of the same disk."""
        self.restart(instance)
        disk = instance.disk
        disk.contents = disk.snapshots[number].copy()
        self.world.tell("restored", instance.name, f"journal {disk.contents.journal_seq}")

    def swap(self, instance: Instance, number: int) -> None:
        """
        An older point of the disk, of another epoch, comes in beneath what runs on it.

        Later points are gone: forward again within one epoch is what nothing could notice.
        """
        disk = instance.disk
        disk.roll_back(disk.snapshots[: number + 1], spared=disk.holder)
        self.world.tell("swapped", instance.name, f"journal {disk.contents.journal_seq}")
