"""Every scenario row is carried by a test named after it, or explained as not applicable."""

import re

from tests.tidy import tree

ROW = re.compile(r"^S-(\d{3}) (\S+(?: \S+){2,7})$")
TEST = re.compile(r"^\s*(?:async )?def test_((?:s\d+_)+)", re.MULTILINE)
EXPLAINED = re.compile(r"^[-*] S-(\d+)\b\W+(.{20,})$", re.MULTILINE)

# Rows whose test is not written yet. It may only shrink; done is empty.
PENDING: frozenset[int] = frozenset()


def _rows() -> dict[int, str]:
    found: dict[int, str] = {}
    for line in tree.text("tests/scenarios/rows.txt").splitlines():
        matched = ROW.match(line)
        assert matched, f"a row is an id and 3 to 8 words: {line!r}"
        assert int(matched[1]) not in found, f"twice: {line}"
        found[int(matched[1])] = matched[2]
    return found


def _tested() -> set[int]:
    return {
        int(number)
        for path in tree.python("tests/")
        for names in TEST.findall(tree.text(path))
        for number in re.findall(r"\d+", names)
    }


def _explained() -> set[int]:
    path = "tests/scenarios/not_applicable.md"
    return {int(number) for number, _ in EXPLAINED.findall(tree.text(path))}


def test_every_row_has_a_test_or_an_explanation() -> None:
    rows = _rows()
    missing = set(rows) - _tested() - _explained()
    unforeseen = sorted(missing - PENDING)
    assert not unforeseen, "no test and no explanation:\n" + "\n".join(
        f"S-{number:03d} {rows[number]}" for number in unforeseen
    )
    done = sorted(PENDING - missing)
    assert not done, f"drop from PENDING, their tests exist: {done}"


def test_a_row_is_tested_or_explained_not_both() -> None:
    both = sorted(_tested() & _explained())
    assert not both, f"tested, so applicable: {both}"
