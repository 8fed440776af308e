"""
Which providers a gateway offers, made from its settings.

A provider whose library is an optional extra is imported only when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencepost.core.errors import RefusedError
from fencepost.providers.process import ProcessProvider
from fencepost.providers.protocol import Provider

if TYPE_CHECKING:
    from fencepost.sandbox_gateway.app import GatewaySettings


def open_providers(config: GatewaySettings) -> dict[str, Provider]:
    """Makes each configured provider, by name. Raises `RefusedError` on a wrong setting."""
    made: list[Provider] = [
        ProcessProvider(
            config.sandbox_root or config.data / "sandboxes",
            deployment=config.deployment,
            heartbeat_ms=config.heartbeat_ms,
            isolate=config.isolate,
        )
    ]
    if config.swerex_pool is not None:
        made.append(_swerex(config))
    return {provider.traits.name: provider for provider in made}


def _swerex(config: GatewaySettings) -> Provider:
    try:
        from fencepost.providers.swerex.provider import SwerexProvider
    except ModuleNotFoundError as error:
        raise _missing("swerex", error) from error
    assert config.swerex_pool is not None
    if not config.swerex_pool.is_dir():
        raise RefusedError(
            "bad_setting",
            f"FENCEPOST_SWEREX_POOL: expected a folder of servers, got {config.swerex_pool}",
            field="swerex_pool",
        )
    return SwerexProvider(
        config.swerex_pool, deployment=config.deployment, heartbeat_ms=config.heartbeat_ms
    )


def _missing(name: str, error: ModuleNotFoundError) -> RefusedError:
    return RefusedError(
        "bad_setting",
        f"FENCEPOST_{name.upper()}: {error.name} is not installed; "
        f"install fencepost-providers[{name}]",
        field=name,
    )
