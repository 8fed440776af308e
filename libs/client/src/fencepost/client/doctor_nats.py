"""What `fencepost doctor` says of the deployment that the environment names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fencepost.client.client import user_of_environment
from fencepost.client.doctor import Check
from fencepost.contracts import streams as table
from fencepost.core.errors import FencepostError, RefusedError, UnknownError
from fencepost.runtime import address, streams
from fencepost.runtime.access import Access
from fencepost.runtime.link import DeniedError, Link, stream_info

_CONNECT_S: Final = 10.0
_NO_STREAMS: Final = "create the streams, as the operator: fencepost deploy streams"


def checks() -> Iterator[Check]:
    """Whether the server lets this user in, by which credentials, and to what."""
    url = os.environ.get("FENCEPOST_NATS_URL", "")
    if not url:
        return
    try:
        where = address.require("FENCEPOST_NATS_URL", url)
    except RefusedError as error:
        yield Check("NATS", "failed", str(error), "mend FENCEPOST_NATS_URL")
        return
    name = f"NATS at {where.shown}"
    try:
        user = where.whom(user_of_environment())
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
        cut = await streams.read_cut(link)
        if cut is None:
            return Check(name, "failed", "there is no deployment yet", _NO_STREAMS)
        return await _ledgers(link, cut, name, user)
    except UnknownError as error:
        if "denied" in str(error):
            todo = "give the server the authorization.conf of this version: fencepost deploy nats"
            return Check(name, "failed", str(error), todo)
        return Check(name, "failed", str(error), _NO_STREAMS)
    finally:
        await link.close()


async def _ledgers(link: Link, cut: streams.Cut, name: str, user: Access) -> Check:
    """Whether the environment says the deployment's own numbers, and each ledger is there."""
    for setting, have in (("FENCEPOST_SHARDS", cut.shards), ("FENCEPOST_LEDGERS", cut.ledgers)):
        said = os.environ.get(setting, str(have))
        if said != str(have):
            detail = f"{setting} is {said}, and the deployment was made with {have}"
            return Check(name, "failed", detail, f"set {setting}={have}")
    for ledger in table.ledger_names(cut.ledgers):
        try:
            info = await stream_info(link, ledger)
        except DeniedError as error:
            todo = f"make the grants for it: fencepost deploy nats --ledgers {cut.ledgers}"
            return Check(name, "failed", f"{ledger} may not be looked at: {error}", todo)
        if info.error is not None:
            detail = f"{ledger} is not there: {info.error.description}"
            return Check(name, "failed", detail, "bring it back from a back-up")
    who = user.user or "a connection without credentials"
    where = "one ledger" if cut.ledgers == 1 else f"{cut.ledgers} ledgers"
    return Check(name, "ok", f"lets {who} in; {cut.shards} shards in {where}")
