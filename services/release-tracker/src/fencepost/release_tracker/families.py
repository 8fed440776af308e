"""The two families of shards, as the projection takes them: machine, rows, and what makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fencepost.core.dag.machine import DagMachine
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.release_tracker import dag_rows, rows
from fencepost.release_tracker.projecting import Names, Working
from fencepost.release_tracker.projecting_dags import DagNames, DagWorking


class Family(NamedTuple):
    """`number` tells families apart in the keys of advisory locks."""

    name: str
    number: int
    machine: Any
    rows: tuple[type[Any], ...]
    names: Callable[[], Any]
    working: Callable[[], Any]


SANDBOX: Final = Family("sandbox", 0, SandboxMachine(), rows.ROWS, Names, Working)
DAG: Final = Family("dag", 1, DagMachine(), dag_rows.ROWS, DagNames, DagWorking)
FAMILIES: Final = (SANDBOX, DAG)
