"""What the bench appends in owners' names is a history as owners would have left it."""

import pytest
from fencepost.client import verify

from bench import cancel
from tests.acceptance.conftest import RunningStack, StartStack


@pytest.mark.slow
async def test_dags_that_were_appended_for_a_measurement_verify(start_stack: StartStack) -> None:
    stack: RunningStack = await start_stack(trackers=1)
    async with await stack.client() as client:
        count = await cancel.fill(stack, client, 3)
        report = await verify.verify(client)
        assert (report.is_clean, report.dags) == (True, 4), report.violations
        assert count > 3
