"""What the documents tell a person to type exists, and their links lead somewhere."""

import re
from typing import Any

import pytest

from tests.tidy import tree

DOCUMENTS = [path for path in tree.paths() if path.endswith(".md")]
CODE = re.compile(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
COMMAND = re.compile(
    r"(?:^|[\s;&|(])(?:\.venv/bin/)?fencepost((?: +[^\s;&|#)\"']+)+)", re.MULTILINE
)
TARGET = re.compile(r"(?:^|[\s;&|(])make ([a-z][a-z-]*)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)")


def _code(path: str) -> list[str]:
    return [block or inline for block, inline in CODE.findall(tree.text(path))]


def _typed(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    return sorted(
        {
            (path, found.strip())
            for path in DOCUMENTS
            for code in _code(path)
            for found in pattern.findall(code)
        }
    )


def _command_line() -> Any:
    """Builds the `fencepost` command as its users get it; fails while there is none."""
    import typer.main
    from fencepost.client import cli

    return typer.main.get_command(cli.app)


def _fault(words: list[str]) -> str | None:
    """Follows the words of one command line down the command's groups and options."""
    command = _command_line()
    while getattr(command, "commands", None) and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            if not re.fullmatch(r"[a-z][a-z-]*", words[0]):
                return None  # a placeholder: `fencepost <command>`
            return f"no command {words[0]!r} under {command.name!r}"
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in parameter.opts}
    options |= {name for parameter in command.params for name in parameter.secondary_opts} | {
        "--help"
    }
    if command.name == "sim":  # passed on
        from fencepost.simulator.__main__ import command_line

        options |= set(command_line()._option_string_actions)
    for word in words:
        if word == "--":
            return None
        if word.startswith("--") and word.partition("=")[0].rstrip(",.]") not in options:
            return f"{command.name!r} has no option {word}"
    return None


def test_the_readme_names_commands() -> None:
    assert [found for path, found in _typed(COMMAND) if path == "README.md"]


def test_every_command_in_the_documents_exists() -> None:
    faults = [
        f"{path}: fencepost {words}: {fault}"
        for path, words in _typed(COMMAND)
        if (fault := _fault(words.split()))
    ]
    assert not faults, "\n".join(faults)


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", tree.text("Makefile"), re.MULTILINE))
    faults = [f"{path}: make {name}" for path, name in _typed(TARGET) if name not in targets]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("path", DOCUMENTS)
def test_every_link_leads_to_a_file(path: str) -> None:
    here = (tree.ROOT / path).parent
    prose = CODE.sub("", tree.text(path))
    broken = [target for target in LINK.findall(prose) if not (here / target).exists()]
    assert not broken, f"{path}: {broken}"


def test_every_metric_stands_in_the_operators_page_and_no_other() -> None:
    """`_counter`, `_gauge` and `_histogram` with a name, as `runtime.metrics` calls them."""
    source = tree.text("libs/runtime/src/fencepost/runtime/metrics.py")
    made = re.findall(r"self\._(?:counter|gauge|histogram)\(\s*\"([a-z_]+)\"", source)
    assert len(made) > 40
    page = tree.text("docs/operating.md")
    section = page.partition("## Every metric")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([a-z_]+)(?:\{[a-z,]*\})?` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(made)
    for name in set(re.findall(r"fencepost_([a-z_]+)", page)):
        assert name in made, name
