"""
The faults: each strikes once, for a while, and heals what it did.

A fault names what it touches; two that touch the same do not strike together. Their times are drawn
from the run's seed; what the machine makes of them is not.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Sequence
from typing import Final

from fencepost.client import Client
from fencepost.client.processes import Child
from fencepost.client.stack import Service
from fencepost.contracts.streams import ledger_names

from scripts.chaos.disks import PowerDisk
from scripts.chaos.fault import Fault, Strike
from scripts.chaos.losses import of_sandboxes
from scripts.chaos.proxy import MODES, Direction, Mode, Proxy
from scripts.chaos.world import LEASE_MS, World

ELECTION_S: Final = 10.0
"""As long as a node must be silent for another leader to be elected, and a little more."""

_DIRECTIONS: Final[tuple[tuple[Direction, ...], ...]] = (("up",), ("down",), ("up", "down"))


def faults(world: World, client: Client, boxes: list[str], taken: Counter[str]) -> list[Fault]:
    """Every fault that this world can have. `taken` counts how often a sandbox lost its disk."""
    found: list[Fault] = []
    for service in world.services.values():
        found += _of_service(service)
        for index, proxy in enumerate(world.nats_proxies[service.name]):
            found += _of_proxy(proxy, f"{service.name} nats", 1 if index == 0 else 0)
        if service.name in world.postgres_proxies:
            found += _of_proxy(world.postgres_proxies[service.name], f"{service.name} postgres", 1)
        if world.cluster is not None:
            found.append(_isolated(world, service))
    found += _of_nodes(world, client) if world.cluster is not None else _of_server(world)
    if world.postgres is not None:
        found += _of_postgres(world)
    if world.sandbox_disk is not None:
        found.append(Fault("full disk: sandboxes", "sandboxes", 1, _sandboxes_full(world), "disk"))
    if world.store_disks and world.cluster is None:
        found.append(Fault("full disk: nats", "nats", 1, _store_full(world), "disk"))
    return found + of_sandboxes(world, client, boxes, taken)


def _of_service(service: Service) -> list[Fault]:
    async def kill(rng: random.Random) -> None:
        if service.is_running:
            service.kill()
        await asyncio.sleep(rng.random() * 2)
        if not service.is_running:
            service.start()

    async def pause(rng: random.Random) -> None:
        service.pause()
        try:
            # Half of them longer than the lease, and the 1.2 s after which an owner is replaced.
            await asyncio.sleep(rng.random() * 2 * LEASE_MS / 1000)
        finally:
            service.resume()

    async def restart(rng: random.Random) -> None:
        del rng
        if service.is_running:
            await service.stop()
        service.start()

    role = service.role
    return [
        Fault(f"restart: {role}", service.name, 1, restart, "process"),
        Fault(f"kill -9: {role}", service.name, 1, kill, "process"),
        Fault(f"stop and continue: {role}", service.name, 1, pause, "process"),
    ]


def _of_proxy(proxy: Proxy, what: str, weight: int) -> list[Fault]:
    async def strike_cut(rng: random.Random) -> None:
        del rng
        proxy.cut()

    async def strike_refuse(rng: random.Random) -> None:
        proxy.refuses = True
        proxy.cut()
        try:
            await asyncio.sleep(rng.random() * 4)
        finally:
            proxy.heal()

    def strike_mode(mode: Mode) -> Strike:
        async def strike(rng: random.Random) -> None:
            proxy.set(mode, *rng.choice(_DIRECTIONS), delay_s=rng.random() * 0.5)
            try:
                await asyncio.sleep(0.2 + rng.random() * 4)
            finally:
                proxy.heal()

        return strike

    role = what.partition("-")[0]
    link = f"{role} to {what.rpartition(' ')[2]}"
    found = [
        Fault(f"cut: {link}", f"{what} link", weight, strike_cut, "link"),
        Fault(f"refuse: {link}", f"{what} link", weight, strike_refuse, "link"),
    ]
    found += [
        Fault(f"{mode}: {link}", f"{what} link", weight, strike_mode(mode), "link")
        for mode in MODES
    ]
    return [fault for fault in found if fault.weight]


def _isolated(world: World, service: Service) -> Fault:
    async def strike(rng: random.Random) -> None:
        """Cut off from every node at once: the proxy of one is no partition."""
        proxies = world.nats_proxies[service.name]
        for proxy in proxies:
            proxy.refuses = True
            proxy.cut()
        try:
            await asyncio.sleep(rng.random() * 5)
        finally:
            for proxy in proxies:
                proxy.heal()

    return Fault(
        f"partition: {service.role} to nats", f"{service.name} nats link", 2, strike, "link"
    )


def _of_server(world: World) -> list[Fault]:
    async def kill(rng: random.Random) -> None:
        world.nats.kill()
        await asyncio.sleep(rng.random() * 2)
        await world.nats.restart()

    async def pause(rng: random.Random) -> None:
        child = world.nats.child
        child.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.random() * 6)
        finally:
            child.send(signal.SIGCONT)

    async def power(rng: random.Random) -> None:
        await lose_power(world)
        await asyncio.sleep(rng.random())
        await world.nats.restart()

    found = [
        Fault("kill -9: nats", "nats", 5, kill),
        Fault("stop and continue: nats", "nats", 4, pause),
    ]
    if world.store_disks:
        found.append(Fault("power cut: nats", "nats", 6, power))
    return found


async def lose_power(world: World) -> None:
    """The servers of the ledger lose their power at one instant; they are not started again."""
    if world.cluster is not None:
        children = [node.child for node in world.cluster.nodes if node.is_running]
    else:
        children = [world.nats.child]
    await cut_power(children, world.store_disks)


async def cut_power(children: Sequence[Child], disks: Sequence[PowerDisk]) -> None:
    """
    Ends programs and takes from their disks what had not reached them.

    Stopped first, so that nothing is acknowledged between the cut and the end.
    """
    for child in children:
        child.send(signal.SIGSTOP)
    for disk in disks:
        disk.cut()
    for child in children:
        child.kill()
    for disk in disks:
        await asyncio.to_thread(disk.come_back)


def _of_nodes(world: World, client: Client) -> list[Fault]:
    cluster = world.cluster
    assert cluster is not None

    def ledger(rng: random.Random) -> str:
        names = ledger_names(world.ledgers)
        return names[0] if len(names) == 1 else rng.choice(names)

    async def kill_leader(rng: random.Random) -> None:
        node = await cluster.leader(client.link, ledger(rng))
        node.kill()
        await asyncio.sleep(rng.random() * 2 * ELECTION_S)
        node.start()
        await cluster.settle()

    async def kill_node(rng: random.Random) -> None:
        node = rng.choice(cluster.nodes)
        node.kill()
        await asyncio.sleep(rng.random() * 3)
        node.start()
        await cluster.settle()

    async def pause_leader(rng: random.Random) -> None:
        node = await cluster.leader(client.link, ledger(rng))
        node.pause()
        try:
            await asyncio.sleep(ELECTION_S + rng.random() * 5)
        finally:
            node.resume()
        await cluster.settle()

    async def wipe(rng: random.Random) -> None:
        # Only while the other two have everything: two disks lost are more than R3 promises for.
        await cluster.settle()
        node = rng.choice(cluster.nodes)
        node.kill()
        await asyncio.to_thread(node.wipe)
        await asyncio.sleep(rng.random() * 3)
        node.start()
        await cluster.settle()

    async def power(rng: random.Random) -> None:
        await lose_power(world)
        await asyncio.sleep(rng.random())
        await cluster.restart()

    found = [
        Fault("kill -9: leader of the ledger", "nats", 8, kill_leader),
        Fault("kill -9: node", "nats", 3, kill_node),
        Fault("stop and continue: leader of the ledger", "nats", 4, pause_leader),
        Fault("wiped disk: node", "nats", 3, wipe),
    ]
    if world.store_disks:
        found.append(Fault("power cut: all nodes", "nats", 3, power))
    return found


def _of_postgres(world: World) -> list[Fault]:
    async def kill(rng: random.Random) -> None:
        assert world.postgres is not None
        world.postgres.kill()
        await asyncio.sleep(rng.random() * 2)
        await world.revive_postgres()

    async def pause(rng: random.Random) -> None:
        assert world.postgres is not None
        child = world.postgres.child
        child.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.random() * 5)
        finally:
            child.send(signal.SIGCONT)

    return [
        Fault("kill -9: postgres", "postgres", 2, kill),
        Fault("stop and continue: postgres", "postgres", 2, pause),
    ]


def _sandboxes_full(world: World) -> Strike:
    disk = world.sandbox_disk
    assert disk is not None

    async def strike(rng: random.Random) -> None:
        await asyncio.to_thread(disk.fill)
        try:
            await asyncio.sleep(0.5 + rng.random() * 4)
        finally:
            disk.free()

    return strike


def _store_full(world: World) -> Strike:
    disk = world.store_disks[0]

    async def strike(rng: random.Random) -> None:
        await asyncio.to_thread(disk.fill)
        try:
            await asyncio.sleep(0.5 + rng.random() * 3)
        finally:
            disk.free()
        # A server that met a full disk stores nothing more until it is started again.
        await world.revive_nats()

    return strike
