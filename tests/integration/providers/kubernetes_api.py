"""
A small Kubernetes API server: pods and config maps of one namespace, with the semantics that matter.

Uids and their preconditions, finalizers and deletion timestamps, phases, container restarts,
`continue` tokens that expire, eviction, and exec: the command really runs, in a folder of its pod's own, whose
paths it gets in place of the pod's. Faults are set per request by `fault`.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

NAMESPACE = "sandboxes"
_SPECIAL = {"/fencepost": "home", "/workspace": "workspace"}


def failure(status: int, reason: str, kind: str = "", name: str = "") -> web.Response:
    details = {"name": name, "kind": kind} if kind else {}
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": f"{kind} {name}: {reason}".strip(),
        "reason": reason,
        "details": details,
        "code": status,
    }
    headers = {"Retry-After": "3"} if status == 429 else {}
    return web.json_response(body, status=status, headers=headers)


class KubernetesApi:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[str, dict[str, Any]] = {}
        self.config_maps: dict[str, dict[str, Any]] = {}
        self.fault: Callable[[web.Request], web.StreamResponse | None] = lambda _request: None
        self.after: Callable[[web.Request], web.StreamResponse | None] = lambda _request: None
        self.starts_pods = True
        self.keeps_stopped = False
        self.requests: list[str] = []
        self.graces: list[int | None] = []
        self.tokens: dict[str, list[str]] = {}
        self._versions = itertools.count(1)
        self._running: dict[str, set[asyncio.subprocess.Process]] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application(middlewares=[self._faults], client_max_size=1 << 22)
        base = f"/api/v1/namespaces/{NAMESPACE}"
        app.router.add_post(f"{base}/pods", self._create_pod)
        app.router.add_get(f"{base}/pods", self._list_pods)
        app.router.add_get(f"{base}/pods/{{name}}", self._read_pod)
        app.router.add_delete(f"{base}/pods/{{name}}", self._delete_pod)
        app.router.add_get(f"{base}/pods/{{name}}/exec", self._exec)
        app.router.add_post(f"{base}/configmaps", self._create_config_map)
        app.router.add_get(f"{base}/configmaps/{{name}}", self._read_config_map)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        for name in list(self.pods):
            await self.end(name)
        assert self._runner is not None
        await self._runner.cleanup()

    @web.middleware
    async def _faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if (answer := self.fault(request)) is not None:
            return answer
        done = await handler(request)
        if (answer := self.after(request)) is not None:
            return answer  # it was done, and its answer is lost
        return done

    # -- pods

    async def _create_pod(self, request: web.Request) -> web.Response:
        pod = await request.json()
        name = pod["metadata"]["name"]
        if name in self.pods:
            return failure(409, "AlreadyExists", "pods", name)
        pod["metadata"] |= {
            "uid": str(uuid.uuid4()),
            "namespace": NAMESPACE,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "resourceVersion": str(next(self._versions)),
        }
        pod["status"] = {"phase": "Pending"}
        self.pods[name] = pod
        for part in _SPECIAL.values():
            (self._disk(name) / part).mkdir(parents=True)
        if self.starts_pods:
            self.run(name)
        return web.json_response(pod, status=201)

    def _disk(self, name: str) -> Path:
        return self.folder / self.pods[name]["metadata"]["uid"]

    def run(self, name: str) -> None:
        self._set(name, "Running", {"running": {"startedAt": "2026-01-01T00:00:01Z"}})

    def _set(
        self, name: str, phase: str, state: dict[str, Any], restarts: int = 0, **more: Any
    ) -> None:
        container = {"name": "sandbox", "restartCount": restarts, "state": state, "ready": True}
        container |= {"image": "i", "imageID": "i"}
        self.pods[name]["status"] = {"phase": phase, "containerStatuses": [container], **more}

    async def kill_container(self, name: str, *, restarts: bool) -> None:
        """The container ends; another takes its place, or the pod is over."""
        await self._kill_processes(name)
        if restarts:
            count = self.pods[name]["status"]["containerStatuses"][0]["restartCount"] + 1
            running = {"running": {"startedAt": "2026-01-01T00:00:09Z"}}
            self._set(name, "Running", running, restarts=count)
        else:
            ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
            self._set(name, "Failed", ended)

    async def evict(self, name: str) -> None:
        """What a kubelet does under pressure: the pod fails and stays listed."""
        await self._kill_processes(name)
        ended = {"terminated": {"exitCode": 137, "reason": "Error"}}
        self._set(name, "Failed", ended, reason="Evicted", message="The node was low on memory")

    def begin_eviction(self, name: str) -> None:
        """What a drain or the eviction API does: the pod runs on for its grace; end it after."""
        pod = self.pods[name]
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
        pod["metadata"]["deletionGracePeriodSeconds"] = grace_s
        self.condemn(name, "EvictionByEvictionAPI")

    def condemn(self, name: str, reason: str) -> None:
        """A condition that says that a disruption is to come."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
        self.pods[name]["status"]["conditions"] = [condition]

    def lose_node(self, name: str) -> None:
        """The node is not heard of: the phase is written by a controller, not by its kubelet."""
        self.pods[name]["status"]["phase"] = "Failed"
        self.pods[name]["status"]["reason"] = "NodeLost"

    async def _kill_processes(self, name: str) -> None:
        for process in self._running.pop(self.pods[name]["metadata"]["uid"], set()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    async def end(self, name: str) -> None:
        """The object goes, with all that ran in it."""
        await self._kill_processes(name)
        shutil.rmtree(self._disk(name), ignore_errors=True)
        del self.pods[name]

    async def _read_pod(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.pods:
            return failure(404, "NotFound", "pods", name)
        return web.json_response(self.pods[name])

    async def _delete_pod(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        options = await request.json() if request.can_read_body else {}
        self.graces.append(options.get("gracePeriodSeconds"))
        pod = self.pods.get(name)
        if pod is None:
            return failure(404, "NotFound", "pods", name)
        wanted = (options.get("preconditions") or {}).get("uid")
        if wanted not in (None, pod["metadata"]["uid"]):
            return failure(409, "Conflict", "pods", name)
        if pod["metadata"].get("finalizers") or self.keeps_stopped:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
            await self._kill_processes(name)
        else:
            await self.end(name)
        return web.json_response(pod)

    async def _list_pods(self, request: web.Request) -> web.Response:
        wanted = dict(
            part.split("=", 1) for part in request.query.get("labelSelector", "").split(",") if part
        )
        token = request.query.get("continue", "")
        if token and token not in self.tokens:
            return failure(410, "Expired")
        names = self.tokens.pop(token) if token else sorted(self.pods)
        limit = int(request.query.get("limit", "0")) or len(names) or 1
        page, rest = names[:limit], names[limit:]
        items = [self.pods[name] for name in page if name in self.pods]
        items = [
            pod
            for pod in items
            if all(pod["metadata"]["labels"].get(key) == value for key, value in wanted.items())
        ]
        following = ""
        if rest:
            following = f"token-{next(self._versions)}"
            self.tokens[following] = rest
        body = {
            "kind": "PodList",
            "apiVersion": "v1",
            "metadata": {"resourceVersion": str(next(self._versions)), "continue": following},
            "items": items,
        }
        return web.json_response(body)

    # -- exec

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self.pods:
            return failure(404, "NotFound", "pods", name)
        if "running" not in self.pods[name]["status"].get("containerStatuses", [{}])[0].get(
            "state", {}
        ):
            return failure(400, "BadRequest", "pods", name)
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",), max_msg_size=1 << 24)
        await socket.prepare(request)
        disk = self._disk(name)
        words = [self._inside(word, disk) for word in request.query.getall("command")]
        uid = self.pods[name]["metadata"]["uid"]
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=disk / "workspace",
                start_new_session=True,
            )
        except OSError as error:
            status = {"status": "Failure", "message": f"exec failed: {error}"}
            await socket.send_bytes(b"\3" + json.dumps(status).encode())
            await socket.close()
            return socket
        self._running.setdefault(uid, set()).add(process)
        await self._carry(socket, process)
        self._running.get(uid, set()).discard(process)
        return socket

    def _inside(self, word: str, disk: Path) -> str:
        for path, part in _SPECIAL.items():
            if word == path or word.startswith(path + "/"):
                return str(disk / part) + word[len(path) :]
        return sys.executable if word == "python3" else word

    async def _carry(self, socket: web.WebSocketResponse, process: Any) -> None:
        async def out(stream: asyncio.StreamReader, number: bytes) -> None:
            while data := await stream.read(1 << 16):
                with contextlib.suppress(ConnectionError):
                    await socket.send_bytes(number + data)

        async def inward() -> None:
            async for message in socket:
                if message.type is WSMsgType.BINARY and message.data[:1] == b"\0":
                    with contextlib.suppress(ConnectionError):
                        process.stdin.write(message.data[1:])
                        await process.stdin.drain()
            process.stdin.close()

        inwards = asyncio.create_task(inward())
        try:
            await asyncio.gather(out(process.stdout, b"\1"), out(process.stderr, b"\2"))
            code = await process.wait()
        except asyncio.CancelledError:
            process._transport.close()
            raise
        if code == 0:
            status: dict[str, Any] = {"status": "Success"}
        else:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            status = {"status": "Failure", "details": {"causes": causes}}
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(b"\3" + json.dumps(status).encode())
        await socket.close()
        inwards.cancel()
        await asyncio.gather(inwards, return_exceptions=True)
        process._transport.close()

    # -- config maps

    async def _create_config_map(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if name in self.config_maps:
            return failure(409, "AlreadyExists", "configmaps", name)
        self.config_maps[name] = body
        return web.json_response(body, status=201)

    async def _read_config_map(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.config_maps:
            return failure(404, "NotFound", "configmaps", name)
        return web.json_response(self.config_maps[name])
