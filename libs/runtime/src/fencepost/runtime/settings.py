"""
Settings, read once at the start from the environment: `FENCEPOST_<NAME>`.

A wrong value is one clear line per field, and the process does not start.
"""

from __future__ import annotations

import ipaddress
import unicodedata
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

from fencepost.contracts import streams
from fencepost.core import limits
from fencepost.core.errors import RefusedError
from fencepost.runtime import access, address
from fencepost.runtime.access import Access
from fencepost.runtime.address import Address
from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

S = TypeVar("S", bound="Settings")

_CHARACTERS_MAX: Final = 4096
_AS_THEY_ARE: Final = frozenset({"receipt_key"})
"""Secrets that are bytes to us, whatever they are to a person."""


class Settings(BaseSettings):
    """
    What every service can be told.

    `receipt_key` is the master key of receipts' stamps, shared by planners and gateways; empty is
    refused where it is needed. `http_port` 0 takes a free port. `declare` lets a process create
    missing streams, for which its NATS user must be allowed to.

    `ledgers` is the number of streams over which the shards' batches are spread; it is the
    deployment's, as the number of shards is, and never changed in place.

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
    ledgers: int = Field(default=1, ge=1, le=1024)
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

    @field_validator("ledgers")
    @classmethod
    def _each_ledger_has_a_shard(cls, value: int, info: ValidationInfo) -> int:
        shards = info.data.get("shards", value)
        if value > shards:
            raise ValueError(f"must be at most the number of shards, {shards}")
        return value

    @field_validator("lease_ms")
    @classmethod
    def _lease_outlives_heartbeats(cls, value: int, info: object) -> int:
        heartbeat_ms = getattr(info, "data", {}).get("heartbeat_ms", limits.HEARTBEAT_MS)
        if heartbeat_ms * 3 >= value:
            raise ValueError(f"must be more than three heartbeats of {heartbeat_ms} ms")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _is_text(cls, value: Any, info: ValidationInfo) -> Any:
        """What no setting takes: other bytes than UTF-8, control characters, endless text."""
        if not isinstance(value, str):
            return value
        kinds = {unicodedata.category(character) for character in value}
        if "Cs" in kinds:
            raise ValueError("expected UTF-8")
        if "Cc" in kinds and info.field_name not in _AS_THEY_ARE:
            raise ValueError("expected no control characters")
        if len(value) > _CHARACTERS_MAX:
            raise ValueError(f"expected at most {_CHARACTERS_MAX} characters, got {len(value)}")
        field = cls.model_fields[str(info.field_name)]
        if not value and field.annotation == Path | None:
            return None
        if not value and field.annotation is Path:
            raise ValueError("expected a folder, got nothing")
        return value

    @field_validator("postgres_dsn")
    @classmethod
    def _is_a_dsn(cls, value: str) -> str:
        if not value:
            return value
        expected = "expected postgresql://user:password@host:port/database"
        try:
            split = urlsplit(value)
            names_a_port = split.port is None or split.port > 0
        except ValueError:
            # Several hosts have several ports; the driver takes those apart.
            names_a_port = "," in value
        if not value.startswith(("postgresql://", "postgres://")) or not names_a_port:
            raise ValueError(expected)
        return value

    @field_validator("http_host")
    @classmethod
    def _is_a_host(cls, value: str) -> str:
        if not value:
            return value  # every interface
        try:
            ipaddress.ip_address(value)
        except ValueError:
            if not address.is_name(value):
                raise ValueError("expected a host's name or address to listen on") from None
        return value

    @field_validator("nats_url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        address.read(value)
        return value

    def address(self) -> Address:
        """Where the servers are."""
        return address.read(self.nats_url)

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
            f"FENCEPOST_{'_'.join(str(part) for part in problem['loc']).upper()}: "
            + problem["msg"].removeprefix("Value error, ")
            for problem in error.errors()
        ]
        raise RefusedError("bad_setting", "\n".join(lines)) from error
