"""
The Python client: a thin front of the subjects.

It sends commands durably, packs what one loop turn sends to one shard, listens for final events,
and asks for what stays silent. Everything it knows it can ask again; a client may die at any time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec
import nats.errors
from fencepost.client import answers, blobs, checks, commands, ledger, ulid
from fencepost.client.commands import Undo
from fencepost.client.dags import DagCalls, unserved
from fencepost.client.errors import NoServerError, OutcomeUnknownError, ToolFailedError
from fencepost.client.outbox import Outbox, publish_durably
from fencepost.client.outcome import StepOutcome
from fencepost.client.recovery import RecoveryCalls, raise_if_stopped
from fencepost.client.waiting import Waiting, Waits
from fencepost.contracts import streams, subjects
from fencepost.contracts.messages import Ask, ReadReply, ReadRequest
from fencepost.core import ids, limits
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.core.steps import CommitAfter, SandboxSpec, canonical, digest_of
from fencepost.runtime import access, address
from fencepost.runtime.access import Access
from fencepost.runtime.link import DeniedError, Link
from fencepost.runtime.streams import Cut

UP_FILE: Final = Path(".fencepost/up.json")
_ASK_S: Final = 2.0
_POLL_S: Final = 0.05
_CONNECT_S: Final = 5

_encode = msgspec.json.Encoder().encode
_decode_read = msgspec.json.Decoder(ReadReply).decode


class ReadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a read-only tool said, and of which generation."""

    result: Any
    epoch: int
    session: str


class StepHandle:
    """A step on its way. `outcome()` may be awaited any number of times."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    @property
    def sandbox(self) -> str:
        return self._waiting.sandbox

    @property
    def step(self) -> str:
        return self._waiting.step

    async def outcome(self, *, timeout_s: float | None = None) -> StepOutcome:
        """
        Waits for the end of the step.

        Raises `RefusedError` when it never became a step, `RetryLaterError` when the same call
        may be sent again, `OutcomeUnknownError` when `timeout_s` is over.
        """
        if timeout_s is None:
            return await self._waiting.end()
        checks.seconds("timeout_s", timeout_s, or_none=True)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._waiting.end()
        except TimeoutError as error:
            raise OutcomeUnknownError(self.sandbox, self.step, timeout_s) from error


class Client(DagCalls, RecoveryCalls):
    """One connection; safe for any number of tasks of one loop."""

    def __init__(self, link: Link, shards: int, ledgers: int = 1) -> None:
        self.link = link
        self.shards = shards
        self.ledgers = ledgers
        self._blobs = blobs.Blobs(link)
        self._waits = Waits(link, shards, ledgers)
        self._outbox = Outbox(link, taken=self._waits.taken, failed=self._waits.failed)
        self._waits.send_again = self._outbox.put_again

    @classmethod
    async def connect(
        cls,
        url: str | None = None,
        *,
        name: str = "fencepost-client",
        wait_s: float = 0.0,
        user: Access | None = None,
    ) -> Client:
        """
        Connects to `url`, else to FENCEPOST_NATS_URL, else to what `fencepost up` wrote here.

        `user` says as whom; left out, FENCEPOST_NATS_CREDENTIALS, FENCEPOST_NATS_CA, …_CERT and
        …_KEY do, else the credentials that `fencepost up` made here. `wait_s`: how long to wait
        for a deployment that is just starting. `url` may name several servers, and a user, who
        goes before all of these (`runtime.address`). Raises `NoServerError`, and `RefusedError`
        where the server does not take the credentials.
        """
        checks.text("name", name, bytes_max=256)
        checks.seconds("wait_s", wait_s, or_none=True)
        user = user_of_environment() if user is None else user
        found = url
        if found is None:
            found = os.environ.get("FENCEPOST_NATS_URL") or url_of_up(UP_FILE)
        if found is None:
            raise NoServerError(
                "no server: name one, set FENCEPOST_NATS_URL, or run `fencepost up` in this folder"
            )
        shown = address.require("FENCEPOST_NATS_URL" if url is None else "url", found).shown
        deadline = asyncio.get_running_loop().time() + wait_s
        while not await takes_connections(found):
            if asyncio.get_running_loop().time() >= deadline:
                raise NoServerError(f"no server at {shown}")
            await asyncio.sleep(_POLL_S)
        try:
            link = await Link.connect(found, name=name, access=user)
        except (nats.errors.Error, OSError, ValueError) as error:
            raise NoServerError(f"no server at {shown}: {error or type(error).__name__}") from error
        try:
            cut = await _cut_of(link, deadline)
            client = cls(link, cut.shards, cut.ledgers)
        except BaseException:
            await link.close()
            raise
        client._waits.start()
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Steps on their way go on without this client."""
        await self._waits.close()
        self._outbox.close()
        await self.link.close()

    # Steps

    async def step(
        self,
        sandbox: str,
        tool: str,
        args: Mapping[str, Any] | None = None,
        *,
        step: str | None = None,
        compensation: Mapping[str, Any] | None = None,
        on_moved_epoch: Literal["retry", "reject"] = "retry",
        attempts_max: int | None = None,
        deadline_ms: int | None = None,
        commit_after: CommitAfter = "receipt",
        effect: Literal["workspace", "external"] = "workspace",
        timeout_s: float | None = None,
        **kw: Any,
    ) -> StepOutcome:
        """
        Runs one mutating tool call and waits for its end; see `submit` and `StepHandle.outcome`.

        The same `step` id again is the same call: it is not run twice, and both get its outcome.
        A step that is not committed is an outcome, not an error: look, or call `.require()`.
        """
        if timeout_s is not None:
            checks.seconds("timeout_s", timeout_s, or_none=True)
        handle = await self.submit(
            sandbox,
            tool,
            args,
            step=step,
            compensation=compensation,
            on_moved_epoch=on_moved_epoch,
            attempts_max=attempts_max,
            deadline_ms=deadline_ms,
            commit_after=commit_after,
            effect=effect,
            **kw,
        )
        return await handle.outcome(timeout_s=timeout_s)

    async def submit(
        self,
        sandbox: str,
        tool: str,
        args: Mapping[str, Any] | None = None,
        *,
        step: str | None = None,
        compensation: Mapping[str, Any] | None = None,
        on_moved_epoch: Literal["retry", "reject"] = "retry",
        attempts_max: int | None = None,
        deadline_ms: int | None = None,
        commit_after: CommitAfter = "receipt",
        effect: Literal["workspace", "external"] = "workspace",
        **kw: Any,
    ) -> StepHandle:
        """
        Sends one mutating tool call. It is sent at the end of the loop turn, and durable only
        once the server has acknowledged it; until then a lost client may have sent nothing.

        `deadline_ms` counts from admission. `commit_after` says what has to be there before it is
        committed: the joined receipt, a heartbeat that came later, or a checkpoint that holds the
        write. Raises `RefusedError` naming the wrong field before
        anything is sent.
        """
        arguments = {**checks.mapping("args", args), **kw} if args is not None else kw
        commands.require_id("sandbox", sandbox)
        if step is None:
            step = ulid.mint()
        else:
            commands.require_id("step", step)
        commands.require_arguments(tool, arguments)
        if compensation is not None:
            checks.mapping("compensation", compensation)
        commands.require_compensation(tool, compensation)
        body = await self._body(tool, arguments)
        command = commands.step_command(
            sandbox,
            step,
            tool,
            body,
            compensation=commands.compensation_of(compensation),
            on_moved_epoch=on_moved_epoch,
            attempts_max=attempts_max,
            deadline_ms=deadline_ms,
            commit_after=commit_after,
            effect=effect,
        )
        if len(command) > limits.COMMAND_BYTES_MAX:
            raise _too_large("compensation", len(command), limits.COMMAND_BYTES_MAX)
        if not self._waits.is_watching(sandbox):
            await self._waits.watch(sandbox)
        digest = digest_of(body)
        known = self._waits.find(sandbox, step)
        if known is not None:
            if known.digest != digest:
                raise _id_reused(step)
            return StepHandle(known)
        waiting = self._waits.add(sandbox, step, command, digest)
        self._outbox.put(waiting)
        return StepHandle(waiting)

    async def _body(self, tool: str, arguments: Mapping[str, Any]) -> bytes:
        body = commands.written("args", arguments)
        if len(body) <= limits.INLINE_BYTES_MAX:
            return body
        referring = await blobs.by_reference(self._blobs, tool, dict(arguments))
        body = canonical(referring)
        if len(body) > limits.INLINE_BYTES_MAX:
            largest = max(referring, key=lambda name: len(canonical(referring[name])))
            raise _too_large(f"args.{largest}", len(body), limits.INLINE_BYTES_MAX)
        return body

    async def wait(self, sandbox: str, step: str, *, timeout_s: float | None = None) -> StepOutcome:
        """Waits for the end of a step that somebody else sent, or this client before."""
        commands.require_id("sandbox", sandbox)
        commands.require_id("step", step)
        if timeout_s is not None:
            checks.seconds("timeout_s", timeout_s, or_none=True)
        await self._waits.watch(sandbox)
        waiting = self._waits.find(sandbox, step) or self._waits.add(sandbox, step, b"", "")
        self._waits.ask_soon(waiting)
        return await StepHandle(waiting).outcome(timeout_s=timeout_s)

    async def write_file(
        self, sandbox: str, path: str, content: str | bytes, **options: Any
    ) -> StepOutcome:
        """Writes a whole file, atomically, up to 64 MB. Options: `mode`, `create_dirs`, `step`…"""
        return await self.step(
            sandbox, "write_file", {"path": path, **_content("content", content)}, **options
        )

    async def apply_patch(self, sandbox: str, patch: str | bytes, **options: Any) -> StepOutcome:
        """Applies a unified diff, all files or none, without fuzz."""
        return await self.step(sandbox, "apply_patch", _content("patch", patch), **options)

    async def delete_path(self, sandbox: str, path: str, **options: Any) -> StepOutcome:
        """Deletes a file, or a folder with `recursive=True`."""
        return await self.step(sandbox, "delete_path", {"path": path}, **options)

    async def run_command(
        self,
        sandbox: str,
        command: Undo,
        *,
        undo: Undo | None = None,
        readonly: bool = False,
        **options: Any,
    ) -> StepOutcome | ReadResult:
        """
        Runs a command: a shell line, an argv, or `run_command` arguments.

        A mutating one needs `undo`, an idempotent command that takes its effect back. With
        `readonly` it runs on a read-only view where the provider has one, without a step, and
        gives a `ReadResult`; elsewhere it is run as a mutating step with nothing to undo.
        """
        arguments = commands.command_arguments(command)
        if readonly:
            try:
                return await self.read(sandbox, "run_command", arguments)
            except RefusedError as error:
                if error.reason != "unsupported":
                    raise
        compensation: Mapping[str, Any] | None = None
        if undo is not None:
            compensation = {"kind": "command", "args": commands.command_arguments(undo)}
        elif readonly:
            compensation = commands.NOTHING_TO_UNDO
        return await self.step(
            sandbox, "run_command", arguments, compensation=compensation, **options
        )

    async def run_migration(
        self, sandbox: str, name: str, *, up: Undo, down: Undo, **options: Any
    ) -> StepOutcome:
        """Runs `up`; `down` is what takes it back. `effect="external"` when it acts outside."""
        arguments = {
            "name": name,
            "up": commands.command_arguments(up),
            "down": commands.command_arguments(down),
        }
        return await self.step(sandbox, "run_migration", arguments, **options)

    async def cancel(
        self, sandbox: str, step: str, *, reason: str = "", timeout_s: float | None = None
    ) -> StepOutcome:
        """
        Cancels a step and waits for its end. One that committed before stays committed.

        Raises `RefusedError` for a step that is not known.
        """
        checks.text("reason", reason)
        if timeout_s is not None:
            checks.seconds("timeout_s", timeout_s, or_none=True)
        answer = await self._step_answer(sandbox, step)
        sent = self._waits.find(sandbox, step)
        while (
            answer.status == "absent" and sent is not None and sent.command and sent.ended is None
        ):
            # This client's own, and still on its way: it may yet begin.
            await asyncio.sleep(_POLL_S)
            answer = await self._step_answer(sandbox, step)
        if answer.status == "absent":
            raise RefusedError("unknown_step", f"step: there is no step {step!r}", field="step")
        if answer.status == "open":
            await self._command("cancel", sandbox, step, {"reason": reason})
        return await self.wait(sandbox, step, timeout_s=timeout_s)

    async def resolve(
        self,
        sandbox: str,
        step: str,
        as_: Literal["committed", "compensated"],
        *,
        who: str,
        note: str,
        timeout_s: float = 30.0,
    ) -> str:
        """
        Closes an indeterminate step by an operator's word, which is recorded as such.

        Gives the step's state afterwards. Raises `RefusedError` when it is not indeterminate.
        """
        checks.one_of("as_", as_, ("committed", "compensated"))
        checks.text("who", who, empty=False)
        checks.text("note", note)
        checks.seconds("timeout_s", timeout_s)
        answer = await self._step_answer(sandbox, step)
        if answer.state != "indeterminate":
            raise RefusedError(
                "not_indeterminate",
                f"step: {step!r} is {answer.state or answer.status}; only an indeterminate step"
                " is resolved",
                field="step",
            )
        await self._command("resolve", sandbox, step, {"as": as_, "who": who, "note": note})
        async with _patience(timeout_s, f"step {step} of {sandbox} is still indeterminate"):
            while answer.state == "indeterminate":
                await asyncio.sleep(_POLL_S)
                answer = await self._step_answer(sandbox, step)
        return answer.state

    async def show_step(self, sandbox: str, step: str) -> dict[str, Any]:
        """
        What the owner of the shard says of a step. A hint: it may be out of date at once.

        Raises `RefusedError` for one that it does not know: never taken, refused, or final so
        long ago that only the ledger has it.
        """
        commands.require_id("step", step)
        found = await self._ask(sandbox, Ask(what="step", sandbox=sandbox, step=step))
        if found is None:
            raise RefusedError("unknown_step", f"step: there is no step {step!r}", field="step")
        return dict(found)

    async def _step_answer(self, sandbox: str, step: str) -> answers.StepAnswer:
        commands.require_id("sandbox", sandbox)
        commands.require_id("step", step)
        return await answers.ask_step(
            self.link, self.shards, sandbox, step, ledgers=self.ledgers, timeout_s=_ASK_S
        )

    # Reads

    async def read(
        self,
        sandbox: str,
        tool: str,
        args: Mapping[str, Any] | None = None,
        *,
        epoch_min: int = 0,
        timeout_s: float = 30.0,
        **kw: Any,
    ) -> ReadResult:
        """
        Runs a read-only tool: one request, no ledger, no lease.

        Below `epoch_min` the answer is unknown. Raises `RefusedError` (yours), `ToolFailedError`
        (it ran and failed), `UnknownError` (nothing can be said now).
        """
        arguments = {**checks.mapping("args", {} if args is None else args), **kw}
        commands.require_id("sandbox", sandbox)
        commands.require_arguments(tool, arguments)
        checks.whole("epoch_min", epoch_min, 0)
        checks.seconds("timeout_s", timeout_s)
        request = ReadRequest(
            tool=tool,
            args=msgspec.Raw(commands.written("args", arguments)),
            epoch_min=epoch_min,
            timeout_ms=max(1, int(timeout_s * 1000)),
        )
        try:
            message = await self.link.call(
                subjects.read(sandbox), _encode(request), timeout_s=timeout_s + 1
            )
            reply = _decode_read(message.data)
        except DeniedError:
            raise
        except UnknownError as error:
            state = (await self.show(sandbox))["state"]  # raises where there is none
            raise UnknownError(f"{sandbox} is {state}, and no gateway answers: {error}") from error
        except msgspec.MsgspecError as error:
            raise UnknownError(f"{sandbox}: an answer that cannot be read") from error
        if reply.status == "refused":
            raise RefusedError(
                reply.reason,
                f"{reply.field + ': ' if reply.field else ''}{reply.detail or reply.reason}",
                field=reply.field,
            )
        if reply.status == "unknown":
            raise UnknownError(f"{sandbox}: {reply.reason} {reply.detail}".strip())
        result = msgspec.json.decode(reply.result)
        if reply.status == "failed":
            raise ToolFailedError(tool, result, reply.detail or reply.reason)
        marker = reply.marker
        return ReadResult(
            result=result,
            epoch=marker.epoch if marker else 0,
            session=marker.session if marker else "",
        )

    async def read_file(self, sandbox: str, path: str, **options: Any) -> str:
        """A file's text."""
        return str(
            (await self.read(sandbox, "read_file", {"path": path}, **options)).result["content"]
        )

    async def list_dir(self, sandbox: str, path: str = ".", **options: Any) -> Any:
        return (await self.read(sandbox, "list_dir", {"path": path}, **options)).result

    async def search(self, sandbox: str, pattern: str, **options: Any) -> Any:
        return (await self.read(sandbox, "search", {"pattern": pattern}, **options)).result

    async def stat(self, sandbox: str, path: str, **options: Any) -> Any:
        return (await self.read(sandbox, "stat", {"path": path}, **options)).result

    # Sandboxes

    async def create_sandbox(
        self,
        name: str | None = None,
        spec: SandboxSpec | Mapping[str, Any] | None = None,
        *,
        wait: bool = True,
        reason: str = "",
        timeout_s: float = 60.0,
        say: Callable[[str], None] | None = None,
    ) -> str:
        """
        Creates a sandbox, held for its operator until `release`, and gives its id.

        With `wait` it has a live generation then. The same name and spec again is the same
        sandbox; a name is never used for a second one. `reason` is recorded with the hold.
        `say` is told once why it takes so long, where no gateway offers the spec's provider.
        """
        sandbox = commands.require_id("sandbox", f"sbx-{ulid.mint()}" if name is None else name)
        body = {"spec": commands.spec_of(spec), "reason": checks.text("reason", reason)}
        checks.seconds("timeout_s", timeout_s)
        command = ulid.mint()
        async with await answers.Refusals.listen(self.link, sandbox, command) as refusals:
            await self._command("create", sandbox, command, body)
            if not wait:
                return sandbox
            await self._until_live(sandbox, refusals, timeout_s, say)
        return sandbox

    async def _until_live(
        self,
        sandbox: str,
        refusals: answers.Refusals,
        timeout_s: float,
        say: Callable[[str], None] | None,
    ) -> None:
        since = asyncio.get_running_loop().time()
        why = ""
        try:
            async with _patience(timeout_s, f"sandbox {sandbox} has no live generation"):
                while (view := await self._view_of(sandbox)).get("state") != "live":
                    refusals.raise_any()
                    raise_if_stopped(view)
                    # Not at once: a planner that has just started hears of gateways by and by.
                    waited_ms = 1000 * (asyncio.get_running_loop().time() - since)
                    why = unserved(view) if waited_ms > limits.GATEWAY_SILENT_MS else ""
                    if why and say is not None:
                        say(f"{why}; it is made when one comes")
                        say = None
                    await asyncio.sleep(_POLL_S)
        except UnknownError as error:
            raise UnknownError(f"{error}: {why}" if why else str(error)) from error
        refusals.raise_any()

    async def reclaim(
        self, sandbox: str, *, wait: bool = True, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """
        Takes the sandbox away with its disk, by kill -9, as a preemption would (embedded stack).

        With `wait`, gives what `show` says once a later generation is live.
        """
        checks.seconds("timeout_s", timeout_s)
        before = await self.show(sandbox)
        await self.fault(sandbox, {"do": "reclaim"})
        if not wait:
            return before
        async with _patience(timeout_s, f"sandbox {sandbox} has no later generation"):
            while True:
                now = await self.show(sandbox)
                if now["state"] == "live" and now["epoch"] > before["epoch"]:
                    return now
                await asyncio.sleep(_POLL_S)

    async def fault(
        self, sandbox: str, order: Mapping[str, Any], *, timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Injects a fault through the sandbox's gateway; the verbs are in docs/client.md."""
        commands.require_id("sandbox", sandbox)
        checks.seconds("timeout_s", timeout_s)
        body = commands.written("order", checks.mapping("order", order))
        message = await self.link.call(subjects.fault(sandbox), body, timeout_s=timeout_s)
        return _require_ok(order, message.data)

    async def fault_ahead(
        self, sandbox: str, order: Mapping[str, Any], *, timeout_s: float = 10.0
    ) -> None:
        """Injects a fault into a sandbox that is yet to come: `{"do": "slow_create", "ms": n}`."""
        commands.require_id("sandbox", sandbox)
        checks.seconds("timeout_s", timeout_s)
        body = commands.written("order", {**checks.mapping("order", order), "sandbox": sandbox})
        message = await self.link.call(subjects.FAULT_AHEAD, body, timeout_s=timeout_s)
        _require_ok(order, message.data)

    async def release(
        self, sandbox: str, *, wait: bool = True, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """
        Ends the operator's hold on a sandbox made by hand; the last hold releases it.

        With `wait`, gives what `show` says once it is gone, or once only others hold it.
        """
        commands.require_id("sandbox", sandbox)
        checks.seconds("timeout_s", timeout_s)
        command = ulid.mint()
        async with (
            await answers.Refusals.listen(self.link, sandbox, command) as refusals,
            _patience(timeout_s, f"sandbox {sandbox} is not gone"),
        ):
            await self._command("release", sandbox, command, {})
            while True:
                now = await self.show(sandbox)
                is_held = bool(now["holders"] or now["claims"])
                if not wait or now["state"] == "gone" or (is_held and not _is_claimed(now)):
                    return now
                refusals.raise_any()
                await asyncio.sleep(_POLL_S)

    async def show(self, sandbox: str) -> dict[str, Any]:
        """
        What the owner of the shard says of a sandbox. A hint: it may be out of date at once.

        Raises `RefusedError` for one that does not exist: that is proven.
        """
        found = await self._ask(sandbox, Ask(what="sandbox", sandbox=sandbox))
        if found is None:
            raise RefusedError(
                "unknown_sandbox", f"sandbox: there is no sandbox {sandbox!r}", field="sandbox"
            )
        return dict(found)

    async def list_sandboxes(self) -> list[dict[str, Any]]:
        """All sandboxes, ordered by id. Raises `UnknownError` when any shard does not answer."""
        pages = await asyncio.gather(
            *(
                answers.ask(self.link, shard, Ask(what="sandboxes"), timeout_s=_ASK_S)
                for shard in range(self.shards)
            )
        )
        return sorted((item for page in pages for item in page), key=lambda item: item["sandbox"])

    async def _view_of(self, sandbox: str) -> dict[str, Any]:
        try:
            return await self.show(sandbox)
        except (RefusedError, UnknownError):
            return {}  # not read yet by its shard, or nobody owns that now

    # History

    async def history(
        self, sandbox: str, *, follow: bool = False
    ) -> AsyncIterator[ledger.Recorded]:
        """The batches of the sandbox's shard, which hold those of its neighbours too."""
        commands.require_id("sandbox", sandbox)
        shard = ids.shard_of(sandbox, self.shards)
        async for recorded in ledger.batches(self.link, shard, ledgers=self.ledgers, follow=follow):
            yield recorded

    # Inside

    async def _ask(self, sandbox: str, question: Ask) -> Any:
        commands.require_id("sandbox", sandbox)
        shard = ids.shard_of(sandbox, self.shards)
        return await answers.ask(self.link, shard, question, timeout_s=_ASK_S)

    async def _command(self, kind: str, sandbox: str, id_: str, body: dict[str, Any]) -> None:
        await publish_durably(self.link, subjects.command(kind, sandbox, id_), _encode(body))


def url_of_up(path: Path) -> str | None:
    """The address that `fencepost up` wrote, or None where it wrote none."""
    found = _said_of_up(path).get("nats_url")
    return None if found is None else str(found)


def _said_of_up(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def user_of_environment() -> Access:
    """
    As whom the environment says to connect, or nobody. Raises `RefusedError`.

    Where it says nothing, and the stack of this folder demands credentials, those that it made
    for people.
    """
    said = {
        name: os.environ.get(f"FENCEPOST_NATS_{name.upper()}", "")
        for name in ("credentials", "ca", "cert", "key")
    }
    if not any(said.values()):
        said["credentials"] = str(_said_of_up(UP_FILE).get("nats_credentials") or "")
    return access.read(said["credentials"], ca=said["ca"], cert=said["cert"], key=said["key"])


async def _cut_of(link: Link, deadline: float) -> Cut:
    while True:
        try:
            return await answers.cut(link)
        except UnknownError as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise NoServerError(
                    f"the server has no Fencepost deployment ({streams.BUCKET_META}): {error}"
                ) from error
            await asyncio.sleep(_POLL_S)


async def takes_connections(url: str) -> bool:
    """
    Tells whether something listens there: the connection proper would try for ever.

    Raises `RefusedError` for an address that is none.
    """
    for server in address.require("url", url).servers:
        # A name that is too long for the system's own is a UnicodeError.
        with contextlib.suppress(OSError, TimeoutError, UnicodeError):
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(server.host, server.port)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return True
    return False


def _require_ok(order: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(data or b"{}")
    if not answer.get("ok", True):
        raise RefusedError(
            str(answer.get("reason") or "refused"),
            f"fault {order.get('do')!r}: {answer.get('detail') or answer.get('reason')}",
            field="do",
        )
    return answer


def _is_claimed(sandbox: Mapping[str, Any]) -> bool:
    return "operator" in sandbox["claims"]


@contextlib.asynccontextmanager
async def _patience(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise UnknownError(f"{what} within {seconds:g} s") from error


def _content(field: str, content: str | bytes) -> dict[str, str]:
    if isinstance(content, str):
        return {field: content}
    if not isinstance(content, bytes | bytearray | memoryview):
        checks.refused(f"args.{field}", "text or bytes", content)
    content = bytes(content)
    try:
        return {field: content.decode()}
    except UnicodeDecodeError:
        return {f"{field}_b64": base64.b64encode(content).decode()}


def _id_reused(step: str) -> RefusedError:
    return RefusedError(
        "id_reused",
        f"step: {step!r} was used with other arguments; a new call needs a new id",
        field="step",
    )


def _too_large(field: str, size: int, limit: int) -> RefusedError:
    return RefusedError(
        "too_large",
        f"{field}: expected at most {limit} bytes inline, got {size}",
        field=field,
        expected=f"at most {limit} bytes",
    )
