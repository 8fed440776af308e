"""
What the provider `docker` must do on any engine: the provider contract, and what a container's own
life may bring. Run on the fake engine and, where there is one, on a real one.

Needs a `provider`, a `behind` (what others do to its containers), and a `with_image`.
"""

from typing import Protocol

import pytest
from fencepost.core.facts import Ref
from fencepost.core.steps import SandboxSpec
from fencepost.providers.docker import DockerProvider
from fencepost.providers.protocol import Absent, ChannelRefusedError, Created, CreateRefused

from tests.unit.providers.provider_contract import (
    LABELS,
    SPEC,
    ProviderContract,
    Talk,
    made,
    wait_for,
)


class Behind(Protocol):
    """What somebody else does to a container, with the engine's own commands."""

    async def kill(self, ref: Ref) -> None: ...
    async def start(self, ref: Ref) -> None: ...
    async def restart(self, ref: Ref) -> None: ...
    async def remove(self, ref: Ref) -> None: ...
    async def tell_to_end(self, ref: Ref) -> None: ...


class DockerContract(ProviderContract):
    former = "terminating"  # its disk is still there: only an engine's 404 is gone

    @pytest.fixture(autouse=True)
    def _announces(self, behind: Behind) -> None:
        self._behind = behind

    async def announce(self, provider: DockerProvider, ref: Ref) -> None:
        """What is told to end stays while a toolhost runs; and is heard once we listen."""
        talk = Talk(await provider.channel(ref, SPEC))
        await talk.ask({"k": "hello", "id": "1"})

        async def told() -> bool:
            await self._behind.tell_to_end(ref)
            return bool(await provider.notices([ref]))

        assert await wait_for(told)
        await talk.ask({"k": "hello", "id": "2"})
        assert (await provider.observe(ref)).state == "present"
        await talk.channel.end()

    starts_after_notice = False
    without_python = "without-python"
    with_old_python = "with-old-python"

    async def _refused(self, provider: DockerProvider, ref: Ref) -> ChannelRefusedError:
        with pytest.raises(ChannelRefusedError) as refusal:
            await provider.channel(ref, SPEC)
        return refusal.value

    async def test_a_killed_container_is_over_and_not_gone(
        self, provider: DockerProvider, behind: Behind
    ) -> None:
        ref = await made(provider)
        assert (await provider.observe(ref)).state == "present"
        talk = Talk(await provider.channel(ref, SPEC))
        await talk.ask({"k": "hello", "id": "1"})
        await behind.kill(ref)

        async def ended() -> bool:
            return talk.ended is not None

        assert await wait_for(ended)
        await talk.channel.end()
        seen = await provider.observe(ref)
        assert (seen.state, seen.instance) == ("terminating", ref.instance)
        assert [item.state for item in (await provider.list()).items] == ["terminating"]
        refusal = await self._refused(provider, ref)
        assert (refusal.observed, refusal.ended) == ("terminating", True)
        # Nothing of it is made again by asking, and a create names it as it is.
        assert (await made(provider)) == ref
        assert (await provider.observe(ref)).state == "terminating"
        assert (await provider.stop(ref, ref.instance)).answer == "accepted"
        assert (await provider.observe(ref)).state == "gone"

    async def test_a_restarted_container_is_another_instance_that_does_not_run(
        self, provider: DockerProvider, behind: Behind
    ) -> None:
        ref = await made(provider)
        await behind.restart(ref)

        async def over() -> bool:
            return (await provider.observe(ref)).state == "terminating"

        assert await wait_for(over)
        refusal = await self._refused(provider, ref)
        assert (refusal.observed, refusal.ended) == ("terminating", True)

        async def lists_the_other_as_over() -> bool:
            (item,) = (await provider.list()).items
            return item.state == "terminating" and item.ref.instance != ref.instance

        assert await wait_for(lists_the_other_as_over)
        # Nothing runs in it, so its remains go with the instance that the ledger knows.
        assert (await provider.stop(ref, ref.instance)).answer == "accepted"
        assert (await provider.observe(ref)).state == "gone"
        assert (await provider.list()).items == ()

    async def test_a_container_that_was_removed_is_gone_and_not_found(
        self, provider: DockerProvider, behind: Behind
    ) -> None:
        ref, kept = await made(provider), await made(provider, "acq-2")
        await behind.remove(ref)
        assert (await provider.observe(ref)).state == "gone"
        assert (await provider.observe(kept)).state == "present"
        assert isinstance(await provider.find("acq-1"), Absent)
        assert (await provider.stop(ref, ref.instance)).answer == "not_found"
        assert (await self._refused(provider, ref)).observed == "gone"

    async def test_a_name_that_somebody_took_again_is_another_container(
        self, provider: DockerProvider, behind: Behind
    ) -> None:
        former = await made(provider)
        await behind.remove(former)
        ref = await made(provider)
        assert ref.native_id != former.native_id
        assert (await provider.observe(former)).state == "gone"
        assert (await provider.stop(former, former.instance)).answer == "not_found"
        assert (await provider.observe(ref)).state == "present"

    async def test_an_image_without_python_is_refused_by_name(
        self, provider: DockerProvider
    ) -> None:
        spec = SandboxSpec(memory_mb=256, image=self.without_python)
        answer = await provider.create("acq-1", spec, LABELS)
        assert isinstance(answer, CreateRefused)
        assert f"spec.image {self.without_python}: expected python3 of version 3.8" in answer.reason
        assert isinstance(await provider.find("acq-1"), Absent)
        # The same create id with another image: nothing of the refused one is left.
        assert isinstance(await provider.create("acq-1", SPEC, LABELS), Created)

    async def test_an_image_with_an_old_python_is_refused_with_its_version(
        self, provider: DockerProvider
    ) -> None:
        spec = SandboxSpec(memory_mb=256, image=self.with_old_python)
        answer = await provider.create("acq-1", spec, LABELS)
        assert isinstance(answer, CreateRefused)
        assert self.with_old_python in answer.reason
        assert "too old 3.7" in answer.reason
        assert isinstance(await provider.find("acq-1"), Absent)

    async def test_an_image_that_cannot_be_had_is_refused(self, provider: DockerProvider) -> None:
        spec = SandboxSpec(memory_mb=256, image="fencepost.invalid/nothing:1")
        answer = await provider.create("acq-1", spec, LABELS)
        assert isinstance(answer, CreateRefused)
        assert "spec.image fencepost.invalid/nothing:1: not on the engine" in answer.reason

    async def test_an_unknown_option_is_refused_by_name(self, provider: DockerProvider) -> None:
        wrong = SandboxSpec(memory_mb=256, options={"interpreter": "python3"})
        answer = await provider.create("acq-1", wrong, LABELS)
        assert isinstance(answer, CreateRefused)
        assert answer.reason == "spec.options.interpreter: unknown, expected python"
        right = SandboxSpec(memory_mb=256, options={"python": "python3"})
        assert isinstance(await provider.create("acq-1", right, LABELS), Created)

    async def test_two_providers_of_one_engine_see_the_same(
        self, provider: DockerProvider, another: DockerProvider
    ) -> None:
        ref = await made(provider)
        assert another.traits.authority == provider.traits.authority
        assert await made(another) == ref
        assert (await another.observe(ref)).state == "present"
