"""
What holds for every test: sockets by level, and where a test may run.

Levels are folders: `unit`, `properties`, `simulation` and `tidy` may open no socket but a unix one
(asyncio's own); `integration` and `acceptance` start real servers on loopback. The latter two share
one machine's disk and processors, so each of these levels runs on one xdist worker, one test after
the other: with two workers that is one stack beside one server, which two cores can carry.
"""

from pathlib import Path

import pytest
import pytest_socket

TESTS = Path(__file__).parent
SOCKETLESS = frozenset({"unit", "properties", "simulation", "tidy"})
ONE_AT_A_TIME = frozenset({"integration", "acceptance", "cluster"})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="the cluster's faults again and again")


def _level(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _level(item) in ONE_AT_A_TIME:
            item.add_marker(pytest.mark.xdist_group(_level(item)))


# Last, because pytest-socket's own hook decides by command line options and would lift this.
@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _level(item) in SOCKETLESS:
        pytest_socket.disable_socket(allow_unix_socket=True)
