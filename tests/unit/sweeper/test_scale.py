"""A tick over 20,000 idle sandboxes: within its budget, and in little memory."""

import tracemalloc

import msgspec
from fencepost.contracts.messages import ListReply
from fencepost.core import ids
from fencepost.core.sweeping import Dag, Ledger, LedgerPage, LedgerRow, Listed, Listing

from tests.factories import ref
from tests.unit.sweeper.test_ticking import Rig

COUNT = 20_000
SHARDS = 64
PAGE = 500
MIB = 1024 * 1024


def name(number: int) -> str:
    return f"sbx-{number:022}"


def item(number: int) -> Listed:
    sandbox = name(number)
    labels = {
        "deployment": "d1",
        "sandbox": sandbox,
        "create_id": sandbox,
        "dag": f"dag-{number:022}",
        "acquisition": sandbox,
    }
    native = f"{sandbox}-0123456789abcdef"
    return Listed(ref(f"i{number:016x}-b01234567", native_id=native, authority="host"), labels)


def idle_fleet(rig: Rig, strays: int) -> None:
    """Answers as they come over the wire: bytes, decoded page by page."""
    listing: list[bytes] = []
    pages: dict[int, list[bytes]] = {}
    rows: dict[int, list[LedgerRow]] = {}
    for start in range(0, COUNT, PAGE):
        items = [item(n) for n in range(start, start + PAGE)]
        listing.append(msgspec.json.encode(ListReply(deployment="d1", items=items)))
        for n, one in zip(range(start, start + PAGE), items, strict=True):
            if n >= strays:
                holders = {one.labels["dag"]: name(n)}
                row = LedgerRow(name(n), one.ref, [], holders)
                rows.setdefault(ids.shard_of(name(n), SHARDS), []).append(row)
    for shard, found in rows.items():
        pages[shard] = [msgspec.json.encode(LedgerPage(rows=found))]

    async def listed(authority: str) -> Listing:
        items = [one for page in listing for one in msgspec.json.decode(page, type=ListReply).items]
        return Listing(authority=authority, deployment="d1", items=items)

    async def read() -> Ledger:
        ledger = Ledger(SHARDS)
        for found in pages.values():
            for page in found:
                ledger.take(msgspec.json.decode(page, type=LedgerPage))
        return ledger

    async def dag(asked: str) -> Dag:
        rig.world.asked.append(asked)
        return Dag(exists=True, acquisitions=frozenset({"sbx-" + asked.removeprefix("dag-")}))

    rig.world.listing = listed  # type: ignore[method-assign]
    rig.world.ledger = read  # type: ignore[method-assign]
    rig.world.dag = dag  # type: ignore[method-assign]


async def test_a_tick_over_20000_idle_sandboxes_stays_within_its_budget() -> None:
    rig = Rig(budget=50, asks=500)
    idle_fleet(rig, strays=120)
    await rig.tick()
    tracemalloc.start()
    try:
        reports = {report.authority: report for report in await rig.tick()}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reports["host"].counts == {"vouched": COUNT - 120, "proposed": 50, "budget": 70}
    assert reports["ledger"].counts == {"held": 500, "not_asked": COUNT - 120 - 500}
    assert len(rig.world.proposals) == 50
    assert len(rig.world.asked) == 1_000
    # The process has 300 MiB; what it is before its first tick takes about a third of them.
    assert peak < 150 * MIB, f"{peak / MIB:.0f} MiB"
