"""
Sandboxes as containers of one Docker engine, of one deployment.

A ref is a container id, and an instance of it the time of that container's start. `gone` is said
only where the engine answers 404 for an id that it once gave out, and is shown to be the same
engine, on the same data: a volume of ours carries its witness. `docker volume prune --all` takes
the witness along; absences prove nothing from then on, and the detail says so.

A stop looks at the instance first and removes the container by its id right after it. The engine
knows no condition on a removal, so a container that somebody starts again between the two calls is
removed with its new start; nothing of Fencepost's ever starts a container twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError
from fencepost import toolhost
from fencepost.core.errors import RetryLaterError
from fencepost.core.facts import Capabilities, Ref
from fencepost.core.steps import SandboxSpec
from fencepost.providers.docker import container
from fencepost.providers.docker.channel import FAULTS, ExecChannel
from fencepost.providers.docker.container import NAME, Seen
from fencepost.providers.docker.signals import Signals
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
    Unknown,
    stop_refusal,
)

_CALL_S: Final = 20.0
_PULL_S: Final = 600.0
_READY_S: Final = 30.0
_NAME_FREE_S: Final = 10.0
_NAME_LOOK_S: Final = 0.05
_PAGE: Final = 200
_INSPECTIONS_AT_ONCE: Final = 16
_SETTLED_KEPT: Final = timedelta(hours=24)
_SETTLED_BEFORE_A_LOOK: Final = 256
_WITNESS: Final = f"{container.LABEL_PREFIX}witness"
_SETTLED: Final = f"{container.LABEL_PREFIX}settled_in"
_CRASH: Final = ("FENCEPOST_TOOLHOST_CRASH", "FENCEPOST_TOOLHOST_CRASH_ONCE")


_Ids: TypeAlias = list[str]
_AllSeen: TypeAlias = list[Seen | None]


class _RefusedError(Exception):
    """Nothing can be made of this spec on this engine."""


class DockerProvider:
    """
    Made by `open`, which learns which engine this is; ended by `close`.

    Several gateways may use one engine: they have the same authority and see the same sandboxes.
    """

    def __init__(
        self,
        engine: aiodocker.Docker,
        *,
        deployment: str,
        authority: str,
        witness: str,
        image: str,
        network: str,
        heartbeat_ms: int,
    ) -> None:
        self._engine = engine
        self._deployment = deployment
        self._witness = witness
        self._image = image
        self._network = network
        self._heartbeat_ms = heartbeat_ms
        self._settled = 0
        label = f"{container.LABEL_PREFIX}{LABEL_DEPLOYMENT}"
        self._signals = Signals(engine, label=f"{label}={deployment}")
        self._traits = ProviderTraits(
            name=NAME,
            authority=authority,
            instance="native",
            stop="sync",
            list="paged",
            auto_resume=False,
            snapshot=False,
            settles_creates=True,
            capabilities=Capabilities(
                generation=True,
                observes_gone=True,
                readonly_commands=False,
                isolation="container",
                power_loss_is_new_instance=True,
            ),
        )

    @classmethod
    async def open(
        cls,
        url: str = "",
        *,
        deployment: str = "local",
        image: str = "",
        network: str = "bridge",
        heartbeat_ms: int = 1000,
    ) -> DockerProvider:
        """
        Connects to the engine at `url` (`unix:///…`, `tcp://…`; empty: as the docker command
        does). `image` is taken where a spec names none, `network` where a spec wants one. Raises
        `RetryLaterError` where no engine answers.
        """
        engine = None
        try:
            engine = aiodocker.Docker(
                url=url or None, timeout=aiohttp.ClientTimeout(total=_CALL_S, connect=5.0)
            )
            witness = await _witness(engine, deployment)
        except (*FAULTS, AssertionError) as error:
            if engine is not None:
                await engine.close()
            where = url or "its usual places"
            raise RetryLaterError(f"no Docker engine answers at {where}: {_said(error)}") from error
        return cls(
            engine,
            deployment=deployment,
            authority=f"docker-{container.digest(witness)[:24]}",
            witness=witness,
            image=image,
            network=network,
            heartbeat_ms=heartbeat_ms,
        )

    async def close(self) -> None:
        await self._signals.close()
        await self._engine.close()

    @property
    def traits(self) -> ProviderTraits:
        return self._traits

    # -- making ---------------------------------------------------------------------------------

    async def create(
        self, create_id: str, spec: SandboxSpec, labels: Mapping[str, str]
    ) -> CreateAnswer:
        image = spec.image or self._image
        if problem := container.spec_problem(spec, image):
            return CreateRefused(reason=problem)
        name = container.name_of(self._deployment, create_id)
        config = container.config_of(
            spec,
            image=image,
            network=self._network,
            deployment=self._deployment,
            create_id=create_id,
            labels=labels,
        )
        try:
            if await self._is_settled(name):
                return await self._refused(name, "settled")
            holder = await self._make(name, image, config)
            if await self._is_settled(name):
                # The create id ended between the look and the create: take the result back.
                await self._remove(holder)
                return CreateRefused(reason="settled")
            seen = await self._started(holder, image, python=container.python_of(spec))
        except _RefusedError as error:
            return await self._refused(name, str(error))
        except FAULTS as error:
            return CreateAmbiguous(reason=_said(error))
        return self._created(seen)

    async def _refused(self, name: str, reason: str) -> CreateAnswer:
        """Refused only where no earlier call of this create id has made something."""
        try:
            seen = await self._inspect(name)
        except FAULTS as error:
            return CreateAmbiguous(reason=f"{reason}; {_said(error)}")
        if seen is None:
            return CreateRefused(reason=reason)
        return CreateAmbiguous(reason=f"{reason}; container {seen.id[:12]} has its name")

    async def _make(self, name: str, image: str, config: dict[str, Any]) -> DockerContainer:
        """Makes the container, or takes the one that this name has already."""
        is_pulled = False
        until = asyncio.get_running_loop().time() + _NAME_FREE_S
        while True:
            try:
                return await self._engine.containers.create(config, name=name)
            except DockerError as error:
                if error.status == 404 and not is_pulled:
                    await self._pull(image)
                    is_pulled = True
                elif error.status in (400, 404):
                    raise _RefusedError(f"spec.image {image}: {error.message}") from error
                elif error.status != 409:
                    raise
                elif (seen := await self._inspect(name)) is not None:
                    return self._engine.containers.container(seen.id)
                elif asyncio.get_running_loop().time() > until:
                    raise
            # A name is taken a moment before its container is there, and after it went.
            await asyncio.sleep(_NAME_LOOK_S)

    async def _pull(self, image: str) -> None:
        try:
            async with asyncio.timeout(_PULL_S):
                await self._engine.images.pull(image)
        except DockerError as error:
            raise _RefusedError(
                f"spec.image {image}: not on the engine, and it cannot be pulled: {error.message}"
            ) from error

    async def _started(self, holder: DockerContainer, image: str, *, python: str) -> Seen:
        """Starts what was not started yet, and waits until its Python is known to be new enough."""
        seen = Seen.read(await holder.show())
        if seen.was_started:
            return seen
        said = b""
        async with holder.attach(stdout=True) as output:
            try:
                if not await self._start(holder):
                    return Seen.read(await holder.show())
            except DockerError as error:
                if error.status not in (400, 404, 500) or python not in error.message:
                    raise
                await self._remove(holder)
                raise _RefusedError(_no_python(image, python, error.message)) from error
            async with asyncio.timeout(_READY_S):
                while b"\n" not in said and (message := await output.read_out()) is not None:
                    said += message.data
        if said.startswith(b"ready "):
            return Seen.read(await holder.show())
        seen = Seen.read(await holder.show())
        await self._remove(holder)
        why = said.decode("utf-8", "replace").strip() or f"ended with {seen.exit_code}"
        raise _RefusedError(_no_python(image, python, why))

    async def _start(self, holder: DockerContainer) -> bool:
        """False where another one was faster: it hears what the container says, and acts on it."""
        async with self._engine._query(f"containers/{holder.id}/start", method="POST") as answer:
            return answer.status != 304

    async def _remove(self, holder: DockerContainer) -> None:
        try:
            await holder.delete(force=True, v=True, timeout=aiohttp.ClientTimeout(total=_CALL_S))
        except DockerError as error:
            if error.status not in (404, 409):  # not there, or on its way out already
                raise

    def _created(self, seen: Seen) -> Created:
        return Created(ref=self._ref(seen), capabilities=self._traits.capabilities)

    def _ref(self, seen: Seen) -> Ref:
        return Ref(
            authority=self._traits.authority,
            provider=NAME,
            native_id=seen.id,
            instance=seen.instance,
        )

    # -- looking --------------------------------------------------------------------------------

    async def find(self, create_id: str) -> FindAnswer:
        try:
            seen = await self._inspect(container.name_of(self._deployment, create_id))
        except FAULTS as error:
            return Unknown(reason=_said(error))
        if seen is None:
            return Absent()
        if seen.labels.get(LABEL_CREATE) != create_id:
            return Unknown(reason=f"container {seen.id[:12]} has the name and is not ours")
        if not seen.was_started:
            return Unknown(reason=f"container {seen.id[:12]} is made and not started yet")
        return self._created(seen)

    async def list(self, token: str = "") -> Page:
        """A container that is made and not started is no sandbox yet; its create id is owed."""
        try:
            ids = await self._ids(after=token)
            page = ids[:_PAGE]
            listed = await self._inspect_all(page)
        except FAULTS:
            return Page(items=(), complete=False)
        items = tuple(
            Listed(ref=self._ref(seen), labels=seen.labels, state=seen.presence)
            for seen in listed
            if seen is not None and seen.was_started
        )
        rest = len(ids) > len(page)
        return Page(items=items, complete=not rest, next_token=page[-1] if rest else "")

    async def _ids(self, *, after: str) -> _Ids:
        label = f"{container.LABEL_PREFIX}{LABEL_DEPLOYMENT}"
        found = await self._engine._query_json(
            "containers/json",
            params={"all": "1", "filters": _labelled(label, self._deployment)},
        )
        if not isinstance(found, list):
            raise TypeError("a list of containers was expected")
        return sorted(str(item["Id"]) for item in found if str(item["Id"]) > after)

    async def _inspect_all(self, ids: _Ids) -> _AllSeen:
        few = asyncio.Semaphore(_INSPECTIONS_AT_ONCE)

        async def one(native_id: str) -> Seen | None:
            async with few:
                return await self._inspect(native_id)

        return await asyncio.gather(*map(one, ids))

    async def _inspect(self, name_or_id: str) -> Seen | None:
        """
        Inspects a container of this deployment; None where this very engine has none.

        Raises one of `FAULTS`, as where the engine is not shown to be the one that it was.
        """
        try:
            answer = await self._engine.containers.container(name_or_id).show()
        except DockerError as error:
            if error.status != 404:
                raise
            await self._assert_engine()
            return None
        return Seen.read(answer)

    async def _assert_engine(self) -> None:
        """An engine on other data has none of our containers, which proves nothing about them."""
        name = _witness_name(self._deployment)
        try:
            held = _label_of(await self._engine._query_json(f"volumes/{name}"), _WITNESS)
        except DockerError as error:
            if error.status != 404:
                raise
            held = ""
        if held != self._witness:
            raise ValueError(
                f"volume {name} with the label {_WITNESS}={self._witness} is not there: other data"
                " than before, or pruned (create it again with that label if it was)"
            )

    async def observe(self, ref: Ref) -> Observation:
        if not self._is_ours(ref):
            return Observation(state="unknown", detail="another authority")
        if not container.is_acknowledged(ref.native_id):
            return Observation(state="unknown", detail="no engine gave this id")
        try:
            seen = await self._inspect(ref.native_id)
        except FAULTS as error:
            return Observation(state="unknown", detail=_said(error))
        if seen is None:
            return Observation(state="gone")
        detail = "" if seen.running else f"{seen.status}, exit {seen.exit_code}"
        return Observation(state=seen.presence_of(ref), instance=seen.instance, detail=detail)

    def _is_ours(self, ref: Ref) -> bool:
        return self._traits.names(ref) and container.is_well_formed(ref)

    # -- ending ---------------------------------------------------------------------------------

    async def stop(self, ref: Ref, expect_instance: str) -> StopAnswer:
        if refusal := stop_refusal(ref, expect_instance, is_ours=self._is_ours(ref)):
            return refusal
        try:
            seen = await self._inspect(ref.native_id)
            if seen is None:
                return StopAnswer(answer="not_found")
            if seen.labels.get(LABEL_DEPLOYMENT) != self._deployment:
                return StopAnswer(answer="refused", detail="a container of another deployment")
            if seen.running and seen.instance != expect_instance:
                return StopAnswer(answer="refused_other_instance", instance=seen.instance)
            if create_id := seen.labels.get(LABEL_CREATE):
                await self._settle(create_id)
            await self._remove(self._engine.containers.container(seen.id))
        except TimeoutError as error:
            return StopAnswer(answer="timeout", detail=_said(error))
        except DockerError as error:
            return _stop_failed(error)
        except FAULTS as error:
            return StopAnswer(answer="unreachable", detail=_said(error))
        return StopAnswer(answer="accepted", instance=expect_instance)

    async def settle(self, create_id: str) -> bool:
        """
        Leaves a mark that every create looks at, before and after it makes a container.

        What was made and never started is taken away with it: its creator finds it missing.
        """
        name = container.name_of(self._deployment, create_id)
        try:
            await self._settle(create_id)
            seen = await self._inspect(name)
            if seen is not None and not seen.was_started:
                await self._remove(self._engine.containers.container(seen.id))
        except FAULTS:
            return False
        return True

    async def _settle(self, create_id: str) -> None:
        name = _settled_name(container.name_of(self._deployment, create_id))
        labels = {_SETTLED: self._deployment}
        await _make_volume(self._engine, name, labels)
        self._settled += 1
        if self._settled % _SETTLED_BEFORE_A_LOOK == 1:
            await self._forget_settled()

    async def _forget_settled(self) -> None:
        """Drops marks that are a day older than the newest: no create is under way that long."""
        found = await self._engine._query_json(
            "volumes", params={"filters": _labelled(_SETTLED, self._deployment)}
        )
        marks = {
            str(volume["Name"]): datetime.fromisoformat(str(volume["CreatedAt"]))
            for volume in found.get("Volumes") or ()
            # An engine that does not know the filter must not have all of its volumes dropped.
            if _label_of(volume, _SETTLED) == self._deployment
        }
        newest = max(marks.values(), default=None)
        for name, made in marks.items():
            if newest is not None and made < newest - _SETTLED_KEPT:
                async with self._engine._query(f"volumes/{name}", method="DELETE"):
                    pass

    async def _is_settled(self, name: str) -> bool:
        try:
            await self._engine._query_json(f"volumes/{_settled_name(name)}")
        except DockerError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def notices(self, refs: Collection[Ref]) -> Sequence[Notice]:
        self._signals.listen()
        return [
            Notice(ref=ref, detail="told to end by a signal")
            for ref in refs
            if self._is_ours(ref) and self._signals.told(ref.native_id)
        ]

    async def reclaim(self, ref: Ref) -> bool:
        if (await self.observe(ref)).state != "present":
            return False
        try:
            await self._remove(self._engine.containers.container(ref.native_id))
        except FAULTS:
            return False
        return True

    # -- the way in -----------------------------------------------------------------------------

    async def channel(self, ref: Ref, spec: SandboxSpec) -> ExecChannel:
        seen = await self._present(ref)
        source = toolhost.source()
        name = secrets.token_hex(8)
        command = container.toolhost_command(
            seen,
            spec,
            source_bytes=len(source),
            heartbeat_ms=self._heartbeat_ms,
            channel=name,
        )
        try:
            channel = await ExecChannel.open(
                self._engine.containers.container(seen.id),
                command,
                source,
                name=name,
                environment={name: os.environ[name] for name in _CRASH if name in os.environ},
            )
        except FAULTS as error:
            await self._present(ref)
            raise ChannelRefusedError(f"exec: {_said(error)}", "unknown") from error
        try:
            # A start in between: what was started there is not in that instance.
            await self._present(ref)
        except ChannelRefusedError:
            await channel.end(grace_s=0)
            raise
        return channel

    async def _present(self, ref: Ref) -> Seen:
        """Inspects a sandbox that runs; raises `ChannelRefusedError` for every other one."""
        if not self._is_ours(ref):
            raise ChannelRefusedError("another authority", "unknown")
        try:
            seen = await self._inspect(ref.native_id)
        except FAULTS as error:
            raise ChannelRefusedError(_said(error), "unknown") from error
        if seen is None:
            was_given = container.is_acknowledged(ref.native_id)
            observed: Presence = "gone" if was_given else "unknown"
            raise ChannelRefusedError("no such container", observed)
        if seen.instance != ref.instance:
            raise ChannelRefusedError("container was started again", "terminating", ended=True)
        if seen.presence != "present":
            why = f"container is {seen.status}, exit {seen.exit_code}"
            raise ChannelRefusedError(why, "terminating", ended=True)
        return seen


async def _witness(engine: aiodocker.Docker, deployment: str) -> str:
    """The identity of an engine's data, minted once: creating a volume that is there is a look."""
    fresh = secrets.token_hex(16)
    name = _witness_name(deployment)
    await _make_volume(engine, name, {_WITNESS: fresh})
    held = _label_of(await engine._query_json(f"volumes/{name}"), _WITNESS)
    if not held:
        raise ValueError(f"volume {name} has no label {_WITNESS}")
    return held


async def _make_volume(engine: aiodocker.Docker, name: str, labels: dict[str, str]) -> None:
    """Makes a volume, or leaves the one of this name as it is."""
    config = json.dumps({"Name": name, "Labels": labels})
    await engine._query_json("volumes/create", method="POST", data=config)


def _labelled(label: str, value: str) -> str:
    return json.dumps({"label": [f"{label}={value}"]})


def _witness_name(deployment: str) -> str:
    return f"fencepost-witness-{deployment}"


def _settled_name(name: str) -> str:
    return f"{name}-settled"


def _label_of(volume: Mapping[str, Any], label: str) -> str:
    return str((volume.get("Labels") or {}).get(label, ""))


def _no_python(image: str, python: str, why: str) -> str:
    return f"spec.image {image}: expected {python} of version 3.8 or later in it, {why[:300]}"


def _stop_failed(error: DockerError) -> StopAnswer:
    """As the protocol's table says it for what is not accepted."""
    if error.status in (401, 403):
        return StopAnswer(answer="refused", detail=_said(error))
    if error.status in (405, 501):
        return StopAnswer(answer="unsupported", detail=_said(error))
    if 300 <= error.status < 500:
        return StopAnswer(answer="refused", detail=_said(error))
    return StopAnswer(answer="unreachable", detail=_said(error))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300] if str(error) else type(error).__name__
