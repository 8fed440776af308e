"""
A Docker engine as small as the provider needs one, in memory, behind a unix socket.

Containers are folders and states; what is started in one with `exec` is a real process of this
machine, with the sandbox's folder in the place of `/sandbox`. `fail` makes it answer calls as an
engine in trouble does.
"""

import asyncio
import contextlib
import json
import re
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from fencepost.providers.docker import container

NEVER = "0001-01-01T00:00:00Z"


class Answer(Exception):
    def __init__(self, status: int, body: object = None) -> None:
        super().__init__(status)
        self.status = status
        self.body = {"message": body} if isinstance(body, str) else body


@dataclass
class Container:
    id: str
    name: str
    config: dict
    home: Path
    status: str = "created"
    started_at: str = NEVER
    starts: int = 0
    exit_code: int = 0
    attached: list[asyncio.Queue] = field(default_factory=list)
    execs: list["Exec"] = field(default_factory=list)

    def say(self, line: str) -> None:
        for queue in self.attached:
            queue.put_nowait(line.encode())

    def told(self) -> dict:
        return {
            "Id": self.id,
            "Name": f"/{self.name}",
            "Config": {**self.config, "Tty": False},
            "State": {
                "Status": self.status,
                "Running": self.status in ("running", "paused", "restarting"),
                "Restarting": self.status == "restarting",
                "StartedAt": self.started_at,
                "ExitCode": self.exit_code,
            },
        }


@dataclass
class Exec:
    id: str
    container: Container
    config: dict
    process: asyncio.subprocess.Process | None = None

    def told(self) -> dict:
        code = None if self.process is None else self.process.returncode
        return {
            "ID": self.id,
            "Running": self.process is not None and code is None,
            "ExitCode": code,
            "ProcessConfig": {"tty": False},
        }


class FakeEngine:
    """`images`: name -> the version of its Python, "" where it has none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images = {"with-python": "3.11", "with-old-python": "3.7", "without-python": ""}
        self.containers: dict[str, Container] = {}
        self.volumes: dict[str, dict] = {}
        self.execs: dict[str, Exec] = {}
        self.calls: list[str] = []
        self.fail: Callable[[str, str], Answer | None] = lambda method, path: None
        self.lose_answer: Callable[[str, str], bool] = lambda method, path: False
        self.before: Callable[[str, str], None] = lambda method, path: None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task] = set()
        self.events: list[dict] = []
        self.listeners: list[asyncio.Queue] = []

    @property
    def url(self) -> str:
        return f"unix://{self.folder / 'engine.sock'}"

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(
            self._serve, self.folder / "engine.sock", limit=1 << 22
        )

    async def stop(self) -> None:
        """Ends the engine and every process; what it knows stays."""
        if self._server is not None:
            self._server.close()
        for item in self.containers.values():
            await self.end_processes(item)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- what happens behind a provider's back -------------------------------------------------

    def only(self) -> Container:
        (found,) = self.containers.values()
        return found

    async def end_processes(self, item: Container) -> None:
        for started in item.execs:
            if started.process is not None and started.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    started.process.kill()
                await started.process.wait()

    async def kill(self, item: Container, code: int = 137) -> None:
        """As `docker kill`, or the kernel when memory is out."""
        item.status, item.exit_code = "exited", code
        await self.end_processes(item)

    def signal(self, item: Container, number: int = 15) -> None:
        """As `docker kill --signal`: the container's program hears it, and so do listeners."""
        now = time.time_ns()
        event = {
            "Type": "container",
            "Action": "kill",
            "Actor": {"ID": item.id, "Attributes": {"signal": str(number)}},
            "time": now // 10**9,
            "timeNano": now,
        }
        self.events.append(event)
        for queue in self.listeners:
            queue.put_nowait(event)

    async def start_container(self, item: Container) -> None:
        """As `docker start`: a second start of the program ends at once, as it does for real."""
        if item.status in ("running", "paused"):
            return
        version = self.images[item.config["Image"]]
        if not version:
            item.status, item.exit_code = "created", 127
            raise Answer(400, 'exec: "python3": executable file not found in $PATH')
        item.starts += 1
        item.started_at = f"2026-01-01T00:00:{item.starts:02d}.{time.monotonic_ns()}Z"
        if tuple(map(int, version.split("."))) < (3, 8):
            item.status, item.exit_code = "exited", container.TOO_OLD
            item.say(f"too old {version}\n")
        elif (item.home / ".started").exists():
            item.status, item.exit_code = "exited", container.STARTED_AGAIN
        else:
            (item.home / "workspace").mkdir(parents=True)
            (item.home / ".started").touch()
            item.status = "running"
            item.say(f"ready {version}\n")

    async def restart(self, item: Container) -> None:
        await self.kill(item)
        await self.start_container(item)

    async def remove(self, item: Container) -> None:
        self.containers.pop(item.id, None)
        await self.kill(item)
        shutil.rmtree(item.home, ignore_errors=True)

    # -- HTTP ----------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        line, _, rest = head.partition(b"\r\n")
        method, target, _ = line.decode().split(" ")
        size = re.search(rb"(?i)content-length: *(\d+)", rest)
        body = await reader.readexactly(int(size[1])) if size else b""
        url = urlsplit(target)
        path = re.sub(r"^/v[0-9.]+", "", unquote(url.path))
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.calls.append(f"{method} {path}")
        try:
            self.before(method, path)
            if (failure := self.fail(method, path)) is not None:
                raise failure
            if method == "POST" and re.fullmatch(
                r"/(containers/\w[\w.-]*/attach|exec/\w+/start)", path
            ):
                if not json.loads(body or b"{}").get("Detach", False):
                    await self._hijack(path, reader, writer)
                    return False
            if (method, path) == ("GET", "/events"):
                await self._follow(query, writer)
                return False
            status, answer = await self._route(method, path, query, json.loads(body or b"{}"))
        except Answer as said:
            status, answer = said.status, said.body
        if self.lose_answer(method, path):
            return False
        text = b"" if answer is None else json.dumps(answer).encode()
        writer.write(
            f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\n\r\n".encode()
            + text
        )
        await writer.drain()
        return True

    async def _route(self, method: str, path: str, query: dict, body: dict) -> tuple[int, object]:
        match method, path.strip("/").split("/"):
            case "GET", ["version"]:
                return 200, {"ApiVersion": "1.41"}
            case "POST", ["images", "create"]:
                raise Answer(404, "pull access denied")
            case _, ["volumes", *rest]:
                return self._volume(method, rest, body)
            case "POST", ["containers", "create"]:
                return self._create(query.get("name", ""), body)
            case "GET", ["containers", "json"]:
                return 200, self._listed(json.loads(query["filters"])["label"][0])
            case "GET", ["exec", ref, "json"]:
                return 200, self._exec(ref).told()
            case "POST", ["exec", ref, "start"]:
                await self._run(self._exec(ref), piped=False)
                return 200, None
            case _, ["containers", ref, *rest]:
                return await self._container(method, self._get(ref), rest, body)
        raise Answer(501, f"the fake does not know {method} {path}")

    async def _container(
        self, method: str, item: Container, rest: list[str], body: dict
    ) -> tuple[int, object]:
        match method, rest:
            case "GET", ["json"]:
                return 200, item.told()
            case "DELETE", []:
                await self.remove(item)
                return 204, None
            case "POST", ["start"]:
                was = item.status
                await self.start_container(item)
                return 304 if was == "running" else 204, None
            case "POST", ["exec"]:
                if item.status != "running":
                    raise Answer(409, f"Container {item.id} is not running")
                made = Exec(secrets.token_hex(32), item, body)
                item.execs.append(made)
                self.execs[made.id] = made
                return 201, {"Id": made.id}
        raise Answer(501, f"the fake does not know {method} {rest}")

    def _volume(self, method: str, rest: list[str], body: dict) -> tuple[int, object]:
        match method, rest:
            case "POST", ["create"]:
                made = {"CreatedAt": "2026-01-01T00:00:00Z", **body}
                return 201, self.volumes.setdefault(body["Name"], made)
            case "GET", []:
                return 200, {"Volumes": list(self.volumes.values())}
            case "GET", [name] if name in self.volumes:
                return 200, self.volumes[name]
            case "DELETE", [name] if name in self.volumes:
                del self.volumes[name]
                return 204, None
        raise Answer(404, "no such volume")

    def _create(self, name: str, body: dict) -> tuple[int, object]:
        if any(item.name == name for item in self.containers.values()):
            raise Answer(409, f'The container name "/{name}" is already in use')
        if body["Image"] not in self.images:
            raise Answer(404, f"No such image: {body['Image']}")
        made = Container(secrets.token_hex(32), name, body, self.folder / secrets.token_hex(4))
        made.home.mkdir()
        self.containers[made.id] = made
        return 201, {"Id": made.id, "Warnings": []}

    def _listed(self, label: str) -> list[dict]:
        key, _, value = label.partition("=")
        return [
            {"Id": item.id, "Names": [f"/{item.name}"], "Labels": item.config["Labels"]}
            for item in self.containers.values()
            if item.config["Labels"].get(key) == value
        ]

    def _get(self, ref: str) -> Container:
        for item in self.containers.values():
            if ref in (item.id, item.name):
                return item
        raise Answer(404, f"No such container: {ref}")

    def _exec(self, ref: str) -> Exec:
        if ref not in self.execs:
            raise Answer(404, f"No such exec instance: {ref}")
        return self.execs[ref]

    # -- streams -------------------------------------------------------------------------------

    async def _follow(self, query: dict, writer: asyncio.StreamWriter) -> None:
        """Events since a time of its own, then new ones, until the listener or the engine ends."""
        filters = json.loads(query["filters"])
        assert (filters["type"], filters["event"]) == (["container"], ["kill"])
        queue: asyncio.Queue = asyncio.Queue()
        since = float(query["since"]) if "since" in query else time.time()
        for event in self.events:
            if event["timeNano"] / 10**9 >= since:
                queue.put_nowait(event)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        self.listeners.append(queue)
        try:
            while (event := await queue.get()) is not None:
                text = json.dumps(event).encode() + b"\n"
                writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
                await writer.drain()
        finally:
            self.listeners.remove(queue)

    async def _hijack(
        self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        kind, ref, _ = path.strip("/").split("/")
        target = self._get(ref) if kind == "containers" else self._exec(ref)
        queue: asyncio.Queue = asyncio.Queue()
        if isinstance(target, Container):
            target.attached.append(queue)
        writer.write(
            b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n"
            b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        if isinstance(target, Container):
            await self._attach(queue, writer)
        else:
            await self._talk(target, reader, writer)

    async def _attach(self, queue: asyncio.Queue, writer: asyncio.StreamWriter) -> None:
        _send(writer, 1, await queue.get())
        await writer.drain()

    async def _talk(
        self, started: Exec, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        process = await self._run(started, piped=True)
        assert process.stdin is not None

        async def take() -> None:
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    process.stdin.write(data)
                    await process.stdin.drain()
            process.stdin.close()

        async def give(number: int, stream: asyncio.StreamReader | None) -> None:
            assert stream is not None
            while data := await stream.read(1 << 16):
                with contextlib.suppress(ConnectionError):
                    _send(writer, number, data)
                    await writer.drain()

        taking = asyncio.create_task(take())
        try:
            await asyncio.gather(give(1, process.stdout), give(2, process.stderr))
            await process.wait()
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            process._transport.close()

    async def _run(self, started: Exec, *, piped: bool) -> asyncio.subprocess.Process:
        words = list(started.config["Cmd"])
        if "--tool-uid" in words:  # its processes are ours here, whoever we are
            at = words.index("--tool-uid")
            del words[at : at + 2]
        home = str(started.container.home)
        words = [sys.executable, *(word.replace(container.HOME, home) for word in words[1:])]
        given = dict(item.split("=", 1) for item in started.config.get("Env") or ())
        stream = asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL
        started.process = await asyncio.create_subprocess_exec(
            *words, env=given, stdin=stream, stdout=stream, stderr=stream
        )
        if not piped:
            await started.process.wait()
        return started.process


def _send(writer: asyncio.StreamWriter, number: int, data: bytes) -> None:
    writer.write(bytes([number, 0, 0, 0]) + len(data).to_bytes(4, "big") + data)


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(folder)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
