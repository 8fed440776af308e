"""
Declares the table of streams and buckets, or binds to it.

Only a designated creator makes them. Nobody changes an existing one: a difference in what matters
is refused, since a wrong limit, retention or transform would lose inputs or cut the ledger
(S-95, S-163).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import structlog
from fencepost.contracts import streams
from fencepost.contracts.messages import HASH
from fencepost.core.errors import FencepostError, RefusedError, UnknownError
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import ApiError, DeniedError, Link, StreamInfo, stream_info
from fencepost.runtime.ports import Unknown, Valid

STREAM_NOT_FOUND: Final = 10059
STREAM_NAME_IN_USE: Final = 10058
SUBJECTS_OVERLAP: Final = 10065

START_S: Final = 60.0
"""How long a starting service asks again while the servers do not say."""

REFUSED_S: Final = 5.0
"""How long it asks again while the servers refuse it: their users may just be read anew."""

_NO_JETSTREAM: Final = (10039, 10076)
"""The account has no JetStream; the server has none."""

_INFO_S: Final = 2.0
_AGAIN_S: Final = 0.2

MATTERS: Final = (
    "subjects",
    "subject_transform",
    "retention",
    "discard",
    "discard_new_per_subject",
    "max_msgs_per_subject",
    "max_msgs",
    "max_bytes",
    "max_age",
    "max_msg_size",
    "storage",
    "deny_delete",
    "deny_purge",
    "allow_rollup_hdrs",
)
"""What a difference in would lose or refuse messages. Replicas may differ: they are scaled."""

_DEFAULTS: Final[dict[str, Any]] = {
    "subject_transform": None,
    "discard_new_per_subject": False,
    "max_msgs_per_subject": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msg_size": -1,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "retention": "limits",
    "discard": "old",
}

logger = structlog.get_logger(__name__)


class StreamMismatchError(FencepostError):
    """An existing stream differs from the table in something that matters."""


class HalfMovedError(FencepostError):
    """A history was being written into this deployment, and is not whole: it must not go on."""


class StreamMissingError(FencepostError):
    """A stream of the table does not exist, and this process may not create it."""


class StreamAwaitedError(StreamMissingError):
    """One that need not survive is missing: whoever may create it is about to. Try again."""


class NoJetStreamError(UnknownError):
    """The server, or this user's account, says that it has no JetStream."""


class Cut(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """
    How the deployment's history is cut, as its bucket says: written once, never changed.

    What a later version adds to it must not be passed over: where it says something, an earlier
    version would look for shards where they are not.
    """

    shards: int
    hash: str
    ledgers: int = 1


def wanted(stream: streams.Stream) -> tuple[str, dict[str, Any]]:
    """The server's name and configuration of one entry of the table."""
    config = dict(stream.config)
    if stream.kind == "kv":
        name = f"KV_{stream.name}"
        # As the key-value client makes and expects them.
        config |= {
            "subjects": [f"$KV.{stream.name}.>"],
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "discard": "new",
            "max_msgs_per_subject": config.get("max_msgs_per_subject", 1),
            "duplicate_window": min(120 * 10**9, config.get("max_age") or 120 * 10**9),
        }
    elif stream.kind == "objects":
        name = f"OBJ_{stream.name}"
        config |= {
            "subjects": [f"$O.{stream.name}.C.>", f"$O.{stream.name}.M.>"],
            "allow_rollup_hdrs": True,
            "discard": "new",
        }
    else:
        name = stream.name
    return name, {"name": name, **config}


def differences(want: dict[str, Any], have: dict[str, Any]) -> list[str]:
    """Names what differs, of that which matters."""
    found: list[str] = []
    for key in MATTERS:
        default = _DEFAULTS.get(key)
        left, right = want.get(key, default), have.get(key, default)
        if isinstance(left, list) and isinstance(right, list):
            left, right = sorted(left), sorted(right)
        if left != right:
            found.append(f"{key}: wanted {left!r}, found {right!r}")
    return found


async def declare(
    link: Link, shards: int, *, create: bool, replicas: int = 1, ledgers: int = 1
) -> None:
    """
    Makes sure that every stream of the table is there and is as the table says.

    A deployment that was made once has its ledgers and its durable inputs: one of them missing is
    a loss, and an empty one in its place would hide it. What is in memory or a cache is made again.

    Raises `StreamMissingError` when one is missing and may not be created (`StreamAwaitedError`
    where somebody else makes it again), `StreamMismatchError` when one differs or the deployment
    has another number of shards or ledgers, `HalfMovedError` when a move into it did not end,
    `UnknownError` when the server does not say.
    """
    cut = Cut(shards=shards, hash=HASH, ledgers=ledgers)
    recorded = await _recorded(link)
    # First: a stream that another number of ledgers asks for is not one that was lost.
    if recorded is not None:
        _compare(recorded, cut)
        await _refuse_half_moved(link)
    for stream in streams.table(shards, replicas=replicas, ledgers=ledgers):
        name, config = wanted(stream)
        is_kept = stream.kind == "stream" and stream.config["storage"] == "file"
        if recorded is not None and is_kept and (await _info(link, name)).error is not None:
            await _refuse_lost(link, name)
        try:
            await _declare_one(link, name, config, create=create)
        except StreamMissingError as error:
            if recorded is None or is_kept:
                raise
            raise StreamAwaitedError(str(error)) from error
    await _declare_meta(link, cut, create=create)


async def check_ledgers(link: Link, shards: int, *, ledgers: int) -> None:
    """
    Checks by the ledgers' streams alone that each shard is in the one where this process looks.

    For those who may not read the deployment's bucket. Raises as `declare` does.
    """
    for stream in streams.table(shards, ledgers=ledgers)[:ledgers]:
        about = f"stream {stream.name}, of FENCEPOST_LEDGERS={ledgers}"
        try:
            info = await _info(link, stream.name)
        except DeniedError as error:
            raise StreamMissingError(
                f"{about}, may not be looked at: {error}; has the deployment another number?"
            ) from error
        if info.error is not None and info.error.err_code == STREAM_NOT_FOUND:
            raise StreamMissingError(
                f"{about}, does not exist; `fencepost deploy streams` creates it, unless the "
                "deployment has another number"
            )
        if info.error is not None:
            raise _unknown(f"stream {stream.name}", info.error)
        want, have = stream.config["subjects"], info.config.get("subjects")
        if sorted(want) != sorted(have or ()):
            raise StreamMismatchError(
                f"{about}, has the subjects {have}, not {want}: the deployment has another number "
                "of ledgers or shards"
            )


async def declare_at_start(
    link: Link,
    shards: int,
    *,
    create: bool,
    replicas: int = 1,
    ledgers: int = 1,
    within_s: float = START_S,
) -> None:
    """
    As `declare`, and asks again while the servers do not say, or a stream is awaited.

    In a cluster a stream that was just made has no leader for a moment, and one whose leader died
    has none until the next is elected: nobody answers for it meanwhile. And a server that was just
    started again has lost what it kept in memory. Raises the last error when the time is over.

    What this user may not ask, or has no JetStream for, it asks for a few seconds only: raises
    `RefusedError`, since waiting does not mend it.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    refused_at: float | None = None
    while True:
        try:
            await declare(link, shards, create=create, replicas=replicas, ledgers=ledgers)
        except (DeniedError, NoJetStreamError) as error:
            refused_at = loop.time() if refused_at is None else refused_at
            if loop.time() >= min(deadline, refused_at + REFUSED_S):
                raise _not_allowed(link, error) from error
            logger.warning("streams_refused", detail=str(error))
        except (UnknownError, StreamAwaitedError) as error:
            refused_at = None
            if loop.time() >= deadline:
                raise _not_ready(error, within_s) from error
            logger.info("streams_not_ready", detail=str(error))
        else:
            return
        await asyncio.sleep(_AGAIN_S)


def _not_allowed(link: Link, error: UnknownError) -> RefusedError:
    if isinstance(error, NoJetStreamError):
        return RefusedError(
            "no_jetstream",
            f"{error}: {link.user or 'this connection'} is in an account without JetStream, or the"
            " server has it switched off (FENCEPOST_NATS_URL, FENCEPOST_NATS_CREDENTIALS)",
            field="nats_url",
        )
    return RefusedError(
        "denied",
        f"{error}: are these the right user's credentials (FENCEPOST_NATS_CREDENTIALS), and has the"
        " server the permissions of this version (`fencepost deploy nats`)?",
        field="nats_credentials",
    )


def _not_ready(error: UnknownError | StreamAwaitedError, within_s: float) -> FencepostError:
    if isinstance(error, UnknownError):
        return UnknownError(
            f"{error}; asked for {within_s:g} s. Is JetStream switched on at this server, and in"
            " this user's account?"
        )
    return error


def _unknown(what: str, error: ApiError) -> UnknownError:
    """What an error of the API says of a stream: nothing."""
    kind = NoJetStreamError if error.err_code in _NO_JETSTREAM else UnknownError
    return kind(f"{what}: {error.description}")


async def _recorded(link: Link) -> bytes | None:
    """How the deployment was cut when it was made; None where none was made before."""
    info = await _info(link, f"KV_{streams.BUCKET_META}")
    if info.error is not None:
        if info.error.err_code != STREAM_NOT_FOUND:
            raise _unknown(streams.BUCKET_META, info.error)
        return None
    return await read_meta(link, "shards")


def _compare(recorded: bytes, cut: Cut) -> None:
    """Raises `StreamMismatchError` naming the setting that is not the deployment's."""
    try:
        found = msgspec.json.decode(recorded, type=Cut)
    except msgspec.DecodeError:
        found = None
    if found == cut:
        return
    for name, setting in (("shards", "FENCEPOST_SHARDS"), ("ledgers", "FENCEPOST_LEDGERS")):
        want, have = getattr(cut, name), getattr(found or cut, name)
        if want != have:
            raise StreamMismatchError(
                f"{setting}: this deployment was made with {have} {name}, not {want}; "
                "`fencepost reshard` moves it to another number"
            )
    raise StreamMismatchError(f"{streams.BUCKET_META} shards: wanted {cut}, found {recorded!r}")


async def _refuse_half_moved(link: Link) -> None:
    if await read_meta(link, streams.MOVING) == streams.MOVING_BEGUN:
        raise HalfMovedError(
            "`fencepost reshard` into this deployment has not ended: its history is not whole. "
            "Start the services on the former one again, and reshard into a new server or folder"
        )


async def put_meta(link: Link, key: str, value: bytes) -> None:
    """Puts a key of the deployment's bucket. Raises `UnknownError` where it may not be stored."""
    subject = f"$KV.{streams.BUCKET_META}.{key}"
    answer = await link.call(subject, value, timeout_s=5.0)
    error = msgspec.json.decode(answer.data, type=_Answer).error
    if error is not None:
        raise _unknown(subject, error)


async def _info(link: Link, name: str) -> StreamInfo:
    return await stream_info(link, name, timeout_s=_INFO_S)


async def _refuse_lost(link: Link, name: str) -> None:
    info = await _info(link, name)
    if info.error is not None and info.error.err_code == STREAM_NOT_FOUND:
        raise StreamMissingError(
            f"stream {name} is lost: the deployment exists, but its stream does not, and is not "
            "replaced by an empty one"
        )


async def _declare_one(link: Link, name: str, config: dict[str, Any], *, create: bool) -> None:
    info = await _info(link, name)
    if info.error is not None:
        if info.error.err_code != STREAM_NOT_FOUND:
            raise _unknown(f"stream {name}", info.error)
        if not create:
            raise StreamMissingError(
                f"stream {name} does not exist; `fencepost deploy streams` creates it"
            )
        error = await _create(link, name, config)
        if error is None:
            logger.info("stream_created", stream=name)
        elif error.err_code == SUBJECTS_OVERLAP:
            raise StreamMismatchError(
                f"stream {name}: another stream has its subjects: was this deployment begun with "
                "another FENCEPOST_LEDGERS?"
            )
        elif error.err_code != STREAM_NAME_IN_USE:
            raise _unknown(f"stream {name}: not created", error)
        info = await _info(link, name)
        if info.error is not None:
            raise _unknown(f"stream {name}", info.error)
    found = differences(config, info.config)
    if found:
        raise StreamMismatchError(f"stream {name} is not as it must be: {'; '.join(found)}")


class _Answer(msgspec.Struct, frozen=True):
    error: ApiError | None = None


async def _create(link: Link, name: str, config: dict[str, Any]) -> ApiError | None:
    data = await link.api(f"STREAM.CREATE.{name}", config, timeout_s=10.0)
    return msgspec.json.decode(data, type=_Answer).error


async def _declare_meta(link: Link, cut: Cut, *, create: bool) -> None:
    """How the history is cut, for clients; written once, compared ever after."""
    have = await read_meta(link, "shards")
    if have is None:
        if not create:
            raise StreamMissingError(f"{streams.BUCKET_META} says nothing about shards")
        await _write_meta(link, "shards", msgspec.json.encode(cut))
        await _write_meta(link, "deployment", link.nc.new_inbox().rpartition(".")[2].encode())
        have = await read_meta(link, "shards")
    if have is None:
        raise UnknownError(f"{streams.BUCKET_META} says nothing about shards")
    _compare(have, cut)


async def _write_meta(link: Link, key: str, value: bytes) -> None:
    headers = b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: 0\r\n\r\n"
    # A refusal means that somebody else was first; what is there is compared afterwards.
    await link.call(f"$KV.{streams.BUCKET_META}.{key}", value, headers=headers, timeout_s=5.0)


async def read_meta(link: Link, key: str) -> bytes | None:
    """Reads a key of the deployment's bucket; None when it is proven absent."""
    log = JetStreamLog(link, stream=f"KV_{streams.BUCKET_META}")
    got = await log.last(f"$KV.{streams.BUCKET_META}.{key}")
    if isinstance(got, Unknown):
        raise UnknownError(f"{streams.BUCKET_META} {key}: {got.reason}")
    return got.payload if isinstance(got, Valid) else None


async def read_cut(link: Link) -> Cut | None:
    """How the deployment's history is cut; None where it is proven that none was made."""
    value = await read_meta(link, "shards")
    try:
        return msgspec.json.decode(value, type=Cut) if value is not None else None
    except msgspec.DecodeError as error:
        raise UnknownError(f"{streams.BUCKET_META} shards: {error}") from error
