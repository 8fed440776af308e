"""
Checkpoints, stopped recoveries and claims, for the client.

A command is stored first and waited for afterwards. What a new generation gets back is the shard's
work; nothing here takes part in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from fencepost.client import answers, checks, commands, ulid
from fencepost.client.outbox import publish_durably
from fencepost.contracts import subjects
from fencepost.core.errors import RefusedError, RetryLaterError, UnknownError
from fencepost.core.sandbox.holding import OPERATOR
from fencepost.runtime.link import Link
from nats.aio.msg import Msg

_LOOK_S: Final = 0.1
Decision = Literal["accept", "tell", "discard"]
Result = TypeVar("Result")

_encode = msgspec.json.Encoder().encode


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """
    A workspace as it is stored outside its sandbox, under `manifest`.

    It holds everything that was committed before it. `sent_bytes` is what the store did not have
    before; a count is 0 where only the owner of the shard was asked.
    """

    sandbox: str
    checkpoint: str
    manifest: str
    journal_seq: int = 0
    files: int = 0
    size_bytes: int = 0
    sent_bytes: int = 0


class RecoveryCalls:
    """The part of the client that is about recovery, and about what keeps a sandbox."""

    link: Link

    async def show(self, sandbox: str) -> dict[str, Any]:
        raise NotImplementedError

    async def checkpoint(
        self, sandbox: str, *, reason: str = "", timeout_s: float = 60.0
    ) -> Checkpoint:
        """
        Takes a checkpoint of the workspace and waits until it is stored and recorded.

        It is taken between two steps, once everything under way has ended. Raises `RefusedError`,
        `RetryLaterError` where the store or the disk failed (the former checkpoint stands), and
        `UnknownError` when nothing is known in time.
        """
        commands.require_id("sandbox", sandbox)
        checks.text("reason", reason)
        name = ulid.mint()
        async with _events(self.link, sandbox, ("checkpointed", "checkpoint_failed")) as heard:

            def taken(view: dict[str, Any]) -> Checkpoint | None:
                told: dict[str, Any] = {}
                for kind, event in heard:
                    if event.get("checkpoint") != name:
                        continue
                    if kind == "checkpoint_failed":
                        detail = event.get("detail") or event.get("reason")
                        raise RetryLaterError(f"{sandbox}: the checkpoint failed: {detail}")
                    told = event
                newest = view.get("checkpoint") or {}
                if not told and newest.get("checkpoint") != name:
                    # None will come of these, so nobody waits for one.
                    raise_if_stopped(view)
                    if view["state"] in ("releasing", "gone"):
                        detail = f"sandbox: {sandbox} was released before it was taken"
                        raise RefusedError("sandbox_released", detail, field="sandbox")
                    return None
                found = {**newest, **told, "sandbox": sandbox, "checkpoint": name}
                return msgspec.convert(found, Checkpoint)

            command = _Command("checkpoint", sandbox, name, {"reason": reason})
            return await self._order(command, taken, f"no checkpoint of {sandbox}", timeout_s)

    async def recover(
        self,
        sandbox: str,
        decision: Decision,
        *,
        who: str,
        note: str = "",
        timeout_s: float = 60.0,
    ) -> dict[str, Any]:
        """
        Decides a recovery that stopped, by a person's word, which is recorded as such.

        `accept`: the disk as it is, and on with what is still owed. `tell`: what is still owed is
        given up and listed. `discard`: this disk is given up; it begins anew on another one.
        Gives what `show` says then. Raises `RefusedError` where no recovery has stopped.
        """
        checks.one_of("decision", decision, ("accept", "tell", "discard"))
        checks.text("who", who, empty=False)
        checks.text("note", note)
        before = await self.show(sandbox)
        if _stopped(before) is None:
            raise RefusedError(
                "not_stopped",
                f"sandbox: {sandbox} is {before['state']}; only a recovery that stopped is decided",
                field="sandbox",
            )

        def decided(view: dict[str, Any]) -> dict[str, Any] | None:
            moved = view["epoch"] != before["epoch"] or not view["open"]
            return view if moved or _stopped(view) is None else None

        body = {"decision": decision, "who": who, "note": note}
        command = _Command("recover", sandbox, ulid.mint(), body)
        return await self._order(command, decided, f"{sandbox} is still stopped", timeout_s)

    async def claim(
        self, sandbox: str, claim: str | None = None, *, reason: str = "", timeout_s: float = 30.0
    ) -> str:
        """
        Keeps a sandbox whoever lets go of it, until `unclaim`; gives the claim's id.

        For work that outlives its DAG. An id is used once. Raises `RefusedError`.
        """
        name = commands.require_id("claim", f"claim-{ulid.mint()}" if claim is None else claim)
        checks.text("reason", reason)
        if name == OPERATOR:
            checks.refused("claim", f"another name than {OPERATOR}", name, reason="reserved")

        def claimed(view: dict[str, Any]) -> str | None:
            return name if name in view["claims"] else None

        command = _Command("claim", sandbox, name, {"reason": reason})
        return await self._order(command, claimed, f"{sandbox} is not claimed", timeout_s)

    async def unclaim(self, sandbox: str, claim: str, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """
        Ends a claim; where nothing else keeps the sandbox, it is released.

        Gives what `show` says then. Raises `RefusedError`.
        """
        commands.require_id("claim", claim)
        if claim not in (await self.show(sandbox))["claims"]:
            raise RefusedError(
                "unknown_claim", f"claim: no claim {claim!r} keeps {sandbox}", field="claim"
            )

        def unclaimed(view: dict[str, Any]) -> dict[str, Any] | None:
            return view if claim not in view["claims"] else None

        command = _Command("unclaim", sandbox, claim, {})
        return await self._order(command, unclaimed, f"{claim} still keeps {sandbox}", timeout_s)

    async def _order(
        self,
        command: _Command,
        done: Callable[[dict[str, Any]], Result | None],
        otherwise: str,
        timeout_s: float,
    ) -> Result:
        """Stores a command and looks at the sandbox until that shows what became of it."""
        kind, sandbox, name, body = command
        commands.require_id("sandbox", sandbox)
        checks.seconds("timeout_s", timeout_s)
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        async with await answers.Refusals.listen(self.link, sandbox, name) as refusals:
            await publish_durably(self.link, subjects.command(kind, sandbox, name), _encode(body))
            while True:
                # Looked at first: a refusal that comes while this asks is heard after it.
                with contextlib.suppress(UnknownError):
                    found = done(await self.show(sandbox))
                    if found is not None:
                        return found
                refusals.raise_any()
                if loop.time() > until:
                    raise UnknownError(f"{otherwise} within {timeout_s:g} s")
                await asyncio.sleep(_LOOK_S)


class _Command(NamedTuple):
    kind: str
    sandbox: str
    name: str
    body: dict[str, Any]


def raise_if_stopped(view: Mapping[str, Any]) -> None:
    """Raises for a sandbox whose recovery waits for a person: it will not be live by itself."""
    if view and (stopped := _stopped(view)) is not None:
        detail = stopped["detail"] or stopped["reason"]
        raise RefusedError(
            "recovery_stopped",
            f"sandbox: the recovery of {view['sandbox']} stopped ({stopped['reason']}): {detail}",
            field="sandbox",
        )


def _stopped(view: Mapping[str, Any]) -> dict[str, Any] | None:
    """The recovery of a sandbox's view, where it has stopped."""
    recovering: dict[str, Any] | None = view.get("recovering")
    return recovering if recovering is not None and recovering["phase"] == "stopped" else None


@contextlib.asynccontextmanager
async def _events(
    link: Link, sandbox: str, kinds: Sequence[str]
) -> AsyncIterator[list[tuple[str, dict[str, Any]]]]:
    """Events of these kinds as they come in."""
    heard: list[tuple[str, dict[str, Any]]] = []

    def hear(kind: str, message: Msg) -> None:
        heard.append((kind, msgspec.json.decode(message.data)))

    async with contextlib.AsyncExitStack() as stack:
        for kind in kinds:
            subscription = await link.subscribe_raw(
                subjects.event_sandbox(sandbox, kind), functools.partial(hear, kind)
            )
            stack.push_async_callback(subscription.unsubscribe)
        yield heard
