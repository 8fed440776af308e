"""
What holds for every test: sockets by level, and where a test may run.

Levels are folders: `unit`, `properties`, `simulation` and `tidy` may open no socket but a unix one
(asyncio's own); `integration` and `acceptance` start real servers on loopback. The latter two share
one machine's disk and processors, so each of these levels runs on one xdist worker, one test after
the other: with two workers that is one stack beside one server, which two cores can carry.
(pytest-xdist 3.8 keeps no groups under pytest 9.2, which names tests another way: until it does,
both workers take from all levels, and the one that is first has the Docker engine.)

What takes longest carries `budget(seconds)`: it runs last, and where FENCEPOST_TEST_UNTIL (seconds
since 1970) leaves its file less than that, it is skipped and says so. A slow build machine then
loses those tests, never the verdict on all others.
"""

import os
import time
from pathlib import Path

import pytest
import pytest_socket

TESTS = Path(__file__).parent
SOCKETLESS = frozenset({"unit", "properties", "simulation", "tidy"})
ONE_AT_A_TIME = frozenset({"integration", "acceptance", "cluster"})
UNTIL = "FENCEPOST_TEST_UNTIL"
STARTED: set[Path] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="the cluster's faults again and again")


def _level(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def _needs_engine(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("docker")) or "engine" in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _level(item) in ONE_AT_A_TIME:
            # One worker has the Docker engine, and keeps it: what needs it goes where the servers
            # run that need it as well, and is the last there.
            is_last = item.get_closest_marker("budget") and not _needs_engine(item)
            group = _level(item) + ("-last" if is_last else "")
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("budget") is not None)


def _spare(item: pytest.Item) -> None:
    """Skips what would not end in time; a file that has begun goes on."""
    budget = item.get_closest_marker("budget")
    until = os.environ.get(UNTIL)
    if budget is None or not until or item.path in STARTED:
        return
    left_s = int(float(until) - time.time())
    if left_s < budget.args[0]:
        pytest.skip(f"wants {budget.args[0]} s of this run's time, and {left_s} are left")
    STARTED.add(item.path)


# Last, because pytest-socket's own hook decides by command line options and would lift this.
@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _spare(item)
    if _level(item) in SOCKETLESS:
        pytest_socket.disable_socket(allow_unix_socket=True)
