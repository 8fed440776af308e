"""An address where nothing listens ends a command with a word on it, and at once."""

from __future__ import annotations

import sys

import pytest
from fencepost.client import cli, doctor_nats


@pytest.mark.parametrize(
    ("port", "code", "word"),
    [
        ("1", cli.UNKNOWN, "no server at nats://127.0.0.1:1"),
        ("99999", cli.REFUSED, "expected host:port"),
        ("x", cli.REFUSED, "expected host:port"),
    ],
)
@pytest.mark.parametrize(
    "command", [["sandbox", "list", "--url"], ["reshard", "--shards", "2", "--to"]]
)
def test_an_address_without_a_server_is_said(
    command: list[str],
    port: str,
    code: int,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"nats://127.0.0.1:{port}"
    monkeypatch.setattr(sys, "argv", ["fencepost", *command, url])
    monkeypatch.setattr(cli, "_log_to_stderr", lambda: None)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == code
    said = capsys.readouterr().err
    assert word in said
    assert command[-1] in said or code == cli.UNKNOWN


@pytest.mark.parametrize(
    "command",
    [["sandbox", "list", "--url"], ["reshard", "--shards", "2", "--to"], ["doctor"]],
)
def test_a_password_in_an_address_is_not_shown(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "nats://me:s3cret@127.0.0.1:1,nats://me:s3cret@127.0.0.1:2"
    monkeypatch.setenv("FENCEPOST_NATS_URL", url)
    monkeypatch.setattr(doctor_nats, "_CONNECT_S", 0.5)
    words = [*command, url] if command[-1].startswith("--") else command
    monkeypatch.setattr(sys, "argv", ["fencepost", *words])
    monkeypatch.setattr(cli, "_log_to_stderr", lambda: None)
    with pytest.raises(SystemExit):
        cli.main()
    said = "".join(capsys.readouterr())
    assert "nats://127.0.0.1:1,nats://127.0.0.1:2" in said
    assert "s3cret" not in said
