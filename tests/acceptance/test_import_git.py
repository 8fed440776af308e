"""
Any git history is real input: run as steps under reclaims, duplicates and a planner's crash, it
ends as git's own tree on a disk that holds nothing but what recovery brought back.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fencepost.client.gitimport import running

from tests import git_histories
from tests.acceptance.conftest import StartStack
from tests.acceptance.test_command import fencepost


@pytest.mark.budget(90)
@pytest.mark.timeout(600)  # half a minute on a machine that does nothing else
async def test_three_hundred_commits_end_as_gits_tree_whatever_happens(
    start_stack: StartStack, tmp_path: Path
) -> None:
    repository = await asyncio.to_thread(
        git_histories.make, tmp_path / "repository.git", commits=300, seed=11
    )
    stack = await start_stack()
    planner = stack.services["planner-1"]

    async def crash() -> None:
        planner.kill()
        await asyncio.sleep(0.2)
        planner.start()

    async with await stack.client() as client:
        report = await running.run(
            client,
            running.History(repository=repository, limit=300),
            running.Trouble(reclaim_mean=20, duplicates=0.1, crash_planner=crash, seed=5),
            workspaces=stack.sandbox_root,
            scratch=tmp_path / "scratch",
        )
    assert report.tree_found == report.tree_expected
    assert report.verify == "clean"
    assert (report.commits, report.planner_crashes) == (300, 1)
    assert report.steps > 300
    assert report.reclaims >= 10
    assert report.epoch > report.reclaims
    assert report.restored >= 10
    assert report.replayed >= 10
    assert report.duplicates >= 20
    assert report.submodules


async def test_the_command_says_what_it_found(tmp_path: Path) -> None:
    repository = git_histories.make(tmp_path / "repository.git", commits=12, seed=2)
    words = ("--limit", "8", "--reclaim-mean", "6", "--checkpoint-every", "4")
    code, output, errors = await fencepost(
        "import-git", str(repository), *words, "--json", cwd=tmp_path
    )
    assert code == 0, errors
    (line,) = output.splitlines()
    report = json.loads(line)
    assert report["tree_found"] == report["tree_expected"] != ""
    assert (report["commits"], report["verify"]) == (8, "clean")
    assert report["reclaims"] >= 1
    assert report["steps"] >= 8
    assert isinstance(report["replayed"], int)
