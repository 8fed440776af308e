"""
What every command asks of what it was given, before it does anything.

A value's kind decides, not its option: a number is finite, an integer is not negative and fits in
64 bits, a time to wait for is more than none, a text is UTF-8, a folder is named. What an option
demands besides (a range, one of some words) stands at the option.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import typer
from fencepost.client import checks
from fencepost.core.errors import RefusedError
from fencepost.runtime import address
from typer.core import TyperCommand

SECONDS: Final = frozenset({"timeout", "bound"})
"""Options that are a time to wait for."""

ADDRESSES: Final = frozenset({"url", "to"})
"""Options that are a server's address."""

_GIVEN: Final = "fencepost.given"

CHARACTERS_MAX: Final = 128 * 1024
"""More than the system hands over in one argument; this is for those who call from Python."""

UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[2]
"""All that typer has to say of a wrong command line; its own name for it is private."""


class Checked(TyperCommand):
    """A command whose values are looked at before it runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_GIVEN] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        gives_nothing = any(not word or word.endswith("=") for word in ctx.meta[_GIVEN])
        for parameter in self.params:
            field, value = name_of(parameter), ctx.params.get(parameter.name)
            if gives_nothing and value == Path():  # which is what "" was made into
                checks.refused(field, "a file or folder", "")
            for one in value if isinstance(value, list | tuple) else (value,):
                check(field, str(parameter.name), one)
        for word in ctx.args:
            checks.text("argument", word, bytes_max=CHARACTERS_MAX)
        return super().invoke(ctx)


class App(typer.Typer):
    """A group of commands, each `Checked`."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        options.setdefault("cls", Checked)
        return super().command(name, **options)


def name_of(parameter: Any) -> str:
    """What a person calls it: `--timeout`, or `SANDBOX`."""
    if parameter.param_type_name == "option":
        return str(parameter.opts[0])
    return str(parameter.metavar or parameter.name).upper()


def check(field: str, name: str, value: object) -> None:
    """Raises `RefusedError` for a value that no option of its kind takes."""
    match value:
        case bool() | None:
            pass
        case int():
            checks.whole(field, value, 0)
        case float() if name in SECONDS:
            checks.seconds(field, value)
        case float():
            checks.number(field, value)
        case Path():
            checks.text(field, str(value), bytes_max=CHARACTERS_MAX)
        case str() if name in ADDRESSES and (value or name == "url"):
            address.require(field, value)
        case str():
            checks.text(field, value, bytes_max=CHARACTERS_MAX)
        case _:
            pass


def require_utf8(words: Sequence[str]) -> None:
    """Raises `RefusedError` naming the first word of a command line that is not UTF-8."""
    for place, word in enumerate(words):
        try:
            word.encode()
        except UnicodeEncodeError:
            option, is_pair, _ = word.partition("=")
            before = words[place - 1] if place else ""
            if word.startswith("-") and is_pair:
                field = ascii(option).strip("'")
            else:
                field = before if before.startswith("-") else f"argument {place + 1}"
            raise RefusedError(
                "bad_arguments",
                f"{field}: expected UTF-8, got {word!a}",
                field=field,
                expected="UTF-8",
            ) from None
