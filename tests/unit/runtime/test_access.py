"""Credentials by file: three forms, and a clear word about any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from fencepost.core.errors import RefusedError
from fencepost.runtime import access, settings

SEED = "SUAHZIKK5TH4TN6HMX5RUQXTZ67ECZBUCA5QTLXQFK7O6NOD2TRMJ4VNIU"
CREDS = f"""\
-----BEGIN NATS USER JWT-----
eyJ.eyJ.x_-1
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{SEED}
------END USER NKEY SEED------
"""


def test_the_form_is_told_from_what_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text('{"user": "planner", "password": "secret"}\n')
    found = access.read(str(path))
    assert (found.user, found.password) == ("planner", "secret")
    assert found.options() == {"user": "planner", "password": "secret"}
    path.write_text(CREDS)
    assert access.read(str(path)).creds == str(path)
    path.write_text("SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY\n")
    assert access.read(str(path)).seed == str(path)
    assert access.read("") == access.Access()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "user: planner",
        '{"user": "planner"}',
        '{"user": "", "password": "x"}',
        "[]",
        SEED[:-1],
        f"{SEED}\n{SEED}",
        "SA" + SEED[2:],
        CREDS.replace("\n", "\r\n"),
        CREDS.replace("eyJ.eyJ.x_-1", ""),
        CREDS.replace("eyJ.eyJ.x_-1", "eyJ"),
        CREDS.replace(SEED, "SA" + SEED[2:]),
        CREDS[: CREDS.index("\n------END")],
        CREDS[: CREDS.index("-----BEGIN USER")],
        "x" * 100_000,
    ],
)
def test_another_form_is_refused_with_the_setting_and_without_the_text(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(RefusedError, match="FENCEPOST_NATS_CREDENTIALS") as raised:
        access.read(str(path))
    assert raised.value.field == "nats_credentials"
    assert SEED[2:] not in str(raised.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RefusedError, match=r"FENCEPOST_NATS_CREDENTIALS: .*not UTF-8"):
        access.read(str(path))


@pytest.mark.parametrize("form", [SEED, CREDS])
def test_a_seed_with_a_letter_changed_is_refused_before_the_server_is_asked(
    tmp_path: Path, form: str
) -> None:
    path = tmp_path / "file"
    path.write_text(form)
    assert access.read(str(path)).options(), "the control"
    path.write_text(form.replace(SEED, SEED[:20] + ("A" if SEED[20] != "A" else "B") + SEED[21:]))
    with pytest.raises(RefusedError, match="check sum"):
        access.read(str(path)).options()


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with pytest.raises(RefusedError, match=r"FENCEPOST_NATS_CREDENTIALS: .*no such file"):
        access.read(gone)
    for found, name in (
        (access.read(ca=gone), "FENCEPOST_NATS_CA"),
        (access.read(cert=gone), "FENCEPOST_NATS_CERT"),
    ):
        with pytest.raises(RefusedError, match=f"{name}: .*no such file"):
            found.options()
    with pytest.raises(RefusedError, match="FENCEPOST_NATS_CERT"):
        access.read(key=gone)


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text('{"user": "planner", "password": "secret"}')
    assert "secret" not in repr(access.read(str(path)))


def test_settings_name_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text('{"user": "planner", "password": "secret"}')
    monkeypatch.setenv("FENCEPOST_NATS_CREDENTIALS", str(path))
    assert settings.load(settings.Settings).access().user == "planner"
    monkeypatch.setenv("FENCEPOST_NATS_CREDENTIALS", str(tmp_path))
    with pytest.raises(RefusedError):
        settings.load(settings.Settings).access()
