"""
Sandboxes as pods of one namespace, named by their create ids.

Rule 1: the API server is the witness. A pod's name is a function of its create id, so a second
create of it is refused by the server (409) and finds the first; a stop carries the pod's uid as
its precondition, so it cannot reach a namesake.
Rule 2: gone is only a 404 for this name, or another uid under it. A pod with a deletion timestamp
is on its way, held by finalizers or a kubelet for as long as that takes; one that a kubelet
reported as ended is removed when it is looked at, and gone when it is not there any more. 401,
403, 410, 429 and 5xx say nothing of a pod.
Rule 3: what Kubernetes itself removes by force (a node that it has not heard of for long) is a 404
like any other, though a process may live on behind the partition. No API tells this apart; the
epoch moves, and such a process can commit nothing.

Lists come in pages; a continue token that has expired (410) makes the list incomplete. Nothing is
watched, so no watch can fall behind; announcements are read from lists that the API server has in
memory, which may be a moment old.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import kubernetes_asyncio as kube
import structlog
from fencepost import toolhost
from fencepost.core.errors import RefusedError
from fencepost.core.facts import Capabilities, Ref
from fencepost.core.steps import SandboxSpec
from fencepost.providers import leftovers
from fencepost.providers.kubernetes import pods
from fencepost.providers.kubernetes.channel import ExecChannel
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
    ProviderTraits,
    StopAnswer,
    Unknown,
    stop_refusal,
)
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.stream import WsApiClient

NAME: Final = "kubernetes"
_PAGE: Final = 500
_TIMEOUT_S: Final = 20.0
_OWN_GRACE_S: Final = 1
"""What we end has nothing left that is to be saved."""
_OTHERS: Final = (
    aiohttp.ClientError,
    OSError,
    TimeoutError,
    # What the client library makes of an answer that is no such object, a proxy's page say.
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RecursionError,
)

# Reads the toolhost from its input, puts it in place whole, and becomes it. Its arguments are the
# file's place and size; the rest is the toolhost's.
_BOOT: Final = """
import os, sys
if sys.version_info < (3, 8): sys.exit("the image's Python is %s; 3.8 is needed" % sys.version[:6])
path, left, parts = sys.argv[1], int(sys.argv[2]), []
while left:
    data = os.read(0, left)
    if not data: sys.exit("the toolhost did not arrive whole")
    parts.append(data); left -= len(data)
fresh = "%s.%d" % (path, os.getpid())
with open(fresh, "wb") as file: file.write(b"".join(parts))
os.replace(fresh, path)
os.execv(sys.executable, [sys.executable, "-I", "-S", path] + sys.argv[3:])
"""


logger = structlog.get_logger(__name__)


async def load_configuration(path: Path | None) -> kube.client.Configuration:
    """A kubeconfig's, or without one the pod's own account. Raises `RefusedError`."""
    configuration = kube.client.Configuration()
    load_in_cluster: Any = kube.config.load_incluster_config
    try:
        if path is None:
            load_in_cluster(client_configuration=configuration)
        else:
            await kube.config.load_kube_config(
                config_file=str(path), client_configuration=configuration
            )
    except (kube.config.ConfigException, OSError) as error:
        raise RefusedError(
            "bad_setting",
            f"FENCEPOST_KUBERNETES_CONFIG: expected a kubeconfig, or none in a pod: {error}",
            field="kubernetes_config",
        ) from error
    return configuration


class KubernetesProvider:
    """
    `configuration` says which cluster and as whom (`kubernetes_asyncio.config` loads one).

    `cluster` names the cluster for ever: two gateways that give it alike see the same pods. The
    account needs create, get, list and delete of pods, create of pods/exec, and create and get of
    config maps, in `namespace` only.
    """

    def __init__(
        self,
        configuration: kube.client.Configuration,
        *,
        cluster: str,
        namespace: str,
        image: str,
        deployment: str = "local",
        runtime_class: str = "",
        grace_s: int = 30,
        heartbeat_ms: int = 1000,
        python: str = "python3",
    ) -> None:
        self._configuration = configuration
        self._namespace = namespace
        self._image = image
        self._deployment = deployment
        self._runtime_class = runtime_class
        self._grace_s = grace_s
        self._heartbeat_ms = heartbeat_ms
        self._python = python
        self._client: kube.client.ApiClient | None = None
        self._websockets: WsApiClient | None = None
        self._traits = ProviderTraits(
            name=NAME,
            authority=f"kubernetes-{pods.label_value(f'{cluster}/{namespace}')[:24]}",
            instance="native",
            stop="async",
            list="paged",
            auto_resume=False,
            snapshot=False,
            settles_creates=True,
            capabilities=Capabilities(
                generation=True,
                observes_gone=True,
                readonly_commands=False,
                isolation="pod" if not runtime_class else f"pod:{runtime_class}",
                power_loss_is_new_instance=False,
            ),
        )

    @property
    def traits(self) -> ProviderTraits:
        return self._traits

    async def close(self) -> None:
        for client in (self._client, self._websockets):
            if client is not None:
                await client.close()

    def _api(self) -> Any:
        if self._client is None:
            self._client = kube.client.ApiClient(self._configuration)
        return kube.client.CoreV1Api(self._client)

    def _raw(self, pod: Any) -> Any:
        assert self._client is not None
        return self._client.sanitize_for_serialization(pod)

    async def _get(self, name: str) -> pods.Seen | None:
        """One pod, or None for a 404. Raises what else the API says; `ValueError` on others'."""
        try:
            pod = await self._api().read_namespaced_pod(
                name, self._namespace, _request_timeout=_TIMEOUT_S
            )
        except ApiException as error:
            if error.status == 404 and _is_about(error, "pods", name):
                return None
            raise
        seen = pods.read(self._raw(pod))
        if seen.name != name:
            raise ValueError(f"the answer is not {name}")
        return seen

    # -- making ---------------------------------------------------------------------------------

    async def create(
        self, create_id: str, spec: SandboxSpec, labels: Mapping[str, str]
    ) -> CreateAnswer:
        name = pods.pod_name(self._deployment, create_id)
        body = pods.manifest(
            create_id,
            spec,
            labels,
            deployment=self._deployment,
            image=self._image,
            runtime_class=self._runtime_class,
            grace_s=self._grace_s,
        )
        try:
            if await self._is_settled(name):
                return await self._over(name)
            try:
                await self._api().create_namespaced_pod(
                    self._namespace, body, _request_timeout=_TIMEOUT_S
                )
            except ApiException as error:
                if error.status != 409:
                    failed = _not_created(error)
                    # An earlier call of this create id may have made what this one was denied.
                    if isinstance(failed, CreateAmbiguous) or await self._get(name) is None:
                        return failed
            seen = await self._get(name)
            if seen is None:
                return CreateAmbiguous(reason="vanished_while_created")
            if await self._is_settled(name):
                # The create id ended between the look and the create: take the result back.
                return await self._over(name)
        except ApiException as error:
            return CreateAmbiguous(reason=_said(error))
        except _OTHERS as error:
            return CreateAmbiguous(reason=f"{type(error).__name__}: {error}")
        if seen.labels.get(LABEL_CREATE) != create_id:
            return CreateRefused(reason="the name is taken by a pod of another create id")
        if seen.presence == "terminating":
            return CreateAmbiguous(reason="the former pod of this create id is on its way out")
        return self._created(seen)

    async def _over(self, name: str) -> CreateAnswer:
        """The answer to a create whose id is settled: refused, once nothing of it is there."""
        seen = await self._get(name)
        if seen is None:
            return CreateRefused(reason="settled")
        await self._delete(name, seen.uid)
        if await self._get(name) is None:
            return CreateRefused(reason="settled")
        return CreateAmbiguous(reason="settled, and its pod is on its way out")

    def _created(self, seen: pods.Seen) -> Created:
        return Created(
            ref=self._ref(seen.name, seen.instance), capabilities=self._traits.capabilities
        )

    # -- looking --------------------------------------------------------------------------------

    async def find(self, create_id: str) -> FindAnswer:
        try:
            seen = await self._get(pods.pod_name(self._deployment, create_id))
        except ApiException as error:
            return Unknown(reason=_said(error))
        except _OTHERS as error:
            return Unknown(reason=f"{type(error).__name__}: {error}")
        if seen is None:
            return Absent()
        if seen.labels.get(LABEL_CREATE) != create_id:
            return Unknown(reason="the name is taken by a pod of another create id")
        return self._created(seen)

    async def list(self, token: str = "") -> Page:
        more = {"_continue": token} if token else {}
        try:
            page = await self._api().list_namespaced_pod(
                self._namespace,
                label_selector=pods.selector(self._deployment),
                limit=_PAGE,
                _request_timeout=_TIMEOUT_S,
                **more,
            )
            listed, following = list(page.items), page.metadata._continue or ""
        except (ApiException, *_OTHERS):
            return Page(items=(), complete=False)
        items: list[Listed] = []
        is_whole = True
        for pod in listed:
            try:
                seen = pods.read(self._raw(pod))
            except ValueError:
                is_whole = False  # ours by its labels, and it cannot be told whose
                continue
            if seen.labels.get(LABEL_DEPLOYMENT) == self._deployment:
                leaving = seen.presence == "terminating"
                items.append(
                    Listed(
                        ref=self._ref(seen.name, seen.instance),
                        labels=seen.labels,
                        state="terminating" if leaving else "present",
                    )
                )
        return Page(items=tuple(items), complete=is_whole and not following, next_token=following)

    async def observe(self, ref: Ref) -> Observation:
        if not self._traits.names(ref):
            return Observation(state="unknown", detail="another authority")
        try:
            seen = await self._get(ref.native_id)
            if seen is not None and seen.instance == ref.instance and seen.ended:
                # What has ended starts nothing by being removed; until it is, its name is taken.
                await self._delete(seen.name, seen.uid)
        except ApiException as error:
            return Observation(state="unknown", detail=_said(error))
        except _OTHERS as error:
            return Observation(state="unknown", detail=f"{type(error).__name__}: {error}")
        if seen is None:
            return Observation(state="gone")
        if seen.instance != ref.instance:
            return Observation(state="gone", instance=seen.instance, detail="another instance")
        return Observation(state=seen.presence, instance=seen.instance, detail=seen.why)

    # -- ending ---------------------------------------------------------------------------------

    async def stop(self, ref: Ref, expect_instance: str) -> StopAnswer:
        if refusal := stop_refusal(ref, expect_instance, is_ours=self._traits.names(ref)):
            return refusal
        try:
            seen = await self._get(ref.native_id)
            if seen is None:
                return StopAnswer(answer="not_found")
            if seen.instance != expect_instance:
                return StopAnswer(answer="refused_other_instance", instance=seen.instance)
            await self._settle(seen.name)
            answer = await self._delete(seen.name, seen.uid)
            if answer.answer == "accepted":
                return StopAnswer(answer="accepted", instance=expect_instance)
        except ApiException as error:
            return _stop_answer(error)
        except TimeoutError:
            return StopAnswer(answer="timeout", detail="no answer within the bound")
        except _OTHERS as error:
            return StopAnswer(answer="unreachable", detail=f"{type(error).__name__}: {error}")
        return answer

    async def _delete(self, name: str, uid: str) -> StopAnswer:
        """Asks for this pod's removal, and no namesake's. Raises what else the API says."""
        options = kube.client.V1DeleteOptions(
            preconditions=kube.client.V1Preconditions(uid=uid),
            propagation_policy="Background",
            grace_period_seconds=_OWN_GRACE_S,
        )
        try:
            await self._api().delete_namespaced_pod(
                name, self._namespace, body=options, _request_timeout=_TIMEOUT_S
            )
        except ApiException as error:
            if error.status == 404 and _is_about(error, "pods", name):
                return StopAnswer(answer="not_found")
            if error.status == 409:
                return StopAnswer(answer="refused_other_instance", detail=_said(error))
            raise
        return StopAnswer(answer="accepted")

    async def settle(self, create_id: str) -> bool:
        try:
            await self._settle(pods.pod_name(self._deployment, create_id))
        except (ApiException, *_OTHERS):
            return False
        return True

    async def _settle(self, name: str) -> None:
        """Writes down that this name's create id is over, where every gateway reads it."""
        body = {
            "metadata": {
                "name": name,
                "labels": {
                    "app.kubernetes.io/managed-by": pods.MANAGER,
                    f"{pods.PREFIX}/settled": "true",
                },
            }
        }
        try:
            made = await self._api().create_namespaced_config_map(
                self._namespace, body, _request_timeout=_TIMEOUT_S
            )
        except ApiException as error:
            if error.status != 409:
                raise
        else:
            _demand_named(made, name)

    async def _is_settled(self, name: str) -> bool:
        try:
            found = await self._api().read_namespaced_config_map(
                name, self._namespace, _request_timeout=_TIMEOUT_S
            )
        except ApiException as error:
            if error.status == 404 and _is_about(error, "configmaps", name):
                return False
            raise
        _demand_named(found, name)
        return True

    async def notices(self, refs: Collection[Ref]) -> Sequence[Notice]:
        """Evictions, drains and deletions by others, while the pod still runs."""
        wanted = {(ref.native_id, ref.instance): ref for ref in refs if self._traits.names(ref)}
        if not wanted:
            return []
        try:
            answer = await self._api().list_namespaced_pod(
                self._namespace,
                label_selector=pods.selector(self._deployment),
                resource_version="0",  # what the API server has in memory will do
                _request_timeout=_TIMEOUT_S,
                _preload_content=False,
            )
            said = await answer.read()
            # In a thread: thousands of pods are megabytes, and heartbeats must not wait for them.
            return await asyncio.to_thread(_notices_in, said, wanted)
        except (ApiException, *_OTHERS) as error:
            logger.warning("notices_not_read", provider=NAME, detail=str(error)[:300])
            return []

    async def reclaim(self, ref: Ref) -> bool:
        """Removes the pod as an eviction without notice does."""
        if not self._traits.names(ref):
            return False
        with contextlib.suppress(ApiException, *_OTHERS):
            seen = await self._get(ref.native_id)
            if seen is None or seen.instance != ref.instance or seen.presence != "present":
                return False
            options = kube.client.V1DeleteOptions(
                preconditions=kube.client.V1Preconditions(uid=seen.uid), grace_period_seconds=0
            )
            await self._api().delete_namespaced_pod(
                seen.name, self._namespace, body=options, _request_timeout=_TIMEOUT_S
            )
            return True
        return False

    # -- the way in -----------------------------------------------------------------------------

    async def channel(self, ref: Ref, spec: SandboxSpec) -> ExecChannel:
        seen = await self._running(ref)
        name = secrets.token_hex(8)
        source = toolhost.source()
        command = [self._python, "-I", "-S", "-c", _BOOT, f"{pods.HOME}/toolhost.py"]
        command += [str(len(source)), "--state", pods.STATE, "--workspace", pods.WORKSPACE]
        command += ["--instance", ref.instance, "--sync"]
        command += ["--heartbeat-ms", str(self._heartbeat_ms)]
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": pods.WORKSPACE,
            leftovers.CHANNEL: name,
        }
        limits = {"memory_mb": spec.memory_mb, "processes": spec.processes}
        command += ["--env", json.dumps(env), "--limits", json.dumps(limits)]
        try:
            websocket = await self._exec(seen.name, command)
        except (ApiException, *_OTHERS) as error:
            presence = (await self.observe(ref)).state
            raise ChannelRefusedError(f"exec: {type(error).__name__}: {error}", presence) from error
        channel = ExecChannel(
            websocket,
            sent_first=source,
            bury=functools.partial(self._end_left, seen.name, name),
        )
        # A namesake may have taken the name between the look and the exec.
        try:
            await self._running(ref)
        except ChannelRefusedError:
            channel.start(lambda _data: None, lambda _reason: None)
            await channel.end(grace_s=0)
            raise
        return channel

    async def _exec(self, pod: str, command: Sequence[str]) -> aiohttp.ClientWebSocketResponse:
        """Starts a command in a pod. Raises `ApiException` and `_OTHERS`."""
        if self._websockets is None:
            self._websockets = WsApiClient(self._configuration, heartbeat=20)
        api: Any = kube.client.CoreV1Api(self._websockets)
        connecting = await api.connect_get_namespaced_pod_exec(
            pod,
            self._namespace,
            container=pods.CONTAINER,
            command=list(command),
            stdin=True,
            stdout=True,
            stderr=True,
            tty=False,
            _preload_content=False,
        )
        async with asyncio.timeout(_TIMEOUT_S):
            websocket: aiohttp.ClientWebSocketResponse = await connecting
        return websocket

    async def _end_left(self, pod: str, name: str) -> None:
        """Ends what carries this channel's name, as far as the pod can be reached."""
        command = [self._python, "-I", "-S", "-c", leftovers.KILL, name, leftovers.AFTER]
        with contextlib.suppress(ApiException, *_OTHERS):
            websocket = await self._exec(pod, command)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    async for _ in websocket:
                        pass
            finally:
                await websocket.close()

    async def _running(self, ref: Ref) -> pods.Seen:
        """The pod of exactly this instance, running. Raises `ChannelRefusedError`."""
        if not self._traits.names(ref):
            raise ChannelRefusedError("another authority", "unknown")
        try:
            seen = await self._get(ref.native_id)
        except (ApiException, *_OTHERS) as error:
            raise ChannelRefusedError(f"{type(error).__name__}: {error}", "unknown") from error
        if seen is None or seen.instance != ref.instance:
            raise ChannelRefusedError("that instance is not there", "gone")
        if not seen.is_running:
            raise ChannelRefusedError(f"the pod does not run: {seen.why}", seen.presence)
        return seen

    # -- names ----------------------------------------------------------------------------------

    def _ref(self, name: str, instance: str) -> Ref:
        return Ref(
            authority=self._traits.authority, provider=NAME, native_id=name, instance=instance
        )


def _notices_in(said: bytes, wanted: Mapping[tuple[str, str], Ref]) -> Sequence[Notice]:
    """Raises what `_OTHERS` has on an answer that is no list of pods."""
    found = []
    for pod in json.loads(said)["items"]:
        try:
            seen = pods.read(pod)
        except ValueError:
            continue
        ref = wanted.get((seen.name, seen.instance))
        if ref is not None and seen.notice_ms is not None:
            found.append(Notice(ref=ref, grace_ms=seen.notice_ms, detail=seen.why))
    return found


def _demand_named(found: Any, name: str) -> None:
    """Raises `ValueError` where an answer is not this very object: then nothing was said."""
    if found.metadata is None or found.metadata.name != name:
        raise ValueError(f"the answer is not {name}")


def _is_about(error: ApiException, kind: str, name: str) -> bool:
    """
    Whether a 404 is about this very object.

    A proxy, a wrong path or a namespace that is not there answer 404 too, and prove nothing.
    """
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        details = json.loads(error.body or b"").get("details") or {}
        return details.get("kind") == kind and details.get("name") == name
    return False


def _said(error: ApiException) -> str:
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        return f"HTTP {error.status}: {json.loads(error.body or b'').get('message', '')}"[:300]
    return f"HTTP {error.status}: {error.reason}"[:300]


def _not_created(error: ApiException) -> CreateAnswer:
    """A refusal by the API server is definite; what a server or a proxy failed at is not."""
    if error.status in (400, 401, 403, 404, 405, 413, 415, 422, 429):
        return CreateRefused(reason=_said(error))
    return CreateAmbiguous(reason=_said(error))


def _stop_answer(error: ApiException) -> StopAnswer:
    if error.status == 429:
        headers: Mapping[str, Any] = error.headers or {}
        after = str(headers.get("Retry-After", "0"))
        wait_ms = int(after) * 1000 if after.isdigit() else 0
        return StopAnswer(answer="refused", detail=_said(error), retry_after_ms=wait_ms)
    if error.status in (405, 501):
        return StopAnswer(answer="unsupported", detail=_said(error))
    if error.status >= 500:
        return StopAnswer(answer="unreachable", detail=_said(error))
    return StopAnswer(answer="refused", detail=_said(error))
