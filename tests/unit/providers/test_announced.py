"""What a host's agent may write, and what may become of it."""

import os
from pathlib import Path

import pytest
from fencepost.providers import announced


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("120\n", 120_000),
        ("0.5", 500),
        ("", 0),
        ("soon", 0),
        ("-3", 0),
        ("nan", 0),
        ("inf", 86_400_000),
        ("1e400", 86_400_000),
    ],
)
def test_a_file_is_a_notice_whatever_it_says(tmp_path: Path, text: str, said: int) -> None:
    (tmp_path / "going").write_text(text)
    assert announced.grace_ms(tmp_path / "going") == said


def test_no_file_and_a_folder_are_none(tmp_path: Path) -> None:
    assert announced.grace_ms(tmp_path / "going") is None
    assert announced.grace_ms(tmp_path) is None


def test_a_pipe_that_nobody_writes_to_is_none_and_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "going")
    assert announced.grace_ms(tmp_path / "going") is None
