"""
A git history as steps, in peace and with its sandbox taken away once in twenty steps.

The rate counts the steps that the history needs; what reclaims cost (a new sandbox, a checkpoint
restored, steps replayed) makes it lower. Both must end as git's own tree.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fencepost.client.client import Client
from fencepost.client.gitimport import running
from fencepost.client.stack import Stack

from tests import git_histories

COMMITS, COMMITS_QUICK = 300, 60
RECLAIM_MEAN: Final = 20.0
_SEED: Final = 7


async def compare(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Imports the same history twice, each time on a stack of its own."""
    commits = COMMITS_QUICK if quick else COMMITS
    folder = Path(tempfile.mkdtemp(prefix="fencepost-bench-"))
    folder.chmod(0o755)
    try:
        repository = await asyncio.to_thread(
            git_histories.make, folder / "repository.git", commits=commits, seed=_SEED
        )
        found: dict[str, Any] = {"commits": commits}
        for name, mean in (("in_peace", 0.0), ("reclaimed", RECLAIM_MEAN)):
            report = await _import(folder / name, repository, commits, mean)
            if not report.is_good:
                raise RuntimeError(f"the import {name} went wrong: {report}")
            say(f"import {name}: {report.steps_per_s:g} steps/s, {report.reclaims} reclaims")
            found[name] = {
                "steps_s": report.steps_per_s,
                "steps": report.steps,
                "seconds": report.seconds,
                "reclaims": report.reclaims,
                "replayed": report.replayed,
            }
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _import(folder: Path, repository: Path, commits: int, mean: float) -> running.Report:
    stack = await Stack.start(folder / "stack", others=False, postgres=False)
    try:
        async with await Client.connect(stack.nats.url, wait_s=10) as client:
            return await running.run(
                client,
                running.History(repository=repository, limit=commits),
                running.Trouble(reclaim_mean=mean),
                workspaces=stack.sandbox_root,
                scratch=folder / "scratch",
            )
    finally:
        await stack.stop()


def table(found: dict[str, Any]) -> str:
    """The same for people."""
    peace, reclaimed = found["in_peace"], found["reclaimed"]
    return (
        f"a git history of {found['commits']} commits as steps, one after the other:"
        f" {peace['steps_s']:g}/s in peace; {reclaimed['steps_s']:g}/s with"
        f" {reclaimed['reclaims']} reclaims and {reclaimed['replayed']} steps replayed"
    )
