"""What breaks processes, disks and reachability: one draw per class and chaos tick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fencepost.simulator.gateway import Gateway
from fencepost.simulator.ledger import SimulatedLog
from fencepost.simulator.owner import Planner
from fencepost.simulator.provider import Instance, Provider
from fencepost.simulator.toolhost import Toolhost
from fencepost.simulator.world import Process, World

TICK_MS: Final = 150


class Chaos:
    def __init__(
        self,
        world: World,
        planners: list[Planner],
        gateways: list[Gateway],
        provider: Provider,
        log: SimulatedLog,
    ) -> None:
        self.world = world
        self.planners = planners
        self.gateways = gateways
        self.provider = provider
        self.log = log
        self._paused: list[Process] = []
        self._does: dict[str, Callable[[], None]] = {
            "owner_crash": self._owner_crash,
            "owner_pause": self._owner_pause,
            "owner_rival": self._owner_rival,
            "clock_jump": self._clock_jump,
            "log_unreachable": self._log_unreachable,
            "gateway_crash": self._gateway_crash,
            "gateway_pause": self._gateway_pause,
            "gateway_cut_off": self._gateway_cut_off,
            "toolhost_crash": self._toolhost_crash,
            "toolhost_pause": self._toolhost_pause,
            "channel_cut": self._channel_cut,
            "sandbox_preempted": self._preempted,
            "preempted_but_acting": self._preempted_but_acting,
            "sandbox_restarted": self._restarted,
            "snapshot_restored": self._restored,
            "disk_swapped_under_tool": self._swapped,
        }

    def start(self) -> None:
        self.world.after(TICK_MS, self._tick)

    def stop(self) -> None:
        """Faults stop: whoever is paused goes on, clocks are right again."""
        for process in self._paused:
            process.resume()
        for planner in self.planners:
            planner.skew_ms = 0
        self.log.unreachable_until_ms = 0
        for gateway in self.gateways:
            gateway.cut_off_until_ms = 0

    def _tick(self) -> None:
        world = self.world
        if not world.faults_on:
            return
        for name, do in self._does.items():
            if world.hit(name):
                do()
        instances = self._running()
        if instances and world.rng.random() < 0.3:
            self.provider.snapshot(instances[world.between(0, len(instances) - 1)])
        world.after(TICK_MS, self._tick)

    def _one(self, count: int) -> int:
        return self.world.between(0, count - 1)

    def _pause(self, process: Process, low_ms: int, high_ms: int) -> None:
        if process.alive and not process.paused:
            process.pause()
            self._paused.append(process)
            self.world.after(self.world.between(low_ms, high_ms), process.resume)

    # --- planners and the log -----------------------------------------------------------------

    def _owner_crash(self) -> None:
        planner = self.planners[self._one(len(self.planners))]
        if planner.alive:
            planner.crash()

    def _owner_pause(self) -> None:
        self._pause(self.planners[self._one(len(self.planners))], 100, 6_000)

    def _owner_rival(self) -> None:
        planner = self.planners[self._one(len(self.planners))]
        if planner.alive and not planner.paused:
            planner.take(self._one(planner.shards))

    def _clock_jump(self) -> None:
        planner = self.planners[self._one(len(self.planners))]
        planner.skew_ms = self.world.between(-3_000, 3_000)

    def _log_unreachable(self) -> None:
        self.log.unreachable_until_ms = self.world.now_ms + self.world.between(200, 4_000)

    # --- gateways -----------------------------------------------------------------------------

    def _gateway_crash(self) -> None:
        gateway = self.gateways[self._one(len(self.gateways))]
        if gateway.alive:
            gateway.crash()

    def _gateway_pause(self) -> None:
        self._pause(self.gateways[self._one(len(self.gateways))], 100, 8_000)

    def _gateway_cut_off(self) -> None:
        gateway = self.gateways[self._one(len(self.gateways))]
        gateway.cut_off_until_ms = self.world.now_ms + self.world.between(300, 5_000)

    # --- sandboxes ----------------------------------------------------------------------------

    def _running(self) -> list[Instance]:
        return [i for i in self.provider.instances.values() if i.state == "running"]

    def _instance(self) -> Instance | None:
        running = self._running()
        return running[self._one(len(running))] if running else None

    def _toolhost(self) -> Toolhost | None:
        alive = [t for i in self._running() for t in i.toolhosts if t.alive]
        return alive[self._one(len(alive))] if alive else None

    def _toolhost_crash(self) -> None:
        toolhost = self._toolhost()
        if toolhost is not None:
            toolhost.kill()

    def _toolhost_pause(self) -> None:
        toolhost = self._toolhost()
        if toolhost is not None:
            self._pause(toolhost, 100, 5_000)

    def _channel_cut(self) -> None:
        instance = self._instance()
        if instance is not None and instance.cuts:
            instance.cuts[-1]("channel_cut")

    def _preempted(self) -> None:
        instance = self._instance()
        if instance is not None:
            self.provider.vanish(instance)

    def _preempted_but_acting(self) -> None:
        instance = self._instance()
        if instance is not None:
            self.provider.vanish(instance, acting_ms=self.world.between(200, 6_000))

    def _restarted(self) -> None:
        instance = self._instance()
        if instance is not None:
            self.provider.restart(instance)

    def _restored(self) -> None:
        instance = self._instance()
        if instance is not None and instance.disk.snapshots:
            self.provider.restore(instance, self._one(len(instance.disk.snapshots)))

    def _swapped(self) -> None:
        """Only to a point of another epoch: within one, nothing could tell the two apart."""
        found = [
            (instance, number)
            for instance in self._running()
            if isinstance(instance.disk.holder, Toolhost)
            for number, contents in enumerate(instance.disk.snapshots)
            if contents.marker is not None
            and instance.disk.contents.marker is not None
            and contents.marker.nonce != instance.disk.contents.marker.nonce
        ]
        if found:
            instance, number = found[self._one(len(found))]
            self.provider.swap(instance, number)
