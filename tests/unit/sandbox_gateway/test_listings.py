"""A provider's list goes out page by page, and is whole only where the provider said so."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from fencepost.contracts.messages import ListReply, ListRequest
from fencepost.core.facts import Capabilities
from fencepost.providers.protocol import Listed, Page
from fencepost.sandbox_gateway import listings
from fencepost.sandbox_gateway.listings import Listings

from tests.factories import ref


class Traits:
    authority = "host"
    capabilities = Capabilities(observes_gone=False)


class Provider:
    """Names `count` sandboxes in pages of its own, `size` at a time."""

    traits = Traits()

    def __init__(self, count: int, size: int, *, complete: bool = True) -> None:
        self.items = [
            Listed(ref=ref(native_id=f"n{n:03}"), labels={"sandbox": f"s{n}"}, state="present")
            for n in range(count)
        ]
        self.size = size
        self.complete = complete
        self.calls = 0

    async def list(self, token: str = "") -> Page:
        self.calls += 1
        start = int(token or 0)
        end = start + self.size
        last = end >= len(self.items)
        return Page(
            items=tuple(self.items[start:end]),
            complete=last and self.complete,
            next_token="" if last else str(end),
        )


class Message:
    def __init__(self, data: bytes, reply: str = "r") -> None:
        self.data = data
        self.reply = reply


class Link:
    def __init__(self) -> None:
        self.said: asyncio.Queue[ListReply] = asyncio.Queue()

    def publish(self, subject: str, data: bytes) -> bool:
        assert subject == "r"
        self.said.put_nowait(msgspec.json.decode(data, type=ListReply))
        return True


class Rig:
    def __init__(self, provider: Provider) -> None:
        self.link = Link()
        providers: Mapping[str, Any] = {"p": provider}
        self.listings = Listings(self.link, providers, "d1")  # type: ignore[arg-type]

    async def ask(self, token: str = "", authority: str = "host") -> ListReply:
        request = ListRequest(authority=authority, token=token)
        self.listings.take(Message(msgspec.json.encode(request)))
        return await asyncio.wait_for(self.link.said.get(), 10)

    async def walk(self) -> tuple[list[str], list[ListReply]]:
        replies, token = [], ""
        while True:
            replies.append(await self.ask(token))
            token = replies[-1].token
            if not token:
                names = [item.ref.native_id for reply in replies for item in reply.items]
                return names, replies


@pytest.mark.parametrize(("count", "size"), [(0, 10), (1, 10), (250, 100), (250, 1_000), (100, 50)])
async def test_s189_every_page_is_read_and_only_the_last_is_complete(
    count: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listings, "PAGE", 50)
    provider = Provider(count, size)
    names, replies = await Rig(provider).walk()
    assert names == [item.ref.native_id for item in provider.items]
    assert [reply.complete for reply in replies] == [False] * (len(replies) - 1) + [True]
    assert all(len(reply.items) <= 50 for reply in replies)
    assert provider.calls == max(1, -(-count // size))
    assert {(reply.deployment, reply.observes_gone) for reply in replies} == {("d1", False)}


async def test_a_list_that_its_provider_does_not_call_complete_is_not() -> None:
    _, replies = await Rig(Provider(5, 2, complete=False)).walk()
    assert not any(reply.complete for reply in replies)


async def test_a_walk_that_was_forgotten_is_over_and_never_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listings, "PAGE", 1)
    rig = Rig(Provider(9, 9))
    first = await rig.ask()
    for _ in range(listings.WALKS_MAX):
        await rig.ask()
    reply = await rig.ask(first.token)
    assert (reply.problem, reply.complete, reply.token) == ("walk_is_over", False, "")


async def test_only_our_own_labels_go_out_and_not_at_any_length() -> None:
    provider = Provider(1, 1)
    labels = {"sandbox": "s", "create_id": "c" * 9_000, "theirs": "x" * 9_000}
    provider.items = [Listed(ref=ref(), labels=labels, state="present")]
    said = (await Rig(provider).ask()).items[0].labels
    assert said == {"sandbox": "s", "create_id": "c" * listings.LABEL_CHARS_MAX}


async def test_another_authority_and_nonsense_are_problems() -> None:
    rig = Rig(Provider(1, 1))
    assert (await rig.ask(authority="elsewhere")).problem == "another_authority"
    rig.listings.take(Message(b"nonsense"))
    assert (await rig.link.said.get()).problem.startswith("malformed")
    rig.listings.take(Message(b"{}", reply=""))
    await rig.listings.close()
    assert rig.link.said.empty()
