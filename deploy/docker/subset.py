"""
Cuts a lock down to the packages named in a file (`-`: standard input), hashes included.

    python subset.py requirements.lock packages.txt

Runs inside the image's build, before anything is installed. Names that the lock lacks are an error.
"""

import re
import sys
from pathlib import Path


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def subset(lock: str, names: set[str]) -> str:
    """The lock's entries of these names. Raises `SystemExit` naming those that are not in it."""
    kept: list[str] = []
    found: set[str] = set()
    is_wanted = False
    for line in lock.splitlines():
        if line[:1].isalnum():
            name = canonical(re.split(r"[=\[ ;]", line, maxsplit=1)[0])
            is_wanted = name in names
            if is_wanted:
                found.add(name)
        if is_wanted:
            kept.append(line)
    if missing := sorted(names - found):
        raise SystemExit(f"not in the lock: {', '.join(missing)}")
    return "\n".join(kept) + "\n"


def names_in(text: str) -> set[str]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {canonical(line) for line in lines if line}


def main() -> None:
    lock, packages = sys.argv[1:]
    named = sys.stdin.read() if packages == "-" else Path(packages).read_text()
    sys.stdout.write(subset(Path(lock).read_text(), names_in(named)))


if __name__ == "__main__":
    main()
