"""
Fetches the wheels that the image needs into `deploy/docker/wheels`, for a build without an index.

    python deploy/docker/wheels.py [packages-s3.txt]

For the Python that runs this, which must be of the image's version; nothing when they are there.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WHEELS = HERE / "wheels"

sys.path.insert(0, str(HERE))
from subset import names_in, subset  # noqa: E402 - beside this file


def main() -> None:
    names = {"uv-build"}
    for listed in ("packages.txt", *sys.argv[1:]):
        names |= names_in((HERE / listed).read_text())
    needed = subset((ROOT / "requirements.lock").read_text(), names)
    stamp = WHEELS / ".gitignore.stamp"
    wanted = hashlib.sha256(f"{sys.version}\n{needed}".encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as cut:
        cut.write(needed)
        cut.flush()
        pip = [sys.executable, "-m", "pip", "download", "-qqq", "--no-deps", "--require-hashes"]
        pip += ["--only-binary=:all:", "--dest", str(WHEELS), "-r", cut.name]
        subprocess.run(pip, check=True)
    stamp.write_text(wanted)
    print(f"wheels: {len(list(WHEELS.glob('*.whl')))} for Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
