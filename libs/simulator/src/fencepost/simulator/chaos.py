"""What breaks processes, disks and reachability: one draw per class and chaos tick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fencepost.simulator.gateway import Gateway
from fencepost.simulator.ledger import SimulatedLog
from fencepost.simulator.options import DAG_CHAOS_FAULTS
from fencepost.simulator.provider import (
    AUTHORITIES,
    DEPLOYMENT,
    NEIGHBOUR,
    Instance,
    Provider,
)
from fencepost.simulator.replicas import Planner
from fencepost.simulator.sweeper import Sweeper
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
        *,
        clients: Process,
        trackers: list[Planner],
        sweepers: list[Sweeper],
        dag_log: SimulatedLog | None,
    ) -> None:
        self.world = world
        self.clients = clients
        self.trackers = trackers
        self.sweepers = sweepers
        self.dag_log = dag_log
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
            "preemption_announced": self._preemption_announced,
        }
        if trackers:
            self._does |= {name: getattr(self, f"_{name}") for name in DAG_CHAOS_FAULTS}

    def start(self) -> None:
        self.world.after(TICK_MS, self._tick)

    def stop(self) -> None:
        """Faults stop: whoever is paused goes on, clocks are right again."""
        for process in self._paused:
            process.resume()
        for planner in (*self.planners, *self.trackers):
            planner.skew_ms = 0
        for sweeper in self.sweepers:
            sweeper.skew_ms = 0
        for log in (self.log, self.dag_log):
            if log is not None:
                log.unreachable_until_ms = 0
        processes: tuple[Process, ...] = (
            *self.planners,
            *self.trackers,
            *self.gateways,
            *self.sweepers,
            self.clients,
        )
        for process in processes:
            process.cuts.clear()
        for gateway in self.gateways:
            gateway.cut_off_until_ms = 0
            gateway.reaches = AUTHORITIES
            gateway.places = gateway.home

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
        if self.dag_log is not None:
            self.dag_log.unreachable_until_ms = self.log.unreachable_until_ms

    # --- trackers and sweepers ----------------------------------------------------------------

    def _tracker_crash(self) -> None:
        tracker = self.trackers[self._one(len(self.trackers))]
        if tracker.alive:
            tracker.crash()

    def _tracker_pause(self) -> None:
        self._pause(self.trackers[self._one(len(self.trackers))], 100, 6_000)

    def _tracker_rival(self) -> None:
        tracker = self.trackers[self._one(len(self.trackers))]
        if tracker.alive and not tracker.paused:
            tracker.take(self._one(tracker.shards))

    def _tracker_clock_jump(self) -> None:
        tracker = self.trackers[self._one(len(self.trackers))]
        tracker.skew_ms = self.world.between(-3_000, 3_000)

    def _sweeper_crash(self) -> None:
        sweeper = self.sweepers[self._one(len(self.sweepers))]
        if sweeper.alive:
            sweeper.crash()

    def _sweeper_pause(self) -> None:
        self._pause(self.sweepers[self._one(len(self.sweepers))], 100, 8_000)

    def _sweeper_clock_jump(self) -> None:
        sweeper = self.sweepers[self._one(len(self.sweepers))]
        sweeper.skew_ms = self.world.between(-60_000, 60_000)

    # --- partitions ---------------------------------------------------------------------------

    def _part(self, processes: list[Planner] | list[Gateway] | list[Sweeper], peer: str) -> None:
        process = processes[self._one(len(processes))]
        process.cut(peer, self.world.between(300, 5_000))

    def _partition_planner_log(self) -> None:
        self._part(self.planners, "log")

    def _partition_tracker_log(self) -> None:
        self._part(self.trackers, "log")

    def _partition_planner_gateway(self) -> None:
        self._part(self.planners, self.gateways[self._one(len(self.gateways))].name)

    def _partition_planner_tracker(self) -> None:
        if self.world.rng.random() < 0.5:
            self._part(self.planners, "dag")
        else:
            self._part(self.trackers, "sandbox")

    def _partition_gateway_provider(self) -> None:
        self._part(self.gateways, "provider")

    def _partition_sweeper_planner(self) -> None:
        self._part(self.sweepers, "owner")

    def _partition_sweeper_tracker(self) -> None:
        self._part(self.sweepers, "tracker")

    def _partition_sweeper_gateway(self) -> None:
        self._part(self.sweepers, "gateway")

    def _partition_sweeper_log(self) -> None:
        self._part(self.sweepers, "log")

    def _partition_client_log(self) -> None:
        self.clients.cut("log", self.world.between(300, 3_000))

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
        """Those that the system made. What is nobody's, or a neighbour's, is left alone."""
        return [i for i in self.provider.instances.values() if i.state == "running" and not i.stray]

    def _instance_suspended(self) -> None:
        instance = self._instance()
        if instance is not None:
            self.provider.suspend(instance)

    def _stray_started(self) -> None:
        """Somebody restores a backup, or starts by hand what has this deployment's labels."""
        known = self._running()
        sandbox = "" if not known else known[self._one(len(known))].sandbox
        if not sandbox or self.world.rng.random() < 0.3:
            sandbox = f"lost{self.provider.starts}"
        self._start_foreign(sandbox, DEPLOYMENT, like=known)

    def _neighbour_started(self) -> None:
        """Another deployment on this account, with the same names for its sandboxes."""
        known = self._running()
        sandbox = known[self._one(len(known))].sandbox if known else "sb0"
        self._start_foreign(sandbox, NEIGHBOUR)

    def _start_foreign(self, sandbox: str, deployment: str, like: Sequence[Instance] = ()) -> None:
        """`like`: perhaps it has the native id that one of these has at the other authority."""
        if sum(i.stray and i.state == "running" for i in self.provider.instances.values()) > 8:
            return
        create_id = f"foreign{self.provider.starts}"
        labels = {"sandbox": sandbox, "create_id": create_id, "deployment": deployment}
        authority = AUTHORITIES[self._one(len(AUTHORITIES))]
        native_id = ""
        if like and self.world.rng.random() < 0.5:
            twin = like[self._one(len(like))]
            authority = AUTHORITIES[1 - AUTHORITIES.index(twin.authority)]
            native_id = twin.native_id
            labels["sandbox"] = sandbox = twin.sandbox
        instance = self.provider.start(create_id, sandbox, authority, labels, native_id)
        instance.stray = True

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

    def _preemption_announced(self) -> None:
        """The provider says that it will take an instance, and does; or only later, or sooner."""
        instance = self._instance()
        if instance is not None:
            grace_ms = self.world.between(100, 3_000)
            for gateway in self.gateways:
                gateway.announce(instance.ref, grace_ms)
            self.world.after(grace_ms, self.provider.vanish, instance)

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
