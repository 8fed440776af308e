"""
Sandboxes on SWE-ReX servers, one a server, out of a pool that gateways share.

The pool is a folder: `<name>.json` for each server (`{"url": …, "token": …}` or `"token_file"`, and
where they differ from the usual, `"base"` and `"python"`), beside `.assigned`, in which a create id
gets its server by one exclusive link, before that server is asked. So a create id is tried on
one server only, whichever gateway asks, and one whose server does not answer is ambiguous.

Rule 1: SWE-ReX says nothing of generations: its write answers `200 {}`, and a server that was
replaced at the same address answers as the first one did. Everything concluded here comes from
our own claim on the server's disk, whose instance is minted there.
Rule 2: a server that answers whole and has another claim, or none, is evidence that the former
instance is gone, because an address names one server at a time. A server that does not answer,
or refuses our token, is evidence of nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
from fencepost import toolhost
from fencepost.core.errors import RefusedError
from fencepost.core.facts import Capabilities, Ref
from fencepost.core.steps import SandboxSpec
from fencepost.providers.protocol import (
    LABEL_CREATE,
    LABEL_DEPLOYMENT,
    Absent,
    ChannelRefusedError,
    CreateAmbiguous,
    CreateAnswer,
    Created,
    CreateRefused,
    FindAnswer,
    Listed,
    Observation,
    Page,
    Presence,
    ProviderTraits,
    StopAnswer,
    StopWord,
    Unknown,
)
from fencepost.providers.swerex.channel import PumpedChannel
from fencepost.providers.swerex.server import Calls, Said, Server, Silence

NAME: Final = "swerex"
_ASSIGNED: Final = ".assigned"
_SETTLED: Final = "(settled)"
_TIMEOUT_S: Final = 45.0
_SILENT_WORDS: Final[dict[str, StopWord]] = {
    "timeout": "timeout",
    "refused": "refused",
    "unreachable": "unreachable",
    "unusable": "unreachable",
}


def load_pool(folder: Path) -> dict[str, Server]:
    """Reads the pool's servers by name. Raises `RefusedError` naming the file and the field."""
    servers: dict[str, Server] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _wrong(path, "file", f"a JSON object ({error})") from error
        if not isinstance(raw, dict):
            raise _wrong(path, "file", "a JSON object")
        for field in raw:
            if field not in ("url", "token", "token_file", "base", "python"):
                raise _wrong(path, field, "url, token, token_file, base or python")
        url = raw.get("url")
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise _wrong(path, "url", "an http:// or https:// address")
        servers[path.stem] = Server(
            name=path.stem,
            url=url,
            token=_token(path, raw),
            **{name: str(raw[name]) for name in ("base", "python") if name in raw},
        )
    return servers


def _token(path: Path, raw: Mapping[str, Any]) -> str:
    if "token_file" in raw:
        try:
            return (path.parent / str(raw["token_file"])).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise _wrong(path, "token_file", f"a readable file ({error.strerror})") from error
    token = raw.get("token")
    if not isinstance(token, str) or not token:
        raise _wrong(path, "token", "the server's token, or token_file")
    return token


def _wrong(path: Path, field: str, expected: str) -> RefusedError:
    return RefusedError(
        "bad_setting", f"{path.name}: {field}: expected {expected}", field=field, expected=expected
    )


class SwerexProvider:
    """
    `pool` is the folder above; its servers are read again at every create, so that some can be
    added while gateways run. Call `close` at the end.
    """

    def __init__(self, pool: Path, *, deployment: str = "local", heartbeat_ms: int = 1000) -> None:
        self._pool = pool.resolve()
        (self._pool / _ASSIGNED).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._deployment = deployment
        self._heartbeat_ms = heartbeat_ms
        self._servers = load_pool(self._pool)
        self._http: aiohttp.ClientSession | None = None
        self._agent = (Path(__file__).parent / "agent.py").read_text(encoding="utf-8")
        self._traits = ProviderTraits(
            name=NAME,
            authority=f"swerex-{self._identity()}",
            instance="native",
            stop="sync",
            list="complete",
            auto_resume=False,
            snapshot=False,
            settles_creates=True,
            capabilities=Capabilities(
                generation=True,
                observes_gone=True,
                readonly_commands=False,
                isolation="none",
                power_loss_is_new_instance=False,
            ),
        )

    def _identity(self) -> str:
        witness = self._pool / ".fencepost-pool"
        if not witness.exists():
            mine = self._pool / f".fencepost-pool.{secrets.token_hex(4)}"
            mine.write_text(secrets.token_hex(12), encoding="ascii")
            with contextlib.suppress(FileExistsError):
                os.link(mine, witness)
            mine.unlink()
        return witness.read_text(encoding="ascii")

    @property
    def traits(self) -> ProviderTraits:
        return self._traits

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    def _calls(self) -> Calls:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        return Calls(self._http, agent=self._agent, timeout_s=_TIMEOUT_S)

    async def _ask(self, server: Server, verb: str, **ask: object) -> Said | Silence:
        return await self._calls().agent(server, verb, ask)

    # -- which server ---------------------------------------------------------------------------

    def _key(self, create_id: str) -> str:
        return hashlib.sha256(f"{self._deployment}\n{create_id}".encode()).hexdigest()[:32]

    def _assigned(self, create_id: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self._pool / _ASSIGNED / self._key(create_id)).read_text(encoding="utf-8")
        return ""

    def _assign(self, create_id: str, name: str) -> str:
        """Gives a create id its server, once: the first of several gateways decides."""
        path = self._pool / _ASSIGNED / self._key(create_id)
        mine = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        mine.write_text(name, encoding="utf-8")
        try:
            os.link(mine, path)
        except FileExistsError:
            return path.read_text(encoding="utf-8")
        finally:
            mine.unlink()
        return name

    def _release(self, create_id: str, name: str) -> None:
        """Takes an assignment back that made nothing; another gateway's newer one stands."""
        if self._assigned(create_id) == name:
            (self._pool / _ASSIGNED / self._key(create_id)).unlink(missing_ok=True)

    async def create(
        self, create_id: str, spec: SandboxSpec, labels: Mapping[str, str]
    ) -> CreateAnswer:
        if spec.image:
            return CreateRefused(reason="spec.image: a SWE-ReX server has the image it has")
        self._servers = load_pool(self._pool)
        for server in self._by_preference(create_id):
            name = self._assigned(create_id) or self._assign(create_id, server.name)
            if name == _SETTLED:
                return CreateRefused(reason="settled")
            chosen = self._servers.get(name)
            if chosen is None:
                return CreateAmbiguous(reason=f"its server {name} is not in the pool any more")
            answer = await self._ask(
                chosen,
                "claim",
                create_id=create_id,
                labels={LABEL_DEPLOYMENT: self._deployment, **labels, LABEL_CREATE: create_id},
            )
            match answer:
                case Said("claimed", body):
                    if self._assigned(create_id) == _SETTLED:
                        ref = self._ref(name, body["claim"]["instance"])
                        await self.stop(ref, ref.instance)
                        return CreateRefused(reason="settled")
                    return self._created(self._ref(name, body["claim"]["instance"]))
                case Said("occupied"):
                    self._release(create_id, name)
                case Said(state, body):
                    return CreateAmbiguous(reason=f"{name}: {state} {body.get('detail', '')}")
                case Silence(fault, detail):
                    return CreateAmbiguous(reason=f"{name}: {fault}: {detail}")
        return CreateRefused(reason=f"no free server among {len(self._servers)} of the pool")

    def _by_preference(self, create_id: str) -> list[Server]:
        """Spreads create ids over the pool; the same order for every gateway."""

        def rank(server: Server) -> str:
            return hashlib.sha256(f"{create_id}\n{server.name}".encode()).hexdigest()

        return sorted(self._servers.values(), key=rank)

    # -- looking --------------------------------------------------------------------------------

    async def find(self, create_id: str) -> FindAnswer:
        name = self._assigned(create_id)
        if name in ("", _SETTLED):
            return Absent()  # no server is asked before it is assigned
        server = self._servers.get(name)
        if server is None:
            return Unknown(reason=f"its server {name} is not in the pool any more")
        answer = await self._ask(server, "look")
        if isinstance(answer, Silence) or answer.state != "seen":
            return Unknown(reason=_told(answer))
        held = answer.body["claim"]
        if held is None or held["create_id"] != create_id:
            return Absent()
        return self._created(self._ref(name, held["instance"]))

    async def list(self, token: str = "") -> Page:
        del token
        servers = list(self._servers.values())
        answers = await asyncio.gather(*(self._ask(server, "look") for server in servers))
        items: list[Listed] = []
        complete = True
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, Silence) or answer.state != "seen":
                complete = False
                continue
            found = [("present", answer.body["claim"])] if answer.body["claim"] else []
            found += [("terminating", claim) for claim in answer.body["leaving"]]
            for state, claim in found:
                labels = claim["labels"]
                if labels.get(LABEL_DEPLOYMENT) == self._deployment:
                    ref = self._ref(server.name, claim["instance"])
                    items.append(
                        Listed(
                            ref=ref,
                            labels=labels,
                            state="present" if state == "present" else "terminating",
                        )
                    )
        return Page(items=tuple(items), complete=complete)

    async def observe(self, ref: Ref) -> Observation:
        server = self._server_of(ref)
        if server is None:
            return Observation(state="unknown", detail="another authority, or no such server")
        answer = await self._ask(server, "look")
        if isinstance(answer, Silence) or answer.state != "seen":
            return Observation(state="unknown", detail=_told(answer))
        held = answer.body["claim"]
        if held is not None and held["instance"] == ref.instance:
            return Observation(state="present", instance=ref.instance)
        if any(claim["instance"] == ref.instance for claim in answer.body["leaving"]):
            return Observation(state="terminating", instance=ref.instance)
        instance = "" if held is None else held["instance"]
        return Observation(state="gone", instance=instance, detail="the server holds another claim")

    # -- ending ---------------------------------------------------------------------------------

    async def stop(self, ref: Ref, expect_instance: str) -> StopAnswer:
        if not self._is_ours(ref):
            return StopAnswer(answer="unconfigured", detail="another authority")
        if expect_instance == "" or expect_instance != ref.instance:
            return StopAnswer(answer="refused", detail="a stop must name the ref's instance")
        server = self._servers.get(ref.native_id)
        if server is None:
            return StopAnswer(answer="unconfigured", detail="no such server in the pool")
        settled = self._settle_instance(await self._ask(server, "look"), expect_instance)
        answer = await self._ask(server, "stop", instance=expect_instance)
        if isinstance(answer, Silence):
            return StopAnswer(answer=_SILENT_WORDS[answer.fault], detail=answer.detail)
        match answer.state:
            case "stopped":
                return StopAnswer(answer="accepted", instance=expect_instance, detail=settled)
            case "leaving":
                return StopAnswer(
                    answer="accepted", instance=expect_instance, detail="processes are left"
                )
            case "other":
                return StopAnswer(answer="refused_other_instance", instance=answer.body["instance"])
            case "absent":
                return StopAnswer(answer="not_found")
        return StopAnswer(answer="unreachable", detail=_told(answer))

    def _settle_instance(self, seen: Said | Silence, instance: str) -> str:
        """The create id of what is stopped is over; a stop that could not read it settles none."""
        if isinstance(seen, Said) and seen.state == "seen":
            claim = seen.body["claim"]
            if claim is not None and claim["instance"] == instance:
                self._write_settled(claim["create_id"])
                return "settled"
        return ""

    def _write_settled(self, create_id: str) -> None:
        path = self._pool / _ASSIGNED / self._key(create_id)
        mine = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        mine.write_text(_SETTLED, encoding="utf-8")
        mine.replace(path)

    async def settle(self, create_id: str) -> bool:
        try:
            self._write_settled(create_id)
        except OSError:
            return False
        return True

    async def reclaim(self, ref: Ref) -> bool:
        server = self._server_of(ref)
        if server is None or (await self.observe(ref)).state != "present":
            return False
        answer = await self._ask(server, "stop", instance=ref.instance)
        return isinstance(answer, Said) and answer.state in ("stopped", "leaving")

    # -- the way in -----------------------------------------------------------------------------

    async def channel(self, ref: Ref, spec: SandboxSpec) -> PumpedChannel:
        server = self._server_of(ref)
        if server is None:
            raise ChannelRefusedError("no such server in the pool", "unknown")
        name = secrets.token_hex(6)
        put = await self._put_toolhost(server)
        if put is not None:
            raise ChannelRefusedError(_told(put), "unknown")
        home = f"{server.base}/claim"
        argv = [server.python, "-I", "-S", f"{server.base}/toolhost.py"]
        argv += ["--state", f"{home}/state", "--workspace", f"{home}/workspace"]
        argv += ["--instance", ref.instance, "--sync"]
        argv += ["--heartbeat-ms", str(self._heartbeat_ms)]
        argv += ["--limits", json.dumps({"memory_mb": spec.memory_mb})]
        env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": f"{home}/workspace",
            "FENCEPOST_INSTANCE": ref.instance,
        }
        argv += ["--env", json.dumps(env)]
        answer = await self._ask(
            server, "start", instance=ref.instance, channel=name, argv=argv, env=env
        )
        if isinstance(answer, Silence):
            raise ChannelRefusedError(_told(answer), "unknown")
        if answer.state != "started":
            observed: Presence = "gone" if answer.state == "other" else "unknown"
            raise ChannelRefusedError(_told(answer), observed)
        return PumpedChannel(self._calls(), server, instance=ref.instance, name=name)

    async def _put_toolhost(self, server: Server) -> Silence | Said | None:
        """Writes the toolhost to the server; that it arrived whole shows when it starts."""
        answer = await self._ask(
            server,
            "install",
            digest=hashlib.sha256(toolhost.source()).hexdigest(),
            name="toolhost.py",
        )
        if isinstance(answer, Said) and answer.state == "installed":
            return None
        wrote = await self._calls().write_file(
            server, f"{server.base}/toolhost.py.new", toolhost.source().decode()
        )
        if isinstance(wrote, Silence):
            return wrote
        answer = await self._ask(
            server,
            "install",
            digest=hashlib.sha256(toolhost.source()).hexdigest(),
            name="toolhost.py",
        )
        return None if isinstance(answer, Said) and answer.state == "installed" else answer

    # -- names ----------------------------------------------------------------------------------

    def _ref(self, name: str, instance: str) -> Ref:
        return Ref(
            authority=self._traits.authority, provider=NAME, native_id=name, instance=instance
        )

    def _created(self, ref: Ref) -> Created:
        return Created(ref=ref, capabilities=self._traits.capabilities)

    def _is_ours(self, ref: Ref) -> bool:
        return ref.provider == NAME and ref.authority == self._traits.authority

    def _server_of(self, ref: Ref) -> Server | None:
        return self._servers.get(ref.native_id) if self._is_ours(ref) else None


def _told(answer: Said | Silence) -> str:
    if isinstance(answer, Silence):
        return f"{answer.fault}: {answer.detail}"
    return f"the server's agent says {answer.state} {answer.body.get('detail', '')}".strip()
