"""Settings: from the environment, with one clear line per wrong field."""

from __future__ import annotations

import pytest
from fencepost.core.errors import RefusedError
from fencepost.release_tracker.settings import TrackerSettings
from fencepost.runtime import settings
from fencepost.sandbox_gateway.app import GatewaySettings
from fencepost.sweeper.app import SweeperSettings


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


KINDS = (settings.Settings, GatewaySettings, SweeperSettings, TrackerSettings)
ALL = [
    (kind, name)
    for kind in KINDS
    for name in kind.model_fields
    if name != "receipt_key" and (kind is settings.Settings or name not in KINDS[0].model_fields)
]


@pytest.mark.parametrize(("kind", "name"), ALL, ids=[name for _, name in ALL])
@pytest.mark.parametrize(
    "value", ["a\x07", "\udcff", "x" * 5_000], ids=["control", "not UTF-8", "endless"]
)
def test_what_no_setting_takes(
    monkeypatch: pytest.MonkeyPatch, kind: type[settings.Settings], name: str, value: str
) -> None:
    variable = f"FENCEPOST_{name.upper()}"
    monkeypatch.setenv(variable, value)
    with pytest.raises(RefusedError, match=f"^{variable}: "):
        settings.load(kind)


NUMBERS = [(kind, name) for kind, name in ALL if kind.model_fields[name].annotation in {int, float}]


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=[name for _, name in NUMBERS])
@pytest.mark.parametrize("value", ["", "nan", "inf", "-inf", "-1", "1e400", str(2**63), "x"])
def test_what_no_number_is(
    monkeypatch: pytest.MonkeyPatch, kind: type[settings.Settings], name: str, value: str
) -> None:
    variable = f"FENCEPOST_{name.upper()}"
    monkeypatch.setenv(variable, value)
    with pytest.raises(RefusedError, match=f"^{variable}: "):
        settings.load(kind)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nats_url", ""),
        ("nats_url", "ws://a"),
        ("data", ""),
        ("http_host", "a b"),
        ("http_host", "[::1]"),
        ("postgres_dsn", "mysql://a"),
        ("postgres_dsn", "postgresql://u:s3cret@a:0/b"),
        ("postgres_dsn", "host=a password=s3cret"),
    ],
)
def test_wrong_addresses(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    variable = f"FENCEPOST_{name.upper()}"
    monkeypatch.setenv(variable, value)
    with pytest.raises(RefusedError, match=f"^{variable}: expected ") as refused:
        settings.load(settings.Settings)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nats_url", "tls://u:p@[::1]:4222,b"),
        ("http_host", "::"),
        ("http_host", "tracker.example"),
        ("postgres_dsn", "postgresql://u:p@a:5432,b:5433/c"),
        ("postgres_dsn", "postgresql:///c?host=/run/postgresql"),
        ("receipt_key", "a longer secret!\n"),
    ],
)
def test_right_ones_are_taken(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"FENCEPOST_{name.upper()}", value)
    settings.load(settings.Settings)


def test_each_ledger_needs_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEPOST_LEDGERS", raising=False)
    assert settings.load(settings.Settings).ledgers == 1
    monkeypatch.setenv("FENCEPOST_SHARDS", "4")
    monkeypatch.setenv("FENCEPOST_LEDGERS", "4")
    assert settings.load(settings.Settings).ledgers == 4
    for wrong, why in (("5", "at most the number of shards, 4"), ("0", "greater"), ("x", "int")):
        monkeypatch.setenv("FENCEPOST_LEDGERS", wrong)
        with pytest.raises(RefusedError, match=f"^FENCEPOST_LEDGERS: .*{why}"):
            settings.load(settings.Settings)
