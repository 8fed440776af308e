"""Serving beyond loopback takes a token; a wrong setting is named."""

from __future__ import annotations

import asyncpg
import pytest
from fencepost.core.errors import RefusedError, RetryLaterError
from fencepost.release_tracker import settings, store


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_POSTGRES_DSN", "postgresql://localhost/x")
    for name in ("HTTP_HOST", "HTTP_TOKEN", "HTTP_READ_TOKEN"):
        monkeypatch.delenv(f"FENCEPOST_{name}", raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_token(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("FENCEPOST_HTTP_HOST", host)
    assert settings.load().http_host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "tracker.example", ""])
def test_any_other_host_needs_one(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("FENCEPOST_HTTP_HOST", host)
    with pytest.raises(RefusedError, match="FENCEPOST_HTTP_TOKEN") as refused:
        settings.load()
    assert refused.value.field == "http_token"
    monkeypatch.setenv("FENCEPOST_HTTP_TOKEN", "secret")
    assert "secret" not in repr(settings.load())


def test_a_database_is_needed_only_by_what_works_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.require_postgres(settings.load())
    monkeypatch.delenv("FENCEPOST_POSTGRES_DSN")
    with pytest.raises(RefusedError, match="FENCEPOST_POSTGRES_DSN"):
        settings.require_postgres(settings.load())


def test_a_token_to_read_needs_one_that_may_do_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_HTTP_READ_TOKEN", "reader")
    with pytest.raises(RefusedError, match="FENCEPOST_HTTP_TOKEN"):
        settings.load()
    monkeypatch.setenv("FENCEPOST_HTTP_TOKEN", "secret")
    assert "reader" not in repr(settings.load())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (asyncpg.InvalidPasswordError("password authentication failed"), RefusedError),
        (asyncpg.InvalidAuthorizationSpecificationError('role "x" does not exist'), RefusedError),
        (asyncpg.InvalidCatalogNameError('database "x" does not exist'), RefusedError),
        (asyncpg.CannotConnectNowError("the database system is starting up"), RetryLaterError),
        (asyncpg.TooManyConnectionsError("too many clients"), RetryLaterError),
        (ConnectionRefusedError(111, "Connect call failed"), RetryLaterError),
        (TimeoutError(), RetryLaterError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_postgresql_says_tells_whose_move_is_next(
    error: BaseException, kind: type[Exception]
) -> None:
    found = store.failed(error)
    assert type(found) is kind
    assert str(found).strip(": ")
