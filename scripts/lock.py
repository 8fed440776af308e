"""
Resolves every member and every group at once and writes `requirements.lock`.

The lock pins, carries hashes and names no address. The resolution happens in a temporary copy of
the manifests, because uv's own lock file spells out download hosts and must not stay in the tree.
The present pins are kept where they still satisfy the manifests; `--upgrade` resolves afresh. uv
itself is installed into the temporary folder.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
EXPORT = (
    "export --frozen --all-packages --all-groups --no-emit-workspace --no-header --no-annotate "
    "--format requirements-txt --quiet"
)


def copy_manifests(target: Path) -> None:
    """Copies what a resolution reads: every manifest, and an empty package beside each."""
    for manifest in (ROOT / "pyproject.toml", *ROOT.glob("*/*/pyproject.toml")):
        place = target / manifest.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(manifest, place)


def keep_present_pins(manifest: Path) -> None:
    """Hands the present pins to the resolution, as constraints of the temporary root."""
    pins = [
        line.removesuffix("\\").strip().replace('"', "'")
        for line in LOCK.read_text().splitlines()
        if line[:1].isalnum() and "==" in line
    ]
    listed = "".join(f'  "{pin}",\n' for pin in pins)
    text = manifest.read_text()
    assert text.count("[tool.uv]\n") == 1, "the root manifest has one [tool.uv] table"
    constraints = f"[tool.uv]\nconstraint-dependencies = [\n{listed}]\n"
    manifest.write_text(text.replace("[tool.uv]\n", constraints))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--upgrade", action="store_true", help="resolve afresh")
    upgrade = options.parse_args().upgrade
    with tempfile.TemporaryDirectory(prefix="fencepost-lock-") as folder:
        tools, copy = Path(folder, "uv"), Path(folder, "workspace")
        copy_manifests(copy)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools)]
        subprocess.run([*pip, "uv"], check=True)
        uv = str(tools / "bin" / "uv")
        env = {
            **os.environ,
            "UV_PROJECT_ENVIRONMENT": str(copy / ".venv"),
            "UV_PYTHON": sys.executable,
        }
        if LOCK.exists() and not upgrade:
            keep_present_pins(copy / "pyproject.toml")
        subprocess.run([uv, "lock", "--quiet"], cwd=copy, env=env, check=True)
        exported = subprocess.run(
            [uv, *EXPORT.split()], cwd=copy, env=env, check=True, capture_output=True, text=True
        ).stdout
    lines = [line for line in exported.splitlines() if not line.startswith(("--", "#"))]
    assert lines, "uv exported nothing"
    LOCK.write_text("\n".join(lines) + "\n")
    print(f"{LOCK.name}: {sum('==' in line for line in lines)} packages")


if __name__ == "__main__":
    main()
