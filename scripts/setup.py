"""
Makes the virtual environment that everything else runs in.

`VENV` names its folder (default `.venv`). Nothing is done when the environment already carries this
lock, these members, this Python and this place; the proof is a stamp written last, so a set-up that
was interrupted is done again. Standard library only: it runs before anything is installed.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
OUTPUT_LINES_SHOWN = 40
# Everything else comes built. This one is published as source alone, and is Python alone.
FROM_SOURCE = "nkeys"


def members() -> list[Path]:
    """Tells the workspace's members, in the order in which they are installed."""
    return sorted(path.parent for path in ROOT.glob("*/*/pyproject.toml"))


def fingerprint() -> str:
    """Tells a digest of all that the environment is made from."""
    digest = hashlib.sha256(f"{ROOT}\n{sys.version}\n".encode())
    for path in (LOCK, Path(__file__), *(member / "pyproject.toml" for member in members())):
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(stage: str, argv: list[str], *, env: dict[str, str]) -> None:
    """Runs one stage under one printed line; on failure shows the end of its output and exits."""
    print(f"setup: {stage}", flush=True)
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=env,
        check=False,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        print("\n".join(done.stdout.splitlines()[-OUTPUT_LINES_SHOWN:]), file=sys.stderr)
        sys.exit(f"setup: failed at: {stage}")


def is_usable(home: Path) -> bool:
    """Tells whether the environment was made for this place and by this very Python, and runs."""
    python = home / "bin" / "python"
    try:
        # An environment that was moved runs, but its programs name the old place.
        if str(home) not in (home / "bin" / "activate").read_text():
            return False
        answer = subprocess.run(
            [python, "-c", "import sys, pip; print(sys.version)"],
            check=False,
            capture_output=True,
            text=True,
        )
    except OSError:
        return False
    return answer.returncode == 0 and answer.stdout.strip() == sys.version.strip()


def install(home: Path) -> None:
    """Fills the environment: first the locked packages, then the members, editable."""
    python = home / "bin" / "python"
    if not is_usable(home):
        print(f"setup: environment {home.name} with Python {sys.version.split()[0]}", flush=True)
        venv.create(home, clear=home.exists(), with_pip=True, symlinks=True)
    # The build backend is a program beside the environment's Python, found through PATH.
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    env = {**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    env.pop("PYTHONPATH", None)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    count = sum("==" in line for line in LOCK.read_text().splitlines())
    run(
        f"{count} pinned packages from {LOCK.name}",
        [
            *(*pip, "--require-hashes", "--only-binary=:all:", f"--no-binary={FROM_SOURCE}"),
            *("-r", str(LOCK)),
        ],
        env=env,
    )
    editable = [part for member in members() for part in ("-e", str(member))]
    run(
        f"{len(members())} workspace members",
        [*pip, "--no-deps", "--no-build-isolation", *editable],
        env=env,
    )


def main() -> None:
    home = ROOT / os.environ.get("VENV", ".venv")
    stamp = home / ".set-up"
    wanted = fingerprint()
    if stamp.exists() and stamp.read_text() == wanted and is_usable(home):
        return
    # Two makes at once would install over each other: the second waits, and then finds the stamp.
    with Path(__file__).open() as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        started = time.monotonic()
        stamp.unlink(missing_ok=True)
        install(home)
        stamp.write_text(wanted)
        print(f"setup: ready in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
