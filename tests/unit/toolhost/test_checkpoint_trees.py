"""Any tree: checkpoint, restore, and it is the same tree; changed, it is another checkpoint."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.toolhost.driver import Disk, Toolhost
from tests.unit.toolhost.keeping import Keeper, Store, told_tree

NAMES = st.one_of(
    st.sampled_from([b"a", b"b", b"c", b"d e", b"-x", b"\xc3\xa9"]),
    st.binary(min_size=1, max_size=12).filter(
        lambda name: not set(name) & {0, 47} and name not in (b".", b"..")
    ),
)
CONTENTS = st.one_of(
    st.just(b""),
    st.binary(max_size=60),
    st.tuples(st.binary(min_size=1, max_size=3), st.integers(1, 300_000)).map(
        lambda pair: pair[0] * (pair[1] // len(pair[0]))
    ),
)
FILES = st.tuples(st.just("file"), CONTENTS, st.integers(0, 0o777))
LINKS = st.tuples(
    st.just("link"), st.binary(min_size=1, max_size=40).filter(lambda raw: 0 not in raw), st.just(0)
)
TREES = st.recursive(
    st.dictionaries(NAMES, st.one_of(FILES, LINKS), max_size=5),
    lambda below: st.dictionaries(
        NAMES,
        st.one_of(FILES, LINKS, st.tuples(st.just("dir"), below, st.integers(0, 0o777))),
        max_size=5,
    ),
    max_leaves=25,
)


def make(root: bytes, tree: dict[bytes, tuple[str, object, int]]) -> None:
    for name, (kind, what, mode) in tree.items():
        path = os.path.join(root, name)
        if kind == "link":
            os.symlink(what, path)  # type: ignore[call-overload]
            continue
        if kind == "dir":
            os.mkdir(path)
            make(path, what)  # type: ignore[arg-type]
        else:
            with open(path, "wb") as file:
                file.write(what)  # type: ignore[arg-type]
        os.chmod(path, mode)


def freed(root: Path) -> None:
    """Removes a tree, whatever its modes are."""
    for here, dirs, _ in os.walk(os.fsencode(root)):
        for name in dirs:
            path = os.path.join(here, name)
            if not stat.S_ISLNK(os.lstat(path).st_mode):
                os.chmod(path, 0o700)
    shutil.rmtree(root)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(tree=TREES, second=TREES)
def test_any_tree_is_restored_as_it_was(tree, second):
    root = Path(tempfile.mkdtemp(prefix="fp-tree-"))
    store: Store = {}
    try:
        one = Disk(root / "one")
        with Toolhost(one) as host:
            host.mark()
            keeper = Keeper(host, store)
            base = ""
            for number, content in enumerate((tree, second)):
                for path in one.workspace.iterdir():
                    os.rename(path, root / f"old{number}-{len(os.listdir(root))}")
                make(os.fsencode(one.workspace), content)
                told = keeper.checkpoint(base=base)
                assert told["k"] == "checkpointed", told
                base = told["manifest"]
                other = Disk(root / f"other{number}")
                with Toolhost(other) as second_host:
                    second_host.mark()
                    again = Keeper(second_host, store)
                    assert again.restore(base)["k"] == "restored"
                    assert told_tree(other.workspace) == told_tree(one.workspace)
                    assert again.checkpoint()["manifest"] == base
    finally:
        freed(root)
