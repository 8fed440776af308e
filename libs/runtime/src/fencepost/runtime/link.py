"""
One connection to NATS, with a publish path that does not wait and callbacks that do not queue.

Two things that `nats-py` offers cost too much here, or lose messages:

1. A subscription with a callback goes through a bounded queue and a task; when the queue is full,
   messages are dropped. A subscription with a *future* is answered in place, so a sink that looks
   like a future gets every message, in order, at once.
2. `request` makes a unique inbox token, a task and a timer per call. Here tokens are counted, and
   one sink finds the callback.

Both lean on attributes of `nats-py` that are not documented; `pyproject.toml` pins the minor
version and `Link.connect` checks that they are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import structlog
from fencepost.contracts import grants
from fencepost.contracts.authorization import API_IN_ROLE
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.runtime import address
from fencepost.runtime.access import Access
from fencepost.runtime.address import Address
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Above this much unsent data, what need not survive is dropped."""

SOCKET_BYTES_MAX: Final = 1024 * 1024
"""Above this much in the socket's own buffer, what is sent waits in the client's queue."""

AT_ONCE_S: Final = 0.001

DENIED_MAX: Final = 100

_DENIED: Final = re.compile(r'violation for (publish|subscription) to "([^"]+)"')

_MANY: Final = tuple(f"{grants.API}.{call}" for call in grants.MANY_ANSWERS)

_PRIVATE: Final = ("_pending", "_pending_data_size", "_flush_queue")

Taker = Callable[[Msg], None]
Answer = Callable[[Msg | None], None]

logger = structlog.get_logger(__name__)


class _Sink:
    """Looks like the future of a subscription, and takes every message at once."""

    __slots__ = ("_take",)

    def __init__(self, take: Taker) -> None:
        self._take = take

    def cancelled(self) -> bool:
        return False

    def done(self) -> bool:
        return False

    def set_result(self, msg: Msg) -> None:
        try:
            self._take(msg)
        except Exception:
            # A raising sink would end the connection's read loop, and with it everything else.
            logger.exception("message_handler_failed", subject=msg.subject)


class _Client(Client):
    """
    Says nothing to a server that does not encrypt, where the caller said that it must.

    The client library goes on in the open then: whoever stands in between would be told the
    password, and have everything that is said.
    """

    def __init__(self, *, must_encrypt: bool) -> None:
        super().__init__()
        self._must_encrypt = must_encrypt

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._must_encrypt and not info.get("tls_required"):
            raise NatsError(_IN_THE_OPEN)
        await super()._process_info(info, initial_connection)


_IN_THE_OPEN: Final = "nats: TLS expected, and the server does not offer it"


class DeniedError(UnknownError):
    """
    The server's permissions refuse this user what it asked; asking again gets the same answer.

    Still unknown, never absent: what was not allowed to be asked was not answered (S-73).
    """


class ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class Link:
    """One NATS connection. Make it with `connect`."""

    def __init__(self, nc: Client) -> None:
        self.nc = nc
        self._answers: dict[str, Answer] = {}
        self._called: dict[object, tuple[str, Callable[[DeniedError], None]]] = {}
        self.user = ""
        self.denied: dict[str, str] = {}
        """What was denied, by the server's words, with what to say of it; bounded."""
        self._count = 0
        self._inbox = ""
        self._inbox_length = 0
        self._loop = asyncio.get_running_loop()
        self._lost: list[Callable[[], None]] = []
        self._back: list[Callable[[], None]] = []
        self._transport: Any = None
        self._wrote_at = 0.0
        self._buffered: Callable[[], int] | None = None
        self.dropped = 0

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        access: Access | None = None,
        on_denied: Callable[[str], None] | None = None,
        connect_timeout_s: int = 5,
    ) -> Link:
        """
        Connects, and keeps reconnecting for ever.

        `url` is as `runtime.address` reads it; a user that it names goes before `access`'s.
        `on_denied` hears of every publish or subscription that the server's permissions refuse:
        the client library raises nothing there. Raises `RefusedError` when the server does not
        take the credentials, and for an address that is none.
        """
        where = address.require("nats_url", url)
        access = where.whom(access or Access())
        nc = _Client(must_encrypt=where.is_encrypted or access.is_encrypted)
        link = cls(nc)
        link.user = "" if access.is_nobody else access.who
        welcome: asyncio.Future[str] = link._loop.create_future()

        async def errored(error: Exception) -> None:
            text = str(error)
            if "permissions violation" in text.lower():
                logger.error("denied", user=access.who, detail=text)
                link._denied(text)
                if on_denied is not None:
                    on_denied(text)
            elif _is_unwelcome(error):
                logger.error("credentials_refused", user=access.who, detail=text)
                if not welcome.done():
                    welcome.set_result(text)
            else:
                logger.warning("nats_error", detail=text or type(error).__name__)

        async def disconnected() -> None:
            link._connection_lost()

        async def reconnected() -> None:
            link._connection_back()

        options: dict[str, Any] = {"reconnect_time_wait": 0.1}
        options |= access.options()
        connecting = asyncio.ensure_future(
            nc.connect(
                servers=where.urls,
                name=name,
                error_cb=errored,
                disconnected_cb=disconnected,
                reconnected_cb=reconnected,
                connect_timeout=connect_timeout_s,
                max_reconnect_attempts=-1,
                ping_interval=5,
                max_outstanding_pings=2,
                pending_size=2 * PENDING_BYTES_MAX,
                **options,
            )
        )
        await _until_welcome(connecting, welcome, where, access)
        missing = [attribute for attribute in _PRIVATE if not hasattr(nc, attribute)]
        if missing:
            await nc.close()
            raise RuntimeError(f"this nats-py is not supported: lacks {missing}")
        link._inbox = nc.new_inbox() + "."
        link._inbox_length = len(link._inbox)
        await link.subscribe_raw(link._inbox + "*", link._answered)
        return link

    @property
    def is_connected(self) -> bool:
        return bool(self.nc.is_connected)

    def on_lost(self, call: Callable[[], None]) -> None:
        """Calls back whenever the connection was lost."""
        self._lost.append(call)

    def off_lost(self, call: Callable[[], None]) -> None:
        self._lost.remove(call)

    def off_back(self, call: Callable[[], None]) -> None:
        self._back.remove(call)

    def on_back(self, call: Callable[[], None]) -> None:
        """Calls back whenever the connection is there again."""
        self._back.append(call)

    async def close(self) -> None:
        """Sends what is waiting and closes."""
        if not self.nc.is_closed:
            if self.nc.is_connected:
                try:
                    await self.nc.flush(timeout=2)
                except (NatsError, OSError, TimeoutError) as error:
                    logger.warning("flush_failed", detail=str(error))
            await self.nc.close()
        self._connection_lost()

    # Sending.

    def send(self, command: bytes, *, droppable: bool = True) -> bool:
        """Puts one protocol command on the wire soon, in order; never waits."""
        nc: Any = self.nc
        if nc.is_closed or (droppable and nc._pending_data_size > PENDING_BYTES_MAX):
            self.dropped += 1
            return False
        if nc.is_connected and not nc._pending:
            # The first command after a while goes out at once: somebody waits for it alone. What
            # follows on its heels goes through the queue, which writes more of it in one go.
            now = self._loop.time()
            if now - self._wrote_at >= AT_ONCE_S and self._socket_has_room(nc._transport):
                self._wrote_at = now
                nc._transport.write(command)
                return True
        nc._pending.append(command)
        nc._pending_data_size += len(command)
        if nc.is_connected and nc._flush_queue.empty():
            nc._flush_queue.put_nowait(self._loop.create_future())
        return True

    def _socket_has_room(self, transport: Any) -> bool:
        """
        Tells whether a command may be written past the client's own queue and its task.

        With a full socket it may not: the queue waits until there is room, and is bounded.
        """
        if transport is not self._transport:
            self._transport = transport
            writer = getattr(transport, "_io_writer", None)
            self._buffered = None if writer is None else writer.transport.get_write_buffer_size
        return self._buffered is not None and self._buffered() < SOCKET_BYTES_MAX

    def publish(self, subject: str, data: bytes, reply: str = "", headers: bytes = b"") -> bool:
        """
        Publishes without waiting. `headers` is the whole header block, or b"".

        Subjects come from `contracts.subjects` alone, which checks ids, so they are not checked
        again here.
        """
        return self.send(pub(subject, data, reply, headers))

    def expect(self, answer: Answer) -> str:
        """
        Makes a reply subject whose first message goes to `answer`.

        `answer` gets None when the connection was lost meanwhile.
        """
        self._count += 1
        token = str(self._count)
        self._answers[token] = answer
        return self._inbox + token

    def forget(self, reply: str) -> None:
        """No longer waits for an answer at this reply subject."""
        self._answers.pop(reply[self._inbox_length :], None)

    async def call(
        self, subject: str, data: bytes, *, timeout_s: float, headers: bytes = b""
    ) -> Msg:
        """
        Sends a request and returns its first answer.

        Raises `UnknownError` on a timeout, a lost connection or no responder: none of these says
        that the request was not carried out. `DeniedError`, one of these, as soon as the server
        says that this user may not ask. `RefusedError` for more than the server takes in one.
        """
        if len(data) > self.nc.max_payload:
            # The server would end the connection for it, and all that is on its way with it.
            raise RefusedError(
                "too_large",
                f"{subject}: expected at most {self.nc.max_payload} bytes, got {len(data)}",
                field="payload",
            )
        if subject.startswith(_MANY):
            return await self._call_apart(subject, data, timeout_s)
        future: asyncio.Future[Msg | None] = self._loop.create_future()

        def answered(msg: Msg | None) -> None:
            if not future.done():
                future.set_result(msg)

        def denied(error: DeniedError) -> None:
            if not future.done():
                future.set_exception(error)

        reply = self.expect(answered)
        self._called[reply] = (subject, denied)
        timer = self._loop.call_later(timeout_s, answered, None)
        try:
            if not self.send(pub(subject, data, reply, headers), droppable=False):
                raise UnknownError(f"{subject}: the connection is closed")
            msg = await future
        finally:
            timer.cancel()
            self.forget(reply)
            del self._called[reply]
        if msg is None:
            raise UnknownError(f"{subject}: no answer within {timeout_s:g} s, or connection lost")
        if msg.headers and not msg.data and msg.headers.get("Status") == "503":
            raise UnknownError(f"{subject}: no responder")
        return msg

    async def _call_apart(self, subject: str, data: bytes, timeout_s: float) -> Msg:
        """
        A request that the server may answer more than once, through an inbox of its own.

        Between accounts the server remembers each of these until nobody listens to its inbox.
        """
        future: asyncio.Future[Msg] = self._loop.create_future()

        def failed(error: UnknownError) -> None:
            if not future.done():
                future.set_exception(error)

        def lost() -> None:
            failed(UnknownError(f"{subject}: connection lost"))

        def take(msg: Msg) -> None:
            if not future.done():
                future.set_result(msg)

        inbox = self.nc.new_inbox()
        sub = await self.subscribe_raw(inbox, take)
        self.on_lost(lost)
        try:
            with self.asking(subject, failed):
                if not self.send(pub(subject, data, inbox), droppable=False):
                    raise UnknownError(f"{subject}: the connection is closed")
                async with asyncio.timeout(timeout_s):
                    return await future
        except TimeoutError as error:
            raise UnknownError(f"{subject}: no answer within {timeout_s:g} s") from error
        finally:
            self.off_lost(lost)
            if not self.nc.is_closed:
                await sub.unsubscribe()

    async def api(self, what: str, body: Any = None, *, timeout_s: float = 5.0) -> bytes:
        """Calls the JetStream API; the answer may be an error. Raises `UnknownError`."""
        data = b"" if body is None else msgspec.json.encode(body)
        return (await self.call(f"$JS.API.{what}", data, timeout_s=timeout_s)).data

    # Receiving.

    async def subscribe_raw(self, subject: str, take: Taker, queue: str = "") -> Any:
        """Hands every message to `take` in place; it must not block."""
        sink: Any = _Sink(take)
        try:
            return await self.nc.subscribe(subject, queue=queue, future=sink)
        except NatsError as error:
            raise UnknownError(f"{subject}: not subscribed: {error}") from error

    async def flush(self) -> None:
        """Returns when the server has taken everything that was sent before."""
        nc: Any = self.nc
        if nc.is_connected and nc._pending:
            # The client library's ping would overtake what still waits in its queue.
            await nc._flush_pending(force_flush=True)
        await nc.flush(timeout=5)

    def _answered(self, msg: Msg) -> None:
        answer = self._answers.pop(msg.subject[self._inbox_length :], None)
        if answer is not None:
            answer(msg)

    @contextlib.contextmanager
    def asking(self, subject: str, denied: Callable[[DeniedError], None]) -> Iterator[None]:
        """Calls `denied` when the server refuses a publish to this subject meanwhile."""
        token = object()
        self._called[token] = (subject, denied)
        try:
            yield
        finally:
            del self._called[token]

    def _denied(self, text: str) -> None:
        """Tells whoever waits for an answer that the server does not let them ask."""
        found = _DENIED.search(text)
        if found is None:
            return
        # The client library gives the server's words in lower case, and the server its own name
        # of what was asked, after the account's mapping.
        verb, subject = found.group(1), found.group(2)
        if subject.startswith(API_IN_ROLE + "."):
            subject = grants.API.lower() + subject.removeprefix(API_IN_ROLE)
        if verb == "subscription" and len(self.denied) < DENIED_MAX:
            self.denied[subject] = f"{self.user or 'this connection'} may not hear {subject}"
        for called, tell in tuple(self._called.values()):
            if called.lower() == subject:
                tell(
                    DeniedError(
                        f"{called}: denied: the server's permissions do not let "
                        f"{self.user or 'this connection'} publish there"
                    )
                )

    def why_deaf(self) -> str:
        """Says what the server does not let this connection hear, or nothing."""
        return "; ".join(self.denied.values())

    def _connection_lost(self) -> None:
        # What is allowed may be another set by the next connection.
        self.denied.clear()
        waiting, self._answers = self._answers, {}
        for answer in waiting.values():
            answer(None)
        for call in tuple(self._lost):
            call()

    def _connection_back(self) -> None:
        for call in tuple(self._back):
            call()


def _is_unwelcome(error: Exception) -> bool:
    """Tells whether the server, or its certificate, says that this will never be a connection."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    text = str(error).lower()
    return "authorization violation" in text or "tls required" in text or "tls expected" in text


async def _until_welcome(
    connecting: asyncio.Future[None], welcome: asyncio.Future[str], where: Address, access: Access
) -> None:
    """
    Waits for the first connection. Raises `RefusedError` when it is refused.

    The client library would try the same credentials for ever. Once connected it may: the users
    of a server may be read again at any time.
    """
    try:
        await asyncio.wait((connecting, welcome), return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            connecting.result()
            return
        raise RefusedError(
            "credentials_refused",
            f"NATS at {where.shown} does not take {access.who}: {welcome.result()}"
            " (FENCEPOST_NATS_CREDENTIALS, FENCEPOST_NATS_CA, FENCEPOST_NATS_CERT)",
            field="nats_credentials",
        )
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        welcome.cancel()


def pub(subject: str, data: bytes, reply: str = "", headers: bytes = b"") -> bytes:
    """One publish command of the NATS protocol."""
    if headers:
        length = len(headers)
        head = f"HPUB {subject} {reply} {length} {length + len(data)}\r\n"
        return b"".join((head.encode(), headers, data, b"\r\n"))
    return b"".join((f"PUB {subject} {reply} {len(data)}\r\n".encode(), data, b"\r\n"))


class StreamState(msgspec.Struct, frozen=True):
    messages: int = 0
    first_seq: int = 0
    last_seq: int = 0


class StreamInfo(msgspec.Struct, frozen=True):
    """What a stream's information says, or the server's error."""

    config: dict[str, Any] = {}
    created: str = ""
    ts: str = ""
    state: StreamState = StreamState()
    error: ApiError | None = None


_INFO = msgspec.json.Decoder(StreamInfo)


async def stream_info(link: Link, stream: str, *, timeout_s: float = 5.0) -> StreamInfo:
    """Reads a stream's information. Raises `UnknownError` when there is no decodable answer."""
    try:
        return _INFO.decode(await link.api(f"STREAM.INFO.{stream}", timeout_s=timeout_s))
    except msgspec.DecodeError as error:
        raise UnknownError(f"stream {stream}: undecodable information") from error
