"""
A provider whose `stop`, `observe` and `find` are HTTP requests, and the server that answers them.

Behind the server is the real `process` provider, which also makes the sandboxes and their
channels. The server can be told to answer wrongly about single sandboxes; it counts what it is
asked. The mapping is that of `fencepost.providers.protocol`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import httpx
from fencepost.core.facts import Ref
from fencepost.core.steps import SandboxSpec
from fencepost.providers.process import ProcessProvider
from fencepost.providers.protocol import (
    Absent,
    Channel,
    CreateAnswer,
    Created,
    FindAnswer,
    Notice,
    Observation,
    Page,
    ProviderTraits,
    StopAnswer,
    Unknown,
)

ANSWER_S: Final = 1.5
_CHUNK: Final = 65_536
_RST: Final = struct.pack("ii", 1, 0)
"""Linger for no time at all: closing resets the connection."""


class Reply(NamedTuple):
    status: int
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = {}


Answer: TypeAlias = Reply | Literal["hang", "reset", "truth"]


class Fault(NamedTuple):
    """
    How the server answers about one sandbox. `truth`: as it is.

    In a body `$id` and `$instance` stand for the sandbox's own. `ends`: it ends before the
    server answers. `address` False: the provider has no address to ask.
    """

    stop: Answer = "truth"
    observe: Answer = "truth"
    ends: bool = False
    address: bool = True


class StubServer:
    """Answers for the runtime. `stops` has the monotonic times of the stop requests of each id."""

    def __init__(self, runtime: ProcessProvider) -> None:
        self.runtime = runtime
        self.faults: dict[str, Fault] = {}
        self.stops: dict[str, list[float]] = defaultdict(list)
        self.url = ""
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split("\r\n")[0].split()
            reply = await self._answer(method, *path.strip("/").split("/"))
            if reply == "hang":
                await reader.read()  # until whoever asked gives up
            elif reply == "reset":
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
                writer.transport.abort()
            else:
                assert isinstance(reply, Reply)
                writer.write(_wire(reply))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # whoever asked has gone
        finally:
            self._answering.discard(task)
            writer.close()

    async def _answer(self, method: str, what: str, name: str, instance: str = "") -> Answer:
        if what == "creates":
            found = await self.runtime.find(name)
            if isinstance(found, Created):
                return Reply(200, {"create_id": name, **_named(found.ref)})
            return Reply(404) if isinstance(found, Absent) else Reply(503)
        ref = Ref(
            authority=self.runtime.traits.authority,
            provider=self.runtime.traits.name,
            native_id=name,
            instance=instance,
        )
        fault = self.faults.get(name, Fault())
        if method == "POST":
            self.stops[name].append(time.monotonic())
            if fault.ends:
                await self.runtime.stop(ref, instance)
            return _about(ref, fault.stop) or await self._stop(ref)
        return _about(ref, fault.observe) or await self._observe(ref)

    async def _stop(self, ref: Ref) -> Reply:
        said = await self.runtime.stop(ref, ref.instance)
        if said.answer == "accepted":
            return Reply(200, _named(ref))
        return Reply(404 if said.answer == "not_found" else 409, {"detail": said.detail})

    async def _observe(self, ref: Ref) -> Reply:
        seen = await self.runtime.observe(ref)
        if seen.state in ("present", "terminating"):
            return Reply(200, {**_named(ref), "state": seen.state})
        return Reply(404) if seen.state == "gone" else Reply(503)


class HttpProvider:
    """`process` for what is made, HTTP for what ends: one bound for each request."""

    def __init__(self, runtime: ProcessProvider, server: StubServer) -> None:
        self._runtime = runtime
        self._server = server
        self._http = httpx.AsyncClient(
            timeout=ANSWER_S, trust_env=False, headers={"connection": "close"}
        )
        self.refs: dict[str, Ref] = {}

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def traits(self) -> ProviderTraits:
        return self._runtime.traits

    async def create(
        self, create_id: str, spec: SandboxSpec, labels: Mapping[str, str]
    ) -> CreateAnswer:
        made = await self._runtime.create(create_id, spec, labels)
        if isinstance(made, Created):
            self.refs[create_id] = made.ref
        return made

    async def list(self, token: str = "") -> Page:
        return await self._runtime.list(token)

    async def channel(self, ref: Ref, spec: SandboxSpec) -> Channel:
        return await self._runtime.channel(ref, spec)

    async def settle(self, create_id: str) -> bool:
        return await self._runtime.settle(create_id)

    async def notices(self, refs: Collection[Ref]) -> Sequence[Notice]:
        return await self._runtime.notices(refs)

    async def reclaim(self, ref: Ref) -> bool:
        return await self._runtime.reclaim(ref)

    async def stop(self, ref: Ref, expect_instance: str) -> StopAnswer:
        if expect_instance == "" or expect_instance != ref.instance:
            return StopAnswer(answer="refused", detail="a stop must name the ref's instance")
        if not self._server.faults.get(ref.native_id, Fault()).address:
            return StopAnswer(answer="unconfigured", detail="no address")
        try:
            response = await self._ask("POST", "sandboxes", ref.native_id, ref.instance)
        except httpx.TimeoutException:
            return StopAnswer(answer="timeout", detail=f"no answer within {ANSWER_S:g} s")
        except httpx.HTTPError as error:
            return StopAnswer(answer="unreachable", detail=type(error).__name__)
        status = response.status_code
        detail = f"HTTP {status}"
        if response.is_success:
            return _stopped(ref, _body(response), detail)
        if status in (404, 410):
            return StopAnswer(answer="not_found", detail=detail)
        if status in (405, 501):
            return StopAnswer(answer="unsupported", detail=detail)
        seconds = response.headers.get("retry-after", "")
        retry_after_ms = int(seconds) * 1000 if seconds.isdecimal() else 0
        return StopAnswer(
            answer="unreachable" if status >= 500 else "refused",
            detail=detail,
            retry_after_ms=retry_after_ms,
        )

    async def observe(self, ref: Ref) -> Observation:
        if not self._server.faults.get(ref.native_id, Fault()).address:
            return Observation(state="unknown", detail="no address")
        try:
            response = await self._ask("GET", "sandboxes", ref.native_id, ref.instance)
        except httpx.HTTPError as error:
            return Observation(state="unknown", detail=type(error).__name__)
        detail = f"HTTP {response.status_code}"
        if response.status_code in (404, 410):
            return Observation(state="gone", detail=detail)
        body = _body(response)
        if response.status_code != 200 or body.get("id") != ref.native_id:
            return Observation(state="unknown", detail=detail)
        instance = body.get("instance")
        if isinstance(instance, str) and instance not in ("", ref.instance):
            return Observation(state="gone", instance=instance)
        state = body.get("state")
        if instance != ref.instance or state not in ("present", "terminating"):
            return Observation(state="unknown", detail=detail)
        return Observation(state=state, instance=ref.instance)

    async def find(self, create_id: str) -> FindAnswer:
        try:
            response = await self._ask("GET", "creates", create_id)
        except httpx.HTTPError as error:
            return Unknown(reason=type(error).__name__)
        body = _body(response)
        if response.status_code == 200 and body.get("create_id") == create_id:
            ref = Ref(
                authority=self.traits.authority,
                provider=self.traits.name,
                native_id=body["id"],
                instance=body["instance"],
            )
            return Created(ref=ref, capabilities=self.traits.capabilities)
        if response.status_code == 404:
            return Absent()
        return Unknown(reason=f"HTTP {response.status_code}")

    async def _ask(self, method: str, *path: str) -> httpx.Response:
        return await self._http.request(method, "/".join((self._server.url, *path)))


def _stopped(ref: Ref, body: Mapping[str, Any], detail: str) -> StopAnswer:
    """What a 2xx says: something about this instance only where it names it."""
    id_, instance = body.get("id"), body.get("instance")
    if id_ != ref.native_id or not isinstance(instance, str) or not instance:
        return StopAnswer(answer="unreachable", detail=f"{detail} about {id_ or 'nothing'}")
    if instance != ref.instance:
        return StopAnswer(answer="refused_other_instance", instance=instance, detail=detail)
    return StopAnswer(answer="accepted", instance=instance, detail=detail)


def _body(response: httpx.Response) -> Mapping[str, Any]:
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _named(ref: Ref) -> dict[str, str]:
    return {"id": ref.native_id, "instance": ref.instance}


def _about(ref: Ref, answer: Answer) -> Answer | None:
    """A prepared answer with the sandbox's names filled in, or None for the truth."""
    if answer == "truth":
        return None
    if not isinstance(answer, Reply) or answer.body is None:
        return answer
    names = {"$id": ref.native_id, "$instance": ref.instance}
    return answer._replace(
        body={key: names.get(value, value) for key, value in answer.body.items()}
    )


def _wire(reply: Reply) -> bytes:
    body = b"" if reply.body is None else json.dumps(reply.body).encode()
    headers = {"content-length": str(len(body)), "connection": "close", **reply.headers}
    lines = [f"HTTP/1.1 {reply.status} -", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
