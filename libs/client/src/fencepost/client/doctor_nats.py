"""What `fencepost doctor` says of the deployment that the environment names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fencepost.client.client import user_of_environment
from fencepost.client.doctor import Check
from fencepost.core.errors import FencepostError, RefusedError, UnknownError
from fencepost.runtime import streams
from fencepost.runtime.access import Access
from fencepost.runtime.link import Link

_CONNECT_S: Final = 10.0
_NO_STREAMS: Final = "create the streams, as the operator: fencepost deploy streams"


def checks() -> Iterator[Check]:
    """Whether the server lets this user in, by which credentials, and to what."""
    url = os.environ.get("FENCEPOST_NATS_URL", "")
    if not url:
        return
    name = f"NATS at {url.rpartition('@')[2]}"
    try:
        user = user_of_environment()
        user.options()
    except RefusedError as error:
        yield Check("credentials", "failed", str(error), "mend the file that the setting names")
        return
    yield _private()
    try:
        yield asyncio.run(_welcome(name, url, user))
    except TimeoutError:
        todo = "start the server, or mend FENCEPOST_NATS_URL"
        yield Check(name, "failed", f"no connection within {_CONNECT_S:g} s", todo)
    except (FencepostError, OSError) as error:
        yield Check(
            name, "failed", str(error), "mend the setting that it names, or start the server"
        )


def _private() -> Check:
    path = os.environ.get("FENCEPOST_NATS_CREDENTIALS", "")
    if not path:
        todo = "set FENCEPOST_NATS_CREDENTIALS where the server demands them"
        return Check("credentials", "warning", "none are named", todo)
    if Path(path).stat().st_mode & 0o077:
        return Check("credentials", "warning", f"{path}: others may read it", f"chmod 600 {path}")
    return Check("credentials", "ok", path)


async def _welcome(name: str, url: str, user: Access) -> Check:
    """Connects, and asks for what all who work with a deployment may read."""
    async with asyncio.timeout(_CONNECT_S):
        link = await Link.connect(url, name="fencepost-doctor", access=user)
    try:
        shards = await streams.read_meta(link, "shards")
    except UnknownError as error:
        if "denied" in str(error):
            todo = "give the server the authorization.conf of this version: fencepost deploy nats"
            return Check(name, "failed", str(error), todo)
        return Check(name, "failed", str(error), _NO_STREAMS)
    finally:
        await link.close()
    if shards is None:
        return Check(name, "failed", "there is no deployment yet", _NO_STREAMS)
    return Check(name, "ok", f"lets {user.user or 'a connection without credentials'} in")
