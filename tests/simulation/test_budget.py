"""A million events without a violation: fixed seeds, and fresh ones whose first seed is printed."""

import msgspec
import pytest
from fencepost.simulator import __main__ as command

FIXED, FRESH = 900_000, 100_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seeds", "events"), [(["--from", "1000"], FIXED), (["--fresh"], FRESH)], ids=["fixed", "fresh"]
)
def test_a_million_events_violate_nothing(
    seeds: list[str], events: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = command.main(["--events", str(events), "--jobs", "2", "--json", *seeds])
    said = capsys.readouterr().out
    summary = msgspec.json.decode(said.splitlines()[-1])
    # What was printed stands in the failure: the first seed, the shrunk trace, the commands.
    assert (ended, summary["violations"]) == (0, 0), said
    assert summary["events"] >= events
    if seeds == ["--fresh"]:
        assert said.startswith("seeds from ")
