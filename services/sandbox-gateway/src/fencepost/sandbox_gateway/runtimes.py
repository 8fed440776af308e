"""
Which providers a gateway offers, made from its settings.

A provider whose library is an optional extra is imported only when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencepost.core.errors import RefusedError, RetryLaterError
from fencepost.providers.process import ProcessProvider
from fencepost.providers.protocol import Provider

if TYPE_CHECKING:
    from fencepost.sandbox_gateway.app import GatewaySettings


async def open_providers(config: GatewaySettings) -> dict[str, Provider]:
    """
    Makes each configured provider, by name.

    Raises `RefusedError` on a wrong setting, `RetryLaterError` when the disk cannot be used now.
    """
    made: list[Provider] = [_process(config)] if config.process else []
    if config.docker:
        made.append(await _docker(config))
    if config.swerex_pool is not None:
        made.append(_swerex(config))
    if config.kubernetes_cluster:
        made.append(await _kubernetes(config))
    if not made:
        raise RefusedError(
            "bad_setting",
            "FENCEPOST_PROCESS: off, and no other provider is set (FENCEPOST_DOCKER,"
            " FENCEPOST_SWEREX_POOL, FENCEPOST_KUBERNETES_CLUSTER)",
            field="process",
        )
    return {provider.traits.name: provider for provider in made}


def _process(config: GatewaySettings) -> Provider:
    root = config.sandbox_root or config.data / "sandboxes"
    try:
        return ProcessProvider(
            root,
            deployment=config.deployment,
            heartbeat_ms=config.heartbeat_ms,
            isolate=config.isolate,
        )
    except OSError as error:
        raise RetryLaterError(f"FENCEPOST_SANDBOX_ROOT: {root} cannot be used: {error}") from error


async def _docker(config: GatewaySettings) -> Provider:
    try:
        from fencepost.providers.docker.provider import DockerProvider
    except ModuleNotFoundError as error:
        raise _missing("docker", error) from error
    return await DockerProvider.open(
        "" if config.docker == "default" else config.docker,
        deployment=config.deployment,
        image=config.docker_image,
        network=config.docker_network,
        heartbeat_ms=config.heartbeat_ms,
    )


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


async def _kubernetes(config: GatewaySettings) -> Provider:
    try:
        from fencepost.providers.kubernetes.provider import KubernetesProvider, load_configuration
    except ModuleNotFoundError as error:
        raise _missing("kubernetes", error) from error
    configuration = await load_configuration(config.kubernetes_config)
    return KubernetesProvider(
        configuration,
        cluster=config.kubernetes_cluster,
        namespace=config.kubernetes_namespace,
        image=config.kubernetes_image,
        runtime_class=config.kubernetes_runtime_class,
        grace_s=config.kubernetes_grace_s,
        deployment=config.deployment,
        heartbeat_ms=config.heartbeat_ms,
    )


async def close_providers(providers: dict[str, Provider]) -> None:
    """Closes the connections of those that have some."""
    for provider in providers.values():
        close = getattr(provider, "close", None)
        if close is not None:
            await close()


def _missing(name: str, error: ModuleNotFoundError) -> RefusedError:
    return RefusedError(
        "bad_setting",
        f"FENCEPOST_{name.upper()}: {error.name} is not installed; "
        f"install fencepost-providers[{name}]",
        field=name,
    )
