"""Sandboxes that are containers of a Docker engine. Needs the extra `docker` (aiodocker)."""

from fencepost.providers.docker.provider import DockerProvider

__all__ = ["DockerProvider"]
