"""
Settings, read once at the start from the environment: `FENCEPOST_<NAME>`.

A wrong value is one clear line per field, and the process does not start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from fencepost.contracts import streams
from fencepost.core import limits
from fencepost.core.errors import RefusedError
from fencepost.runtime import access
from fencepost.runtime.access import Access
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

S = TypeVar("S", bound="Settings")


class Settings(BaseSettings):
    """
    What every service can be told.

    `receipt_key` is the master key of receipts' stamps, shared by planners and gateways; empty is
    refused where it is needed. `http_port` 0 takes a free port. `declare` lets a process create
    missing streams, for which its NATS user must be allowed to.

    `nats_credentials` is a file, of one of the forms in `runtime.access`. `nats_ca` verifies the
    server where its certificate is not of a public authority; `nats_cert` and `nats_key` are shown
    to a server that demands a certificate.
    """

    model_config = SettingsConfigDict(env_prefix="FENCEPOST_", extra="ignore", frozen=True)

    nats_url: str = "nats://127.0.0.1:4222"
    nats_credentials: str = ""
    nats_ca: str = ""
    nats_cert: str = ""
    nats_key: str = ""
    shards: int = Field(default=streams.SHARDS_EMBEDDED, ge=1, le=1024)
    replicas: int = Field(default=1, ge=1, le=5)
    declare: bool = False
    data: Path = Path(".fencepost")
    receipt_key: SecretStr = SecretStr("")
    postgres_dsn: str = ""
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=0, ge=0, le=65535)
    heartbeat_ms: int = Field(default=limits.HEARTBEAT_MS, ge=50, le=60_000)
    lease_ms: int = Field(default=limits.LEASE_MS, ge=200, le=600_000)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"
    drain_s: float = Field(default=10.0, ge=0.0, le=300.0)

    @field_validator("lease_ms")
    @classmethod
    def _lease_outlives_heartbeats(cls, value: int, info: object) -> int:
        heartbeat_ms = getattr(info, "data", {}).get("heartbeat_ms", limits.HEARTBEAT_MS)
        if heartbeat_ms * 3 >= value:
            raise ValueError(f"must be more than three heartbeats of {heartbeat_ms} ms")
        return value

    def access(self) -> Access:
        """How to show NATS who this is. Raises `RefusedError` naming the wrong setting."""
        return access.read(
            self.nats_credentials, ca=self.nats_ca, cert=self.nats_cert, key=self.nats_key
        )

    def key(self) -> bytes:
        """The master key of receipts. Raises `RefusedError` when there is none."""
        value = self.receipt_key.get_secret_value().encode()
        if len(value) < 16:
            raise RefusedError(
                "bad_setting",
                "FENCEPOST_RECEIPT_KEY: at least 16 characters are needed, the same for planners "
                "and gateways",
                field="receipt_key",
            )
        return value


def load(kind: type[S]) -> S:
    """Reads the environment. Raises `RefusedError` naming every wrong field, one per line."""
    try:
        return kind()
    except ValidationError as error:
        lines = [
            f"FENCEPOST_{'_'.join(str(part) for part in problem['loc']).upper()}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise RefusedError("bad_setting", "\n".join(lines)) from error
