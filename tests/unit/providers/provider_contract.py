"""
What every provider must do, whatever it runs sandboxes on. Inherit it and give a `provider`.

The suite drives the provider through its protocol only, and knows no control plane.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fencepost.core.facts import Ref
from fencepost.core.steps import SandboxSpec, digest_of
from fencepost.providers.protocol import (
    LABEL_CREATE,
    LABEL_DEPLOYMENT,
    Absent,
    Channel,
    ChannelRefusedError,
    Created,
    CreateRefused,
    Provider,
    Unknown,
)

SPEC = SandboxSpec(memory_mb=1024)
LABELS = {"dag": "d1", "slot": "main ☃", "acquisition": "a1"}


async def wait_for(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> bool:
    """Waits until a condition holds; generous, because the machine may be slow."""
    until = asyncio.get_running_loop().time() + seconds
    while not await condition():
        if asyncio.get_running_loop().time() > until:
            return False
        await asyncio.sleep(0.02)
    return True


class Talk:
    """One toolhost behind a channel, spoken to frame by frame."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.frames: list[tuple[dict, bytes]] = []
        self.ended: str | None = None
        self._bytes = b""
        channel.start(self._take, self._end)

    def _take(self, data: bytes) -> None:
        self._bytes += data
        while b"\n" in self._bytes:
            line, rest = self._bytes.split(b"\n", 1)
            head = json.loads(line)
            size = head.get("n", 0)
            if len(rest) < size:
                return
            self.frames.append((head, rest[:size]))
            self._bytes = rest[size:]

    def _end(self, reason: str) -> None:
        assert self.ended is None, "the end is told once"
        self.ended = reason

    async def ask(self, head: dict, body: bytes = b"") -> tuple[dict, bytes]:
        if body:
            head = {**head, "n": len(body)}
        seen = len(self.frames)
        self.channel.write(json.dumps(head).encode() + b"\n" + body)
        kinds = {"apply": "receipt", "mark": "marked", "read": "read", "hello": "hello"}

        async def answered() -> bool:
            assert self.ended is None, self.ended
            return any(frame["k"] == kinds[head["k"]] for frame, _ in self.frames[seen:])

        assert await wait_for(answered), (head, self.frames[seen:])
        return next(f for f in self.frames[seen:] if f[0]["k"] == kinds[head["k"]])


def running(*words: str) -> list[int]:
    """Processes of this machine, ours or a sandbox's, with all of these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().split(b"\0")
            if all(word.encode() in line for word in words):
                found.append(int(path.parent.name))
    return found


async def made(provider: Provider, create_id: str = "acq-1") -> Ref:
    answer = await provider.create(create_id, SPEC, LABELS)
    assert isinstance(answer, Created), answer
    return answer.ref


def other(ref: Ref, **changes: str) -> Ref:
    fields = {name: getattr(ref, name) for name in ("authority", "provider", "native_id")}
    return Ref(**{**fields, "instance": ref.instance, **changes})


class ProviderContract:
    former = "gone"
    """What is said of an instance that another one under the same id followed."""

    starts_after_notice = True
    """Whether a toolhost can still be started in what is announced to go."""

    @pytest.fixture
    def provider(self) -> Provider:
        raise NotImplementedError

    async def test_a_create_is_found_again_under_its_id(self, provider: Provider) -> None:
        first = await made(provider)
        assert await made(provider) == first
        found = await provider.find("acq-1")
        assert isinstance(found, Created)
        assert found.ref == first
        assert first.authority == provider.traits.authority

    async def test_another_create_id_is_another_sandbox(self, provider: Provider) -> None:
        assert (await made(provider, "acq-1")) != (await made(provider, "acq-2"))

    async def test_creates_at_once_under_one_id_make_one_sandbox(self, provider: Provider) -> None:
        answers = await asyncio.gather(*(made(provider) for _ in range(8)))
        assert len(set(map(str, answers))) == 1
        assert len((await provider.list()).items) == 1

    async def test_what_was_never_made_is_absent(self, provider: Provider) -> None:
        assert isinstance(await provider.find("acq-1"), Absent)
        await made(provider)
        assert isinstance(await provider.find("acq-1"), Created)

    async def test_a_list_is_complete_and_carries_the_labels(self, provider: Provider) -> None:
        empty = await provider.list()
        assert (empty.items, empty.complete) == ((), True)
        ref = await made(provider)
        page = await provider.list()
        assert page.complete
        assert [(item.ref, item.state) for item in page.items] == [(ref, "present")]
        labels = page.items[0].labels
        assert {name: labels[name] for name in LABELS} == LABELS
        assert labels[LABEL_CREATE] == "acq-1"
        assert labels[LABEL_DEPLOYMENT]

    async def test_an_observation_is_about_this_instance(self, provider: Provider) -> None:
        ref = await made(provider)
        assert (await provider.observe(ref)).state == "present"
        changed = other(ref, instance="i" + "0" * 16 + ref.instance[17:])
        assert (await provider.observe(changed)).state == self.former

    async def test_another_authority_is_unknown_and_never_gone(self, provider: Provider) -> None:
        ref = await made(provider)
        elsewhere = other(ref, authority="elsewhere")
        assert (await provider.observe(elsewhere)).state == "unknown"
        assert (await provider.stop(elsewhere, ref.instance)).answer == "unconfigured"
        assert (await provider.observe(ref)).state == "present"

    async def test_s168_a_stop_is_accepted_and_only_then_observed_gone(
        self, provider: Provider
    ) -> None:
        ref = await made(provider)
        assert (await provider.observe(ref)).state == "present"
        answer = await provider.stop(ref, ref.instance)
        assert (answer.answer, answer.instance) == ("accepted", ref.instance)

        async def gone() -> bool:
            return (await provider.observe(ref)).state == "gone"

        assert await wait_for(gone)
        assert (await provider.list()).items == ()

    async def test_s167_a_stop_of_what_it_does_not_know_is_not_found(
        self, provider: Provider
    ) -> None:
        ref = await made(provider)
        unknown = other(ref, native_id="never-made-0123456789abcdef")
        assert (await provider.stop(unknown, ref.instance)).answer == "not_found"
        assert (await provider.stop(ref, ref.instance)).answer == "accepted"

    async def test_s185_a_second_stop_is_not_found_and_still_gone(self, provider: Provider) -> None:
        ref = await made(provider)
        await provider.stop(ref, ref.instance)
        assert (await provider.stop(ref, ref.instance)).answer == "not_found"
        assert (await provider.observe(ref)).state == "gone"

    async def test_a_stop_for_another_instance_stops_nothing(self, provider: Provider) -> None:
        ref = await made(provider)
        former = other(ref, instance="i" + "0" * 16 + ref.instance[17:])
        assert (await provider.stop(former, former.instance)).answer == "refused_other_instance"
        assert (await provider.stop(ref, former.instance)).answer == "refused"
        assert (await provider.stop(ref, "")).answer == "refused"
        assert (await provider.observe(ref)).state == "present"

    async def test_a_stopped_create_id_makes_nothing_any_more(self, provider: Provider) -> None:
        if not provider.traits.settles_creates:
            pytest.skip("this provider promises nothing about later creates")
        ref = await made(provider)
        await provider.stop(ref, ref.instance)
        assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateRefused)
        assert isinstance(await provider.create("acq-2", SPEC, LABELS), Created)

    async def test_a_settled_create_id_makes_nothing(self, provider: Provider) -> None:
        if not provider.traits.settles_creates:
            pytest.skip("this provider promises nothing about later creates")
        assert await provider.settle("acq-1")
        assert isinstance(await provider.create("acq-1", SPEC, LABELS), CreateRefused)
        assert isinstance(await provider.find("acq-1"), Absent)
        assert isinstance(await provider.create("acq-2", SPEC, LABELS), Created)

    async def test_what_an_unanswered_create_made_is_found_once_its_id_is_settled(
        self, provider: Provider
    ) -> None:
        """Else a release whose create was not answered would call it gone while it lives."""
        ref = await made(provider)
        await provider.settle("acq-1")
        found = await provider.find("acq-1")
        assert isinstance(found, Created)
        assert found.ref == ref
        if isinstance(await provider.create("acq-1", SPEC, LABELS), CreateRefused):
            assert (await provider.observe(ref)).state == "gone", "nothing of it is left"
        await provider.stop(ref, ref.instance)

        async def gone() -> bool:
            return isinstance(await provider.find("acq-1"), Absent)

        assert await wait_for(gone, 30)

    async def test_asking_starts_nothing(self, provider: Provider) -> None:
        ref = await made(provider)
        await provider.stop(ref, ref.instance)
        for _ in range(3):
            await provider.observe(ref)
            await provider.find("acq-1")
            await provider.list()
        assert (await provider.observe(ref)).state == "gone"

    async def test_a_channel_leads_to_a_toolhost_of_that_instance(self, provider: Provider) -> None:
        ref = await made(provider)
        talk = Talk(await provider.channel(ref, SPEC))
        head, _ = await talk.ask({"k": "hello", "id": "1"})
        assert (head["instance"], head["marker"], head["journal_seq"]) == (ref.instance, None, 0)
        await talk.channel.end()
        assert talk.ended is not None

    async def test_the_disk_outlives_its_channels(self, provider: Provider) -> None:
        ref = await made(provider)
        talk = Talk(await provider.channel(ref, SPEC))
        mark = {"k": "mark", "id": "2", "epoch": 1, "session": "s1", "nonce": "n1"}
        await talk.ask(mark)
        await talk.channel.end()
        again = Talk(await provider.channel(ref, SPEC))
        head, _ = await again.ask({"k": "hello", "id": "1"})
        assert head["marker"] == {"epoch": 1, "session": "s1", "nonce": "n1"}
        await again.channel.end()

    async def test_no_channel_leads_to_another_instance(self, provider: Provider) -> None:
        ref = await made(provider)
        former = other(ref, instance="i" + "0" * 16 + ref.instance[17:])
        with pytest.raises(ChannelRefusedError) as refusal:
            await provider.channel(former, SPEC)
        assert refusal.value.observed == self.former

    async def test_a_stop_ends_the_toolhost(self, provider: Provider) -> None:
        ref = await made(provider)
        talk = Talk(await provider.channel(ref, SPEC))
        await talk.ask({"k": "hello", "id": "1"})
        await provider.stop(ref, ref.instance)

        async def ended() -> bool:
            return talk.ended is not None

        assert await wait_for(ended)
        await talk.channel.end()

    async def test_a_reclaim_takes_disk_and_processes_and_tells_nobody(
        self, provider: Provider
    ) -> None:
        ref = await made(provider)
        talk = Talk(await provider.channel(ref, SPEC))
        await talk.ask({"k": "hello", "id": "1"})
        assert await provider.reclaim(ref)
        assert (await provider.observe(ref)).state == "gone"
        assert not await provider.reclaim(ref)
        # The create id is not settled by it: the control plane has not ended it.
        again = await made(provider)
        assert again.instance != ref.instance
        assert (await provider.observe(ref)).state == "gone"
        await talk.channel.end()

    async def test_what_a_killed_toolhost_left_ends_with_its_channel_and_no_others(
        self, provider: Provider
    ) -> None:
        """It left its session, so that no kernel ends it; and no next toolhost is marked."""
        ref = await made(provider)
        talk = Talk(await provider.channel(ref, SPEC))
        await talk.ask({"k": "mark", "id": "m", "epoch": 1, "session": "s", "nonce": "n"})
        seconds = str(random.randrange(10**5, 10**6))
        body = json.dumps({"shell": f"(setsid sleep {seconds} &); exec sleep {seconds}"}).encode()
        fence = {"sandbox": "sbx", "epoch": 1, "session": "s", "attempt": "s1.1", "no": 1}
        head = {"k": "apply", "fence": {**fence, "direction": "apply"}, "step": "s1"}
        head |= {"tool": "run_command", "digest": digest_of(body), "effect": "workspace"}
        talk.channel.write(json.dumps({**head, "n": len(body)}).encode() + b"\n" + body)
        another = subprocess.Popen(
            ["sleep", seconds[::-1].lstrip("0")], env={"FENCEPOST_CHANNEL": "another"}
        )

        async def both_run() -> bool:
            return len(running("sleep", seconds)) == 2

        try:
            assert await wait_for(both_run)
            for pid in running("--state", "--instance", ref.instance):
                os.kill(pid, signal.SIGKILL)

            async def none_is_left() -> bool:
                return talk.ended is not None and not running("sleep", seconds)

            assert await wait_for(none_is_left)
            assert another.poll() is None
            assert (await provider.observe(ref)).state == "present"
        finally:
            another.kill()
            another.wait()
            await talk.channel.end()
            for pid in running("sleep", seconds):
                os.kill(pid, signal.SIGKILL)

    async def announce(self, provider: Provider, ref: Ref) -> None:
        """What the keeper of this sandbox's place does before it takes it away."""
        raise NotImplementedError

    async def test_what_is_announced_to_go_is_told_of_and_lives_on(
        self, provider: Provider
    ) -> None:
        assert list(await provider.notices([])) == []
        ref = await made(provider)
        former = other(ref, instance="i" + "0" * 16 + ref.instance[17:])
        elsewhere = other(ref, authority="elsewhere")
        assert list(await provider.notices([ref, former, elsewhere])) == []
        await self.announce(provider, ref)

        async def told() -> bool:
            said = await provider.notices([ref, elsewhere])
            return [notice.ref for notice in said] == [ref]

        assert await wait_for(told)
        talk = Talk(await provider.channel(ref, SPEC)) if self.starts_after_notice else None
        if talk is not None:
            await talk.ask({"k": "hello", "id": "1"})
            await talk.channel.end()
        assert (await provider.stop(ref, ref.instance)).answer == "accepted"

    async def test_bytes_for_an_ended_stream_are_dropped(self, provider: Provider) -> None:
        ref = await made(provider)
        talk = Talk(await provider.channel(ref, SPEC))
        await talk.channel.end()
        talk.channel.write(b"late")
        await talk.channel.drain()
        assert talk.channel.buffered_bytes == 0


__all__ = ["LABELS", "SPEC", "ProviderContract", "Talk", "Unknown", "made", "other", "wait_for"]
