"""Migrations come in whole pairs, in order."""

from __future__ import annotations

from pathlib import Path

import pytest
from fencepost.release_tracker import migrations

PAIRS = ("0001_pre_one.sql", "0001_post_one.sql", "0002_pre_two.sql", "0002_post_two.sql")


def folder(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).write_text("SELECT 1;")
    return tmp_path


def test_pairs_are_read_pre_before_post_in_order(tmp_path: Path) -> None:
    found = migrations.read(folder(tmp_path, *reversed(PAIRS)))
    assert [one.name for one in found] == [name.removesuffix(".sql") for name in PAIRS]


@pytest.mark.parametrize(
    "names",
    [
        (),
        PAIRS[:1],
        PAIRS[:3],
        PAIRS[2:],
        (*PAIRS[:2], "0003_pre_x.sql", "0003_post_x.sql"),
        (*PAIRS[:2], "0001_pre_again.sql", "0001_post_again.sql"),
        (*PAIRS[:2], "readme.sql"),
    ],
)
def test_what_is_not_whole_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(migrations.MigrationError):
        migrations.read(folder(tmp_path, *names))


def test_the_projects_own_are_whole() -> None:
    found = migrations.read(migrations.default_folder())
    assert {one.phase for one in found} == {"pre", "post"}
