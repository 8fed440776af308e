"""What comes from strangers is made storable, and every row has its columns."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import pytest
from fencepost.core.sandbox.entries import SandboxEntry
from fencepost.release_tracker import migrations, projecting, rows


def test_every_kind_of_entry_is_projected() -> None:
    assert set(get_args(SandboxEntry)) == set(projecting._BY_KIND)


def test_text_loses_only_what_cannot_be_stored() -> None:
    assert rows.text("a\0b") == "a\ufffdb"
    assert rows.text("a\ud800b").encode() == b"a?b"
    for plain in ("", "plain", "größe \U0001f600", "\n\t\x7f"):
        assert rows.text(plain) == plain


def test_a_name_is_cut_only_where_it_is_no_id() -> None:
    assert rows.name("x" * 64) == "x" * 64
    assert len(rows.name("x" * 5000)) == rows.NAME_CHARS_MAX
    # Four bytes each: two of them still fit a page of an index.
    assert 2 * len(rows.name("\U0001f600" * 5000).encode()) < 2704


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (7, 7),
        ((1 << 63) - 1, (1 << 63) - 1),
        (1 << 63, (1 << 63) - 1),
        (-(1 << 63), -(1 << 63)),
        (-(10**40), -(1 << 63)),
    ],
)
def test_a_number_is_kept_where_it_fits(given: int, kept: int) -> None:
    assert rows.number(given) == kept


@pytest.mark.parametrize("kind", rows.ROWS)
def test_a_row_has_the_columns_of_its_table(kind: type[rows.Row]) -> None:
    scripts = migrations.read(migrations.default_folder())
    pre = scripts[0].sql
    table = re.search(rf"CREATE TABLE {kind.TABLE} \((.*?)\n\);", pre, re.DOTALL)
    assert table is not None
    columns = [
        line.split()[0]
        for line in table[1].strip().splitlines()
        if not line.strip().startswith("PRIMARY KEY")
    ]
    for later in scripts[1:]:
        for altered in re.findall(rf"ALTER TABLE {kind.TABLE}\n(.*?);", later.sql, re.DOTALL):
            columns += re.findall(r"ADD COLUMN (\w+)", altered)
    assert sorted(columns) == sorted(field.name for field in msgspec.structs.fields(kind))
