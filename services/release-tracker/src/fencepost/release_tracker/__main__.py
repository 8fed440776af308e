"""
`python -m fencepost.release_tracker`: runs the tracker.

`… migrate [pre|post]` brings the database up to date and ends; `… rebuild` wipes the projection,
makes it again and ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from fencepost.core.errors import FencepostError
from fencepost.release_tracker import app, migrations
from fencepost.release_tracker.settings import TrackerSettings, load, require_postgres
from fencepost.runtime import service

USAGE = "usage: python -m fencepost.release_tracker [migrate [pre|post] | rebuild]\n"


def main(argv: Sequence[str]) -> None:
    match argv:
        case []:
            service.main(app.build)
        case ["migrate"]:
            _migrate("pre", "post")
        case ["migrate", "pre" | "post" as phase]:
            _migrate(phase)
        case ["rebuild"]:
            _rebuild()
        case ["-h" | "--help"]:
            sys.stdout.write(USAGE)
        case _:
            sys.stderr.write(USAGE)
            raise SystemExit(2)


def _settings() -> TrackerSettings:
    settings = load()
    require_postgres(settings)
    service.configure_logging(settings, "release-tracker")
    return settings


def _migrate(*phases: migrations.Phase) -> None:
    try:
        applied = asyncio.run(app.migrate(_settings(), phases))
    except FencepostError as error:
        service.end("", error)
    sys.stdout.write("".join(f"applied {name}\n" for name in applied) or "nothing to apply\n")


def _rebuild() -> None:
    try:
        positions = asyncio.run(app.rebuild(_settings()))
    except FencepostError as error:
        service.end("", error)
    told = ", ".join(f"{shard}: {seq}" for shard, seq in sorted(positions.items()))
    sys.stdout.write(f"projected up to {told or 'nothing: the ledger is empty'}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
