"""The `kubernetes` provider, by the real client library, against a small API server of ours."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kubernetes_asyncio as kube
import pytest
from aiohttp import web
from fencepost.core.errors import RefusedError
from fencepost.core.facts import Ref
from fencepost.core.steps import SandboxSpec
from fencepost.providers.kubernetes import pods
from fencepost.providers.kubernetes.channel import ending
from fencepost.providers.kubernetes.provider import KubernetesProvider, load_configuration
from fencepost.providers.protocol import (
    Absent,
    ChannelRefusedError,
    CreateAmbiguous,
    Created,
    CreateRefused,
    Provider,
    Unknown,
)

from tests.integration.providers.kubernetes_api import NAMESPACE, KubernetesApi, failure
from tests.unit.providers.provider_contract import (
    LABELS,
    SPEC,
    ProviderContract,
    Talk,
    made,
    wait_for,
)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    server = KubernetesApi(tmp_path / "nodes")
    await server.start()
    yield server
    await server.stop()


def provider_for(api: KubernetesApi, **options: str) -> KubernetesProvider:
    configuration = kube.client.Configuration(host=api.url)
    return KubernetesProvider(
        configuration,
        **{"cluster": "c1", "namespace": NAMESPACE, "image": "python:3.11", **options},
    )


@pytest.fixture
async def provider(api: KubernetesApi) -> AsyncIterator[KubernetesProvider]:
    provider = provider_for(api)
    yield provider
    await provider.close()


class TestKubernetesProvider(ProviderContract):
    starts_after_notice = False

    @pytest.fixture(autouse=True)
    def _announces(self, api: KubernetesApi) -> None:
        self._api = api

    @pytest.fixture
    def provider(self, provider: KubernetesProvider) -> Provider:
        return provider

    async def announce(self, provider: Provider, ref: Ref) -> None:
        self._api.begin_eviction(ref.native_id)


async def stopped_is(provider: KubernetesProvider, ref: Ref, state: str) -> bool:
    return (await provider.observe(ref)).state == state


async def test_a_finalizer_keeps_it_terminating_until_it_is_taken_away(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    ref = await made(provider)
    api.pods[ref.native_id]["metadata"]["finalizers"] = ["example.com/keep"]
    assert (await provider.stop(ref, ref.instance)).answer == "accepted"
    assert await stopped_is(provider, ref, "terminating")
    assert (await provider.list()).items[0].state == "terminating"
    await api.end(ref.native_id)
    assert await stopped_is(provider, ref, "gone")


async def test_a_stop_reaches_no_namesake(provider: KubernetesProvider, api: KubernetesApi) -> None:
    ref = await made(provider)
    await api.end(ref.native_id)
    second = await made(provider)
    assert second.native_id == ref.native_id
    assert second.instance != ref.instance
    assert (await provider.stop(ref, ref.instance)).answer == "refused_other_instance"
    assert await stopped_is(provider, second, "present")
    assert await stopped_is(provider, ref, "gone")


async def test_a_namesake_that_comes_between_the_look_and_the_delete_is_spared(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    """The uid goes along as a precondition: the server refuses, whatever was read before."""
    ref = await made(provider)
    uid = ref.instance.partition(".")[0]

    def swapped(request: web.Request) -> None:
        if request.method == "DELETE" and api.pods[ref.native_id]["metadata"]["uid"] == uid:
            api.pods[ref.native_id]["metadata"]["uid"] = "another"
            (api.folder / uid).rename(api.folder / "another")

    api.fault = swapped
    assert (await provider.stop(ref, ref.instance)).answer == "refused_other_instance"
    assert ref.native_id in api.pods


async def test_a_restarted_container_is_another_instance(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    ref = await made(provider)
    talk = Talk(await provider.channel(ref, SPEC))
    await talk.ask({"k": "hello", "id": "1"})
    await api.kill_container(ref.native_id, restarts=True)
    seen = await provider.observe(ref)
    assert (seen.state, seen.instance) == ("gone", ref.instance.replace(".0", ".1"))
    with pytest.raises(ChannelRefusedError) as refusal:
        await provider.channel(ref, SPEC)
    assert refusal.value.observed == "gone"

    async def ended() -> bool:
        return talk.ended is not None

    assert await wait_for(ended)
    await talk.channel.end()


@pytest.mark.parametrize("how", ["evict", "oom"])
async def test_what_its_kubelet_ended_is_removed_and_only_then_gone(
    provider: KubernetesProvider, api: KubernetesApi, how: str
) -> None:
    ref = await made(provider)
    if how == "evict":
        await api.evict(ref.native_id)
    else:
        await api.kill_container(ref.native_id, restarts=False)
    api.keeps_stopped = True
    assert await stopped_is(provider, ref, "terminating")
    await api.end(ref.native_id)
    assert await stopped_is(provider, ref, "gone")
    api.keeps_stopped = False
    again = await made(provider)
    assert again.instance != ref.instance


async def test_a_node_that_is_not_heard_of_proves_nothing(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    """`Failed` by a controller's hand, with a container that was last seen running."""
    ref = await made(provider)
    api.lose_node(ref.native_id)
    assert await stopped_is(provider, ref, "present")
    assert not any(line.startswith("DELETE") for line in api.requests)
    api.pods[ref.native_id]["status"]["phase"] = "Unknown"
    assert await stopped_is(provider, ref, "unknown")


async def test_a_pending_pod_has_no_channel_and_says_why(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    api.starts_pods = False
    ref = await made(provider)
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    api._set(ref.native_id, "Pending", waiting)
    with pytest.raises(ChannelRefusedError, match="ErrImagePull no such image") as refusal:
        await provider.channel(ref, SPEC)
    assert refusal.value.observed == "present"
    api.run(ref.native_id)
    channel = await provider.channel(ref, SPEC)
    channel.start(lambda _data: None, lambda _reason: None)
    await channel.end()


async def test_a_list_comes_in_pages_and_an_expired_token_makes_it_incomplete(
    provider: KubernetesProvider, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.providers.kubernetes.provider._PAGE", 2)
    names = {(await made(provider, f"acq-{number}")).native_id for number in range(5)}
    seen: set[str] = set()
    page = await provider.list()
    while not page.complete:
        assert page.next_token
        seen |= {item.ref.native_id for item in page.items}
        page = await provider.list(page.next_token)
    seen |= {item.ref.native_id for item in page.items}
    assert seen == names
    page = await provider.list()
    api.tokens.clear()
    page = await provider.list(page.next_token)
    assert (page.items, page.complete, page.next_token) == ((), False, "")


async def test_a_pod_that_cannot_be_read_makes_a_list_incomplete(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    ref = await made(provider)
    assert (await provider.list()).complete
    api.pods[ref.native_id]["metadata"]["annotations"] = {}
    page = await provider.list()
    assert (page.items, page.complete) == ((), False)
    assert await stopped_is(provider, ref, "unknown")


async def test_two_deployments_of_one_namespace_do_not_see_each_other(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    second = provider_for(api, deployment="other")
    try:
        ref = await made(provider)
        assert (await second.list()).items == ()
        assert isinstance(await second.find("acq-1"), Absent)
        assert (await made(second)).native_id != ref.native_id
        assert len((await provider.list()).items) == 1
    finally:
        await second.close()


async def test_an_answer_that_is_lost_leaves_a_create_ambiguous_and_the_next_one_finds_it(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    def lost(request: web.Request) -> web.Response | None:
        return failure(502, "BadGateway") if request.method == "POST" else None

    api.after = lost
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateAmbiguous)
    api.after = lambda _request: None
    assert len(api.pods) == 1
    assert isinstance(await provider.find("acq-1"), Created)
    await made(provider)
    assert len(api.pods) == 1


@pytest.mark.parametrize(
    ("status", "create", "stop"),
    [
        (400, CreateRefused, "refused"),
        (401, CreateRefused, "refused"),
        (403, CreateRefused, "refused"),
        (405, CreateRefused, "unsupported"),
        (422, CreateRefused, "refused"),
        (429, CreateRefused, "refused"),
        (500, CreateAmbiguous, "unreachable"),
        (503, CreateAmbiguous, "unreachable"),
        (504, CreateAmbiguous, "unreachable"),
    ],
)
async def test_s027_a_fault_is_no_absence(
    provider: KubernetesProvider,
    api: KubernetesApi,
    status: int,
    create: type,
    stop: str,
) -> None:
    ref = await made(provider)
    posted = "/pods"
    api.fault = lambda request: (
        failure(status, "Fault")
        if request.method == "POST" and request.path.endswith(posted)
        else None
    )
    assert isinstance(await provider.create("acq-2", SPEC, LABELS), create)
    api.fault = lambda _request: failure(status, "Fault")
    assert (await provider.observe(ref)).state == "unknown"
    assert isinstance(await provider.find("acq-1"), Unknown)
    assert not (await provider.list()).complete
    assert not await provider.settle("acq-3")
    answer = await provider.stop(ref, ref.instance)
    assert answer.answer == stop
    assert answer.retry_after_ms == (3000 if status == 429 else 0)
    api.fault = lambda _request: None
    assert await stopped_is(provider, ref, "present")


async def test_a_404_that_is_not_about_this_pod_proves_nothing(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    """A proxy's, or that of a namespace which is not there."""
    ref = await made(provider)
    for answer in (
        lambda _request: web.Response(status=404, text="no route"),
        lambda _request: failure(404, "NotFound", "namespaces", NAMESPACE),
    ):
        api.fault = answer
        assert (await provider.observe(ref)).state == "unknown"
        assert isinstance(await provider.find("acq-1"), Unknown)
        assert (await provider.stop(ref, ref.instance)).answer == "refused"
    api.fault = lambda _request: None
    await api.end(ref.native_id)
    assert (await provider.observe(ref)).state == "gone"


async def test_no_connection_is_unreachable(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    ref = await made(provider)
    nowhere = provider_for(api)
    nowhere._configuration.host = "http://127.0.0.1:1"
    try:
        assert (await nowhere.observe(ref)).state == "unknown"
        assert (await nowhere.stop(ref, ref.instance)).answer == "unreachable"
        assert isinstance(await nowhere.create("acq-2", SPEC, LABELS), CreateAmbiguous)
    finally:
        await nowhere.close()


async def test_an_image_without_python_is_refused_by_what_it_lacks(api: KubernetesApi) -> None:
    provider = provider_for(api)
    provider._python = "no-such-python"
    try:
        ref = await made(provider)
        channel = await provider.channel(ref, SPEC)
        ended: list[str] = []
        channel.start(lambda _data: None, ended.append)

        async def over() -> bool:
            return bool(ended)

        assert await wait_for(over)
        assert "no-such-python" in channel.last_words()
        await channel.end()
    finally:
        await provider.close()


async def test_a_long_talk_is_carried_whole_both_ways(provider: KubernetesProvider) -> None:
    ref = await made(provider)
    talk = Talk(await provider.channel(ref, SPEC))
    await talk.ask({"k": "mark", "id": "1", "epoch": 1, "session": "s1", "nonce": "n1"})
    large = b"x" * (1 << 20)

    digest = "sha256:" + hashlib.sha256(large).hexdigest()
    head = {"k": "blob", "digest": digest, "size": len(large), "last": True, "n": len(large)}

    talk.channel.write(json.dumps(head).encode() + b"\n" + large)
    args = json.dumps({"path": "b", "content_ref": {"$blob": digest, "size": len(large)}}).encode()
    fence = {"sandbox": "sbx", "epoch": 1, "session": "s1", "attempt": "a.1", "no": 1}
    _, body = await talk.ask(
        {
            "k": "apply",
            "fence": {**fence, "direction": "apply"},
            "step": "a",
            "tool": "write_file",
            "digest": "sha256:" + hashlib.sha256(args).hexdigest(),
            "effect": "workspace",
        },
        args,
    )
    assert json.loads(body)["changes"][0]["after"] == digest
    await talk.channel.end()


def test_the_pod_is_confined() -> None:
    pod = pods.manifest(
        "acq-1",
        SandboxSpec(memory_mb=256),
        LABELS,
        deployment="local",
        image="python:3.11",
        runtime_class="gvisor",
        grace_s=30,
    )
    spec = pod["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["runtimeClassName"] == "gvisor"
    container = spec["containers"][0]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["memory"] == "256Mi"
    assert pod["metadata"]["labels"]["fencepost.dev/network"] == "closed"
    assert all(len(value) <= 63 for value in pod["metadata"]["labels"].values())


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (b'{"status": "Success"}', "exit 0"),
        (
            b'{"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "7"}]}}',
            "exit 7",
        ),
        (b'{"status": "Failure", "message": "container gone"}', "container gone"),
        (b"not json", "ended without a status"),
        (b"[]", "ended without a status"),
    ],
)
def test_how_a_command_ended_is_read_from_its_status(status: bytes, words: str) -> None:
    assert ending(status) == words


async def test_a_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="FENCEPOST_KUBERNETES_CONFIG"):
        await load_configuration(tmp_path / "none")
    with pytest.raises(RefusedError, match="FENCEPOST_KUBERNETES_CONFIG"):
        await load_configuration(None)
    (tmp_path / "config").write_text(CONFIG)
    assert (await load_configuration(tmp_path / "config")).host == "https://192.0.2.1:6443"


CONFIG = """\
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: there, cluster: {server: "https://192.0.2.1:6443"}}]
users: [{name: us, user: {token: abc}}]
contexts: [{name: here, context: {cluster: there, user: us}}]
"""


@pytest.mark.parametrize("status", [400, 403, 422, 429])
async def test_a_refusal_says_nothing_of_what_an_earlier_create_made(
    provider: KubernetesProvider, api: KubernetesApi, status: int
) -> None:
    """Its answer was lost, and the same create is asked again, over the quota by then."""
    api.after = lambda request: failure(504, "lost") if request.method == "POST" else None
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateAmbiguous)
    api.after = lambda _request: None
    api.fault = lambda request: failure(status, "no") if request.method == "POST" else None
    again = await provider.create("acq-1", SPEC, LABELS)
    assert isinstance(again, Created), again
    assert (await provider.observe(again.ref)).state == "present"
    assert isinstance(await provider.create("acq-2", SPEC, LABELS), CreateRefused), "the control"


async def test_a_settled_create_is_refused_only_once_its_pod_is_gone(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    ref = await made(provider)
    api.pods[ref.native_id]["metadata"]["finalizers"] = ["example.com/keep"]
    assert await provider.settle("acq-1")
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateAmbiguous)
    await api.end(ref.native_id)
    assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateRefused)


_POD: dict[str, Any] = {
    "kind": "Pod",
    "metadata": {"name": "x", "uid": "u", "annotations": {"fencepost.dev/labels": "{}"}},
}


@pytest.mark.parametrize(
    "text",
    [
        "<html>sign in first</html>",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        '{"items": "x"}',
        '{"items": [1]}',
        '{"items": [{"metadata": 1}], "metadata": {}}',
        json.dumps({**_POD, "status": "x"}),
        json.dumps(
            {
                **_POD,
                "metadata": {**_POD["metadata"], "annotations": {"fencepost.dev/labels": "[]"}},
            }
        ),
        json.dumps({**_POD, "metadata": {**_POD["metadata"], "deletionTimestamp": 5}}),
    ],
)
async def test_a_success_that_is_no_such_object_proves_and_raises_nothing(
    provider: KubernetesProvider, api: KubernetesApi, text: str
) -> None:
    ref = await made(provider)
    api.fault = lambda _request: web.Response(text=text, content_type="application/json")
    assert isinstance(await provider.create("acq-2", SPEC, LABELS), CreateAmbiguous)
    assert isinstance(await provider.find("acq-1"), Unknown)
    assert (await provider.observe(ref)).state == "unknown"
    assert (await provider.stop(ref, ref.instance)).answer == "unreachable"
    assert not (await provider.list()).complete
    assert not await provider.settle("acq-1")
    assert not await provider.reclaim(ref)
    with pytest.raises(ChannelRefusedError) as raised:
        await provider.channel(ref, SPEC)
    assert raised.value.observed == "unknown"
    api.fault = lambda _request: None
    assert (await provider.observe(ref)).state == "present", "the control"


async def test_a_disruption_that_is_to_come_is_announced_and_one_that_is_over_is_not(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    ref, other = await made(provider), await made(provider, "acq-2")
    api.condemn(ref.native_id, "PreemptionByScheduler")
    (said,) = await provider.notices([ref, other])
    assert (said.ref, said.grace_ms) == (ref, 0)
    assert (await provider.observe(ref)).state == "present"
    api.begin_eviction(other.native_id)
    notices = {notice.ref: notice.grace_ms for notice in await provider.notices([ref, other])}
    assert notices == {ref: 0, other: 30_000}
    await api.evict(ref.native_id)  # it has ended: there is nothing to save any more
    assert [notice.ref for notice in await provider.notices([ref, other])] == [other]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"items": [{}]}', b'{"items": [null]}'])
async def test_what_is_no_list_of_pods_announces_nothing(
    provider: KubernetesProvider, api: KubernetesApi, body: bytes
) -> None:
    ref = await made(provider)
    api.begin_eviction(ref.native_id)
    assert await provider.notices([ref])
    api.fault = lambda _request: web.Response(body=body, content_type="application/json")
    assert list(await provider.notices([ref])) == []
    api.fault = lambda _request: failure(403, "Forbidden")
    assert list(await provider.notices([ref])) == []


async def test_what_is_stopped_by_us_is_given_little_time(
    provider: KubernetesProvider, api: KubernetesApi
) -> None:
    """Nothing on it is to be saved; the grace of others' deletions is the pod's own."""
    ref = await made(provider)
    assert api.pods[ref.native_id]["spec"]["terminationGracePeriodSeconds"] == 30
    await provider.stop(ref, ref.instance)
    assert api.graces == [1]
