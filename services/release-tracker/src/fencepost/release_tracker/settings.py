"""The tracker's settings, beside those of every service."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from fencepost.core.errors import RefusedError
from fencepost.release_tracker import migrations
from fencepost.runtime import settings
from pydantic import SecretStr


class TrackerSettings(settings.Settings):
    """
    What the tracker can be told besides.

    `http_token` is the bearer token of the HTTP API; without one it serves loopback only.
    `http_read_token` is one that may only read. Without `postgres_dsn` nothing is projected, and
    DAGs are run all the same.
    `migrations_folder` is the folder of SQL files, by default the one in this tree.
    """

    http_token: SecretStr = SecretStr("")
    http_read_token: SecretStr = SecretStr("")
    migrations_folder: Path | None = None

    def scripts(self) -> tuple[migrations.Migration, ...]:
        """Raises `MigrationError`."""
        return migrations.read(self.migrations_folder or migrations.default_folder())


def is_loopback(host: str) -> bool:
    """Tells whether a host's name or address, as bound or as asked for, is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load() -> TrackerSettings:
    """Raises `RefusedError` naming every wrong field, and `FencepostError` on bad migrations."""
    found = settings.load(TrackerSettings)
    if found.http_read_token.get_secret_value() and not found.http_token.get_secret_value():
        raise RefusedError(
            "bad_setting",
            "FENCEPOST_HTTP_READ_TOKEN: needs FENCEPOST_HTTP_TOKEN, the one that may do all",
            field="http_read_token",
        )
    if not found.http_token.get_secret_value() and not is_loopback(found.http_host):
        raise RefusedError(
            "bad_setting",
            f"FENCEPOST_HTTP_TOKEN: needed to serve {found.http_host}, which is not loopback",
            field="http_token",
        )
    return found


def require_postgres(settings: TrackerSettings) -> None:
    """Raises `RefusedError` where there is no database to migrate or to fill."""
    if not settings.postgres_dsn:
        raise RefusedError(
            "bad_setting",
            "FENCEPOST_POSTGRES_DSN: expected postgresql://user:password@host:port/database",
            field="postgres_dsn",
        )
