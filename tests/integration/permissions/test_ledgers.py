"""Several ledger streams: of each, every role may do its part, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fencepost.client import doctor_nats
from fencepost.contracts import grants, streams, subjects
from fencepost.contracts.grants import ROLES
from fencepost.core.errors import UnknownError
from fencepost.runtime import streams as declaring
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import DeniedError, stream_info
from fencepost.runtime.ports import Absent, Valid

from tests.contracts import until
from tests.integration.permissions import guarded as making
from tests.integration.permissions.test_grants import CALLS, covers, literal

LEDGERS = 2
NAMES = (*streams.ledger_names(LEDGERS), streams.LEDGER, "FP_LEDGER_2")
"""Those that there are, and two that another number would have."""

READERS = ("planner", "tracker", "client", "admin", "mover")
WRITERS = {"sandbox": ("planner", "mover"), "dag": ("tracker", "mover")}


def _asked(text: str) -> str:
    return text.rpartition(' "')[2].rstrip('"').lower().replace("fpjs.", "$js.api.", 1)


async def test_each_role_does_its_part_on_every_ledger_and_no_other(tmp_path: Path) -> None:
    guarded = await making.start(tmp_path / "nats", ledgers=LEDGERS)
    try:
        for role in ROLES:
            await _what_the_table_says(guarded, role)
        for role in ROLES:
            await _what_it_is_for(guarded, role)
    finally:
        await guarded.server.stop()


async def _what_the_table_says(guarded: making.Guarded, role: grants.Role) -> None:
    asked = [f"{grants.API}.{literal(call.format(name))}" for name in NAMES for call in CALLS]
    allowed = grants.publishes(role, ledgers=LEDGERS)
    refused = {
        subject.lower()
        for subject in asked
        if not any(covers(pattern, subject) for pattern in allowed)
    }
    async with guarded.links(role) as link:
        denied = guarded.denied[role]
        for subject in asked:
            link.publish(subject, b"{}")
        await link.flush()
        await until(lambda: len(denied) >= len(refused))
        assert {_asked(text) for text in denied} == refused, role
        denied.clear()


async def _what_it_is_for(guarded: making.Guarded, role: grants.Role) -> None:
    """By the code that services use, on each stream alike."""
    async with guarded.links(role) as link:
        for number, name in enumerate(streams.ledger_names(LEDGERS)):
            log = JetStreamLog(link, stream=name)
            for family, writers in WRITERS.items():
                subject = subjects.ledger(family, number)
                if role in writers and role != "mover":
                    assert await log.append(subject, b"{}", 0) > 0
                elif role not in writers:
                    with pytest.raises(DeniedError):
                        await link.call(subject, b"{}", timeout_s=5)
                found = await log.last(subject)
                assert isinstance(found, (Absent, Valid)) == (role in READERS), (role, found)
            if role in ("sweeper", "gateway", *READERS, "operator"):
                assert (await stream_info(link, name)).error is None
        if role == "tracker":
            await declaring.check_ledgers(link, making.SHARDS, ledgers=LEDGERS)
            with pytest.raises(declaring.StreamMissingError, match="FENCEPOST_LEDGERS=1, may not"):
                await declaring.check_ledgers(link, making.SHARDS, ledgers=1)
        if role in ("planner", "gateway", "sweeper", "mover"):
            await declaring.declare(link, making.SHARDS, create=False, ledgers=LEDGERS)
            with pytest.raises(declaring.StreamMismatchError, match="FENCEPOST_LEDGERS"):
                await declaring.declare(link, making.SHARDS, create=False, ledgers=1)


async def test_permissions_for_one_ledger_do_not_reach_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: who changes the number and not the permissions is told, and reads nothing."""
    guarded = await making.start(tmp_path / "nats", ledgers=LEDGERS)
    monkeypatch.setenv("FENCEPOST_NATS_URL", guarded.server.url)
    monkeypatch.setenv("FENCEPOST_NATS_CREDENTIALS", str(guarded.credentials["client"]))

    async def doctor() -> str:
        *_, last = await asyncio.to_thread(lambda: list(doctor_nats.checks()))
        return f"{last.status}: {last.found}"

    try:
        assert await doctor() == "ok: lets client in; 2 shards in 2 ledgers"
        monkeypatch.setenv("FENCEPOST_LEDGERS", "1")
        said = "FENCEPOST_LEDGERS is 1, and the deployment was made with 2"
        assert await doctor() == f"failed: {said}"
        monkeypatch.delenv("FENCEPOST_LEDGERS")
        making.write(guarded.folder, ledgers=1)
        await guarded.reload()
        async with guarded.links("planner") as link:
            with pytest.raises(UnknownError, match="FP_LEDGER_0"):
                await declaring.declare(link, making.SHARDS, create=False, ledgers=LEDGERS)
        async with guarded.links("tracker") as link:
            with pytest.raises(declaring.StreamMissingError, match="FENCEPOST_LEDGERS=2, may not"):
                await declaring.check_ledgers(link, making.SHARDS, ledgers=LEDGERS)
        assert (await doctor()).startswith("failed: FP_LEDGER_0 may not be looked at")
    finally:
        await guarded.server.stop()
