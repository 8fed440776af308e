"""
Sandboxes on SWE-ReX servers, one a server, out of a pool that gateways share.

A create id gets its server in the pool's folder, before that server is asked. So it is tried on
one server only, whichever gateway asks, and one whose server does not answer is ambiguous.

Rule 1: SWE-ReX says nothing of generations: its write answers `200 {}`, and a server that was
replaced at the same address answers as the first one did. Everything concluded here comes from
our own claim on the server's disk, whose instance is minted there.
Rule 2: a server that answers whole and has another claim, or none, is evidence that the former
instance is gone, because an address names one server at a time. A server that does not answer,
or refuses our token, is evidence of nothing; nor is the absence of a claim whose processes run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
from fencepost import toolhost
from fencepost.core.facts import Capabilities, Ref
from fencepost.core.steps import SandboxSpec
from fencepost.providers import leftovers
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
    Notice,
    Observation,
    Page,
    Presence,
    ProviderTraits,
    StopAnswer,
    StopWord,
    Unknown,
    stop_refusal,
)
from fencepost.providers.swerex.channel import PumpedChannel
from fencepost.providers.swerex.pool import Pool
from fencepost.providers.swerex.server import Calls, Said, Server, Silence

NAME: Final = "swerex"
_TIMEOUT_S: Final = 45.0
_SILENT_WORDS: Final[dict[str, StopWord]] = {
    "timeout": "timeout",
    "refused": "refused",
    "unreachable": "unreachable",
    "unusable": "unreachable",
}


class SwerexProvider:
    """
    `pool` is the folder that `pool.Pool` describes, read again for every call: servers can be added
    and taken out, and tokens changed, while gateways run. Call `close` at the end.
    """

    def __init__(self, pool: Path, *, deployment: str = "local", heartbeat_ms: int = 1000) -> None:
        self._pool = Pool(pool, deployment=deployment)
        self._deployment = deployment
        self._heartbeat_ms = heartbeat_ms
        self._http: aiohttp.ClientSession | None = None
        self._agent = (Path(__file__).parent / "agent.py").read_text(encoding="utf-8")
        self._traits = ProviderTraits(
            name=NAME,
            authority=f"swerex-{self._pool.identity}",
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

    # -- making ---------------------------------------------------------------------------------

    async def create(
        self, create_id: str, spec: SandboxSpec, labels: Mapping[str, str]
    ) -> CreateAnswer:
        if spec.image:
            return CreateRefused(reason="spec.image: a SWE-ReX server has the image it has")
        try:
            return await self._create(create_id, labels)
        except OSError as error:
            return CreateAmbiguous(reason=f"the pool's folder: {error}")

    async def _create(self, create_id: str, labels: Mapping[str, str]) -> CreateAnswer:
        servers = self._pool.servers()
        labels = {LABEL_DEPLOYMENT: self._deployment, **labels, LABEL_CREATE: create_id}
        for server in _by_preference(create_id, servers):
            place = self._pool.assigned(create_id)
            if not place and self._pool.is_settled(create_id):
                return CreateRefused(reason="settled")
            if not place and self._pool.going_ms(server) is not None:
                continue
            place = place or self._pool.assign(create_id, server.place)
            chosen = servers.get(place)
            if chosen is None:
                return CreateAmbiguous(reason=f"its server {place} is not in the pool any more")
            # After the assignment: whoever settles reads that after it has written this.
            if self._pool.is_settled(create_id):
                return await self._settled(create_id, chosen)
            answer = await self._ask(
                chosen,
                "claim",
                create_id=create_id,
                key=self._pool.key(create_id),
                labels=labels,
            )
            match answer:
                case Said("claimed", body) if not self._is_of(body["claim"], create_id):
                    self._pool.release(create_id, place)
                case Said("claimed", body):
                    if self._pool.is_settled(create_id):
                        return await self._settled(create_id, chosen)
                    return self._created(self._ref(place, body["claim"]["instance"]))
                case Said("settled"):
                    return CreateRefused(reason="settled")
                case Said("occupied"):
                    self._pool.release(create_id, place)
                case Said(state, body):
                    return CreateAmbiguous(reason=f"{place}: {state} {body.get('detail', '')}")
                case Silence(fault, detail):
                    return CreateAmbiguous(reason=f"{place}: {fault}: {detail}")
        return CreateRefused(reason=f"no free server among {len(servers)} of the pool")

    async def _settled(self, create_id: str, server: Server) -> CreateAnswer:
        """Refused, once nothing is left of what a create may have made meanwhile."""
        found = await self._held(create_id, server)
        if isinstance(found, Created):
            await self.stop(found.ref, found.ref.instance)
            found = await self._held(create_id, server)
        if isinstance(found, Absent):
            return CreateRefused(reason="settled")
        return CreateAmbiguous(reason=f"{server.place}: settled, and may not be gone")

    # -- looking --------------------------------------------------------------------------------

    async def find(self, create_id: str) -> FindAnswer:
        try:
            place = self._pool.assigned(create_id)
            server = self._pool.servers().get(place)
        except OSError as error:
            return Unknown(reason=f"the pool's folder: {error}")
        if not place:
            return Absent()  # no server is asked before it is assigned
        if server is None:
            return Unknown(reason=f"its server {place} is not in the pool any more")
        return await self._held(create_id, server)

    async def _held(self, create_id: str, server: Server) -> FindAnswer:
        answer = await self._ask(server, "look")
        if isinstance(answer, Silence) or answer.state != "seen":
            return Unknown(reason=_told(answer))
        held = answer.body["claim"]
        if held is None or not self._is_of(held, create_id):
            return Absent()
        return self._created(self._ref(server.place, held["instance"]))

    def _is_of(self, claim: Mapping[str, Any], create_id: str) -> bool:
        is_ours = claim["labels"].get(LABEL_DEPLOYMENT) == self._deployment
        return bool(claim["create_id"] == create_id and is_ours)

    async def list(self, token: str = "") -> Page:
        del token
        try:
            servers = self._pool.servers()
            complete = await asyncio.to_thread(self._pool.is_whole)
        except OSError:
            return Page(items=(), complete=False)
        answers = await asyncio.gather(*(self._ask(one, "look") for one in servers.values()))
        items: list[Listed] = []
        for server, answer in zip(servers.values(), answers, strict=True):
            if isinstance(answer, Silence) or answer.state != "seen":
                complete = False
                continue
            found = [("present", answer.body["claim"])] if answer.body["claim"] else []
            found += [("terminating", claim) for claim in answer.body["leaving"]]
            for state, claim in found:
                labels = claim["labels"]
                if labels.get(LABEL_DEPLOYMENT) == self._deployment:
                    ref = self._ref(server.place, claim["instance"])
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
        answer = await self._ask(server, "look", instance=ref.instance)
        if isinstance(answer, Silence) or answer.state != "seen":
            return Observation(state="unknown", detail=_told(answer))
        held = answer.body["claim"]
        if held is not None and held["instance"] == ref.instance:
            return Observation(state="present", instance=ref.instance)
        if any(claim["instance"] == ref.instance for claim in answer.body["leaving"]):
            return Observation(state="terminating", instance=ref.instance)
        if answer.body["alive"]:
            return Observation(state="unknown", detail="its folder is gone, and its processes run")
        instance = "" if held is None else held["instance"]
        return Observation(state="gone", instance=instance, detail="the server holds another claim")

    # -- ending ---------------------------------------------------------------------------------

    async def stop(self, ref: Ref, expect_instance: str) -> StopAnswer:
        if refusal := stop_refusal(ref, expect_instance, is_ours=self._traits.names(ref)):
            return refusal
        server = self._server_of(ref)
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
                with contextlib.suppress(OSError):
                    self._pool.settle(claim["create_id"])
                    return "settled"
        return ""

    async def settle(self, create_id: str) -> bool:
        """Where a create may be on its way to a server, that server has to bar it too."""
        try:
            self._pool.settle(create_id)
            place = self._pool.assigned(create_id)
            server = self._pool.servers().get(place)
        except OSError:
            return False
        if not place:
            return True
        if server is None:
            return False
        answer = await self._ask(server, "settle", key=self._pool.key(create_id))
        return isinstance(answer, Said) and answer.state == "settled"

    async def notices(self, refs: Collection[Ref]) -> Sequence[Notice]:
        found = []
        for ref in refs:
            server = self._server_of(ref)
            grace_ms = None if server is None else self._pool.going_ms(server)
            if grace_ms is not None:
                found.append(Notice(ref=ref, grace_ms=grace_ms, detail="by a file"))
        return found

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
        # Tools alone carry it: by it they are found where their toolhost was killed.
        argv += ["--env", json.dumps({**env, leftovers.CHANNEL: name})]
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

    def _ref(self, place: str, instance: str) -> Ref:
        return Ref(
            authority=self._traits.authority, provider=NAME, native_id=place, instance=instance
        )

    def _created(self, ref: Ref) -> Created:
        return Created(ref=ref, capabilities=self._traits.capabilities)

    def _server_of(self, ref: Ref) -> Server | None:
        if not self._traits.names(ref):
            return None
        try:
            return self._pool.servers().get(ref.native_id)
        except OSError:
            return None


def _by_preference(create_id: str, servers: Mapping[str, Server]) -> list[Server]:
    """Spreads create ids over the pool; the same order for every gateway."""

    def rank(server: Server) -> str:
        return hashlib.sha256(f"{create_id}\n{server.name}".encode()).hexdigest()

    return sorted(servers.values(), key=rank)


def _told(answer: Said | Silence) -> str:
    if isinstance(answer, Silence):
        return f"{answer.fault}: {answer.detail}"
    return f"the server's agent says {answer.state} {answer.body.get('detail', '')}".strip()
