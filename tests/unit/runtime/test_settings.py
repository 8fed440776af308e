"""Settings: from the environment, with one clear line per wrong field."""

from __future__ import annotations

import pytest
from fencepost.core.errors import RefusedError
from fencepost.runtime import settings


def test_defaults_are_the_embedded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHARDS", "NATS_URL", "LEASE_MS", "HEARTBEAT_MS"):
        monkeypatch.delenv(f"FENCEPOST_{name}", raising=False)
    loaded = settings.load(settings.Settings)
    assert (loaded.shards, loaded.nats_url) == (8, "nats://127.0.0.1:4222")
    assert loaded.declare is False


def test_every_wrong_field_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_SHARDS", "many")
    monkeypatch.setenv("FENCEPOST_HTTP_PORT", "99999")
    monkeypatch.setenv("FENCEPOST_HEARTBEAT_MS", "1000")
    monkeypatch.setenv("FENCEPOST_LEASE_MS", "3000")
    with pytest.raises(RefusedError) as refused:
        settings.load(settings.Settings)
    lines = str(refused.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "FENCEPOST_SHARDS",
        "FENCEPOST_HTTP_PORT",
        "FENCEPOST_LEASE_MS",
    ]
    monkeypatch.setenv("FENCEPOST_SHARDS", "16")
    monkeypatch.setenv("FENCEPOST_HTTP_PORT", "9999")
    monkeypatch.setenv("FENCEPOST_LEASE_MS", "3001")
    assert settings.load(settings.Settings).shards == 16


def test_a_short_receipt_key_is_refused_and_none_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_RECEIPT_KEY", "short-secret")
    loaded = settings.load(settings.Settings)
    assert "short-secret" not in repr(loaded)
    with pytest.raises(RefusedError, match="FENCEPOST_RECEIPT_KEY") as refused:
        loaded.key()
    assert "short-secret" not in str(refused.value)
    monkeypatch.setenv("FENCEPOST_RECEIPT_KEY", "a longer secret!")
    assert settings.load(settings.Settings).key() == b"a longer secret!"
