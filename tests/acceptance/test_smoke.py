"""The shortest way through all of it: a step, a read, a reclaim, a step again, and the ledger."""

from __future__ import annotations

from fencepost.client import timeline

from tests.acceptance.conftest import RunningStack


async def test_a_step_commits_and_the_next_one_commits_on_the_next_disk(
    stack: RunningStack,
) -> None:
    async with await stack.client() as client:
        sandbox = await client.create_sandbox()

        first = await client.write_file(sandbox, "a.txt", "one\n")
        assert (first.state, first.outcome, first.epoch, first.attempts) == (
            "committed",
            "ok",
            1,
            1,
        )
        assert await client.read_file(sandbox, "a.txt") == "one\n"

        after = await client.reclaim(sandbox)
        assert after["epoch"] == 2

        second = await client.write_file(sandbox, "b.txt", "two\n")
        assert (second.state, second.epoch) == ("committed", 2)
        assert await client.read_file(sandbox, "b.txt", epoch_min=2) == "two\n"

        kinds = [line.kind async for line in timeline.lines(client, sandbox)]
        assert kinds.count("epoch_opened") == 2
        assert kinds.count("committed") == 2

        await client.release(sandbox)
        assert (await client.show(sandbox))["state"] == "gone"

    report = await stack.verify()
    assert report.violations == []
    assert report.committed == 2
