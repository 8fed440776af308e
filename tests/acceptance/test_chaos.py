"""A short run of `make chaos`: real faults on real processes, and what was told holds."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 20
SECONDS = 30


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.budget(120)
async def test_what_clients_were_told_outlives_every_fault() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scripts.chaos", "--json", "--boxes", "4"),
        *("--seed", str(SEED), "--seconds", str(SECONDS)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, complained = await process.communicate()
    lines = said.decode().splitlines()
    assert lines, complained.decode()[-4000:]
    report = json.loads(lines[-1])
    assert report["problems"] == []
    assert (process.returncode, report["is_clean"], report["seed"]) == (0, True, SEED)
    assert len(report["faults"]) >= 8, "hardly anything was injected"
    assert report["steps"]["committed"] >= 50
    assert report["on_disk"] > 0
    assert report["dags"], "no DAG came to a verdict"
