"""
The house style, as far as a machine can see it.

The lists of exceptions are ratchets: an entry stands with its present size, and may only shrink.
"""

import ast
import re
import tomllib

import pytest

from tests.tidy import tree

FUNCTION_LINES_MAX = 70

# (file, function) -> lines it may have. Split it, then lower or drop its line here.
LONG_FUNCTIONS: dict[tuple[str, str], int] = {}

# What is banned, where it is allowed all the same, and what to use instead.
BANNED: dict[str, tuple[tuple[str, ...], str]] = {
    "datetime.datetime.now": (("libs/client/",), "now_ms as a parameter, or runtime.clock"),
    "datetime.datetime.utcnow": (("libs/client/",), "now_ms as a parameter, or runtime.clock"),
    "datetime.datetime.today": (("libs/client/",), "now_ms as a parameter, or runtime.clock"),
    "datetime.date.today": (("libs/client/",), "now_ms as a parameter, or runtime.clock"),
    "time.time": (
        ("libs/runtime/src/fencepost/runtime/clock.py", "libs/toolhost/", "libs/client/", "bench/"),
        "runtime.clock, or time.monotonic for a span",
    ),
    "time.time_ns": (
        ("libs/runtime/src/fencepost/runtime/clock.py", "libs/toolhost/", "libs/client/", "bench/"),
        "runtime.clock, or time.monotonic_ns for a span",
    ),
    "print": (("libs/client/", "bench/", "scripts/"), "the structured log"),
    "os.system": ((), "an argv list"),
    "pickle.loads": ((), "msgspec"),
    "eval": ((), "a parser"),
    "exec": ((), "an import"),
    "asyncio.wait_for": ((), "asyncio.timeout: before Python 3.12 wait_for may swallow a cancel"),
}
BANNED_IN: dict[str, dict[str, str]] = {
    "libs/core/": {
        "asyncio.sleep": "an entry with a time that a tick finds due",
        "time.sleep": "an entry with a time that a tick finds due",
        "time.monotonic": "now_ms as a parameter",
        "hash": "a digest: hash() of a str differs between processes",
        "id": "an id that came with the input",
        "open": "an effect",
    },
    "libs/simulator/": {
        "asyncio.sleep": "the virtual clock",
        "time.sleep": "the virtual clock",
        "hash": "a digest: hash() of a str differs between processes",
    },
    "libs/runtime/": {"time.sleep": "asyncio.sleep: this would stop the loop"},
    "services/": {"time.sleep": "asyncio.sleep: this would stop the loop"},
}
# Module-level randomness has no seed: `random.Random(seed)` is what the simulator draws from.
UNSEEDED = re.compile(r"^random\.(?!Random$)[a-zA-Z]\w*$")
SEEDED_ONLY = ("libs/core/", "libs/contracts/", "libs/simulator/")

# Files that may contain a failure of any kind: each says beside the line what then happens.
BLIND_EXCEPTS: frozenset[str] = frozenset(
    {
        # A machine's error on one input is poison, in `evolve` the end of the ownership.
        "libs/runtime/src/fencepost/runtime/shard_runner.py",
        # A snapshot is a cache: whatever is wrong with it, the fold starts earlier.
        "libs/runtime/src/fencepost/runtime/fold.py",
        # A callback's error must not end the reading of the connection.
        "libs/runtime/src/fencepost/runtime/link.py",
        # One shard's trouble must not end the spreading of the others.
        "libs/runtime/src/fencepost/runtime/spreader.py",
        # A bug in one shard's projection must not end that of the others; truth is not touched.
        "services/release-tracker/src/fencepost/release_tracker/projector.py",
        # A notice proves nothing: one provider's bug must not end the others' looking.
        "services/sandbox-gateway/src/fencepost/sandbox_gateway/notices.py",
    }
)

# Modules that something other than an import starts or reads.
STARTED_BY_NAME: dict[str, str] = {
    "fencepost.toolhost.toolhost": "providers run its file inside sandboxes",
    "fencepost.providers.swerex.agent": "its file is written to SWE-ReX servers and run there",
}

WORDS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK"]) + r")\b")


def test_functions_are_at_most_70_lines_long() -> None:
    found = {
        (path, name): (length, line)
        for path in tree.python(*tree.PRODUCT, *tree.TOOLING)
        for name, line, length in tree.functions(path)
        if length > FUNCTION_LINES_MAX
    }
    too_long = [
        f"{path}:{line} {name} has {length} lines, may have "
        f"{LONG_FUNCTIONS.get((path, name), FUNCTION_LINES_MAX)}"
        for (path, name), (length, line) in found.items()
        if length > LONG_FUNCTIONS.get((path, name), FUNCTION_LINES_MAX)
    ]
    assert not too_long, "\n".join(too_long)
    gone = [f"{path} {name}" for path, name in LONG_FUNCTIONS if (path, name) not in found]
    assert not gone, f"no longer too long, drop from LONG_FUNCTIONS: {gone}"


def test_banned_names_are_not_used() -> None:
    offences = []
    for path in tree.python(*tree.PRODUCT, *tree.TOOLING):
        here = {
            name: instead
            for name, (allowed, instead) in BANNED.items()
            if not path.startswith(allowed)
        }
        for prefix, names in BANNED_IN.items():
            if path.startswith(prefix):
                here |= names
        for line, name in tree.dotted_references(path):
            if name in here:
                offences.append(f"{path}:{line} {name}: use {here[name]}")
            elif path.startswith(SEEDED_ONLY) and UNSEEDED.match(name):
                offences.append(f"{path}:{line} {name}: use random.Random(seed)")
    assert not offences, "\n".join(offences)


def _is_blind(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    blind = any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})
        for kind in kinds
    )
    # A handler that always raises again, or ends the process, hides nothing.
    last = handler.body[-1]
    return blind and not (isinstance(last, ast.Raise) and last.exc is None)


def test_blind_excepts_stand_only_in_the_listed_files() -> None:
    found: dict[str, list[int]] = {}
    for path in tree.python(*tree.PRODUCT, *tree.TOOLING):
        for node in ast.walk(tree.tree(path)):
            if isinstance(node, ast.ExceptHandler) and _is_blind(node):
                found.setdefault(path, []).append(node.lineno)
    unlisted = [
        f"{path}: lines {lines}" for path, lines in found.items() if path not in BLIND_EXCEPTS
    ]
    assert not unlisted, (
        "catch what you expect, or contain it where that is the job:\n" + "\n".join(unlisted)
    )
    assert set(found) == BLIND_EXCEPTS, f"drop from BLIND_EXCEPTS: {BLIND_EXCEPTS - set(found)}"


def test_every_module_is_imported_by_the_product() -> None:
    modules = {
        tree.module_name(path): path
        for path in tree.python(*tree.PRODUCT)
        if not path.endswith(("__init__.py", "__main__.py"))
    }
    used: set[str] = set()
    for path in tree.python(*tree.PRODUCT, *tree.TOOLING):
        used |= tree.imported(path) - {tree.module_name(path)}
    for path in tree.paths():
        if path.endswith("pyproject.toml"):
            scripts = tomllib.loads(tree.text(path)).get("project", {}).get("scripts", {})
            used |= {target.partition(":")[0] for target in scripts.values()}
    dead = sorted(set(modules) - used - set(STARTED_BY_NAME))
    assert not dead, f"imported by nothing but tests, if at all: {dead}"
    assert not (imported := sorted(set(STARTED_BY_NAME) & used)), f"drop: {imported}"


def test_no_file_keeps_a_note_of_unfinished_work() -> None:
    offences = [
        f"{path}:{number} {line.strip()[:100]}"
        for path in tree.paths()
        if not path.endswith((".lock", ".svg", ".json"))
        for number, line in enumerate(tree.text(path).splitlines(), 1)
        if WORDS.search(line)
    ]
    assert not offences, "finish it, or say in an issue that it is open:\n" + "\n".join(offences)


@pytest.mark.parametrize("path", tree.python(*tree.PRODUCT))
def test_a_module_says_what_it_decides(path: str) -> None:
    empty = not tree.tree(path).body
    assert empty or ast.get_docstring(tree.tree(path)), f"{path} has no docstring"
