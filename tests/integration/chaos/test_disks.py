"""The disks of `make chaos`: what is not synced is really gone, and what is full really is."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from fencepost.client.embedded import NatsServer
from fencepost.runtime import streams
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link, stream_info

from scripts.chaos import disks
from scripts.chaos.faults import cut_power

SUBJECT = "fp.v1.ledger.toy.0"
APPENDS = 200

needs_power = pytest.mark.skipif(
    disks.why_no_power_cut() != "", reason=f"no power cut here: {disks.why_no_power_cut()}"
)
needs_disks = pytest.mark.skipif(
    disks.why_not() != "", reason=f"no small disks here: {disks.why_not()}"
)


@pytest.fixture
def power_disk(tmp_path: Path) -> Iterator[disks.PowerDisk]:
    disk = disks.PowerDisk(tmp_path / "nats" / "store", 256, tmp_path / "image")
    disk.mount()
    try:
        yield disk
    finally:
        disk.unmount()


async def messages_after_a_power_cut(
    disk: disks.PowerDisk, data: Path, *, sync_always: bool
) -> int:
    """Appends, each acknowledged, then cuts the power; how many messages there are then."""
    server = await NatsServer.start(data, sync_always=sync_always)
    try:
        link = await Link.connect(server.url, name="test")
        await streams.declare(link, 8, create=True)
        log, head = JetStreamLog(link), 0
        for number in range(APPENDS):
            head = await log.append(SUBJECT, b"%d" % number * 100, head)
        assert head == APPENDS
        await cut_power([server.child], [disk])
        await link.close()
        await server.restart()
        link = await Link.connect(server.url, name="test")
        info = await stream_info(link, "FP_LEDGER")
        await link.close()
        return 0 if info.error is not None else info.state.messages
    finally:
        if server.is_running:
            await server.stop()


@needs_power
async def test_what_was_acknowledged_outlives_a_power_cut(
    power_disk: disks.PowerDisk, tmp_path: Path
) -> None:
    found = await messages_after_a_power_cut(power_disk, tmp_path / "nats", sync_always=True)
    assert found == APPENDS


@needs_power
async def test_without_syncing_the_same_cut_takes_what_was_acknowledged(
    power_disk: disks.PowerDisk, tmp_path: Path
) -> None:
    found = await messages_after_a_power_cut(power_disk, tmp_path / "nats", sync_always=False)
    assert found < APPENDS


@needs_disks
def test_a_full_disk_takes_nothing_until_it_is_freed(tmp_path: Path) -> None:
    disk = disks.Disk(tmp_path / "small", 4)
    disk.mount()
    try:
        disk.fill()
        with pytest.raises(OSError, match="No space left") as full:
            (disk.folder / "more").write_bytes(b"x" * 8192)
        assert full.value.errno == errno.ENOSPC
        disk.free()
        (disk.folder / "more").write_bytes(b"x" * 8192)
    finally:
        disk.unmount()
