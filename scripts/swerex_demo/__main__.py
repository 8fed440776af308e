"""`make demo-swerex`: tells the story; `--json` prints one object, the last line of the output."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from scripts.swerex_demo import story


def main() -> int:
    options = argparse.ArgumentParser(prog="make demo-swerex", description=__doc__)
    options.add_argument("--json", action="store_true", help="one JSON object instead of the story")
    as_json = options.parse_args().json

    def say(text: str) -> None:
        if not as_json:
            print(text)

    with tempfile.TemporaryDirectory(prefix="fencepost-swerex-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        report = asyncio.run(story.play(folder, say))
    if as_json:
        print(json.dumps(report))
    succeeded = story.is_as_it_must_be(report)
    if not succeeded:
        print("this did not go as it must; please report it with the output above", file=sys.stderr)
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
