"""Nothing in the tree names a machine, a folder beside the project, or a host that packages come from."""

import re

import pytest

from tests.tidy import tree

# Written so that this file does not match itself.
FORBIDDEN = {
    "a folder beside the project": r"(?<![\w-])(?:\.\./)?share[d]/",
    "a path of one machine": r"(?<![\w.}])/(?:work|root|home/\w+|opt/pypi[\w-]*|opt/wheels|Users/\w+)/",
    "a scratch path": r"(?<![\w.}])/tmp/[v]\b",
    "a package host": r"\b(?:pypi\.org|pythonhosted\.org|test\.pypi|npmjs\.(?:org|com)|crates\.io/api)",
    "an image host": r"\b(?:ghcr\.io|quay\.io|gcr\.io|docker\.io/|registry-1\.)",
    "an index setting": r"(?:--(?:extra-)?index[-]url|--find[-]links[= ]+[a-z]+(?=:)|--trusted[-]host)\b",
    "a download address": r"https?://[^\s\"'<>)]+\.(?:whl|tar\.gz|tgz|zip|deb)\b",
}
PIN = re.compile(
    r"[A-Za-z0-9._-]+==[^\s;]+( ; [^\\]+?)?( \\)?|    --hash=sha256:[0-9a-f]{64}( \\)?"
)


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    offences = [
        f"{path}:{number} {line.strip()[:120]}"
        for path in tree.paths()
        for number, line in enumerate(tree.text(path).splitlines(), 1)
        if pattern.search(line)
    ]
    assert not offences, f"{what}:\n" + "\n".join(offences)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a folder beside the project", "see ../sha" + "red/DESIGN.md"),
        ("a path of one machine", "cd /wo" + "rk/main"),
        ("a scratch path", "/tm" + "p/v/bin/python"),
        ("a package host", "https://py" + "pi.org/simple"),
        ("an image host", "image: gh" + "cr.io/x/y"),
        ("an index setting", "--index" + "-url https://example.invalid"),
        ("an index setting", "--find" + "-links=https://example.invalid/wheels"),
        ("a download address", "https://example.invalid/a.wh" + "l"),
    ],
)
def test_the_pattern_sees(what: str, line: str) -> None:
    assert re.search(FORBIDDEN[what], line)


def test_the_lock_holds_pins_and_hashes_only() -> None:
    lines = tree.text("requirements.lock").splitlines()
    assert not [line for line in lines if not PIN.fullmatch(line)]
    pins = [number for number, line in enumerate(lines) if "==" in line]
    assert pins
    assert not [lines[number] for number in pins if "--hash=" not in lines[number + 1]]
