"""
DAGs, for the client: open, acquire, adopt, cancel, finish, and what is said of releases.

A command is stored first and waited for afterwards; a client may die in between, the DAG goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from fencepost.client import checks, commands, ulid
from fencepost.contracts import streams, subjects
from fencepost.contracts.messages import AskDag, Position
from fencepost.core import limits
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.core.steps import SandboxSpec
from fencepost.runtime import dags
from fencepost.runtime.bus import JetStreamInputs
from fencepost.runtime.dags import Heard, Verdict
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link, stream_info
from fencepost.runtime.ports import InputMessage, Unknown, Valid

_STORE_S: Final = 30.0
_LOOK_S: Final = 0.25
_PAGE: Final = 200
_EVENTS_KEPT_MAX: Final = 4_096
_STATUS_MAX: Final = 64

_NODES_BYTES_MAX: Final = limits.INPUT_ENTRIES_BYTES_MAX // 2
"""What an entry of the ledger takes, however the names are written there."""

View = dict[str, Any]
"""What the owner of a DAG's shard says of it."""


class Acquired(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox in a slot. `epoch` is 0 while it is not ready."""

    dag: str
    slot: str
    sandbox: str
    acquisition: str
    epoch: int = 0


class DagCalls:
    """The part of the client that is about DAGs."""

    link: Link
    shards: int

    async def show(self, sandbox: str) -> dict[str, Any]:
        raise NotImplementedError

    async def open_dag(
        self,
        dag: str | None = None,
        nodes: Sequence[str] = (),
        *,
        retry_of: str = "",
        timeout_s: float = 30.0,
    ) -> str:
        """
        Opens a DAG and gives its id; the same id again is the same DAG.

        `nodes` are the author's own names, any text. Raises `RefusedError`.
        """
        dag = commands.require_id("dag", f"dag-{ulid.mint()}" if dag is None else dag)
        if retry_of:
            commands.require_id("retry_of", retry_of)
        names = checks.texts("nodes", nodes)
        size = sum(len(name.encode()) for name in names)
        if size > _NODES_BYTES_MAX:
            expected = f"at most {_NODES_BYTES_MAX} bytes of names in all"
            raise RefusedError(
                "too_large",
                f"nodes: expected {expected}, got {size}",
                field="nodes",
                expected=expected,
            )
        body = {"do": "open", "nodes": names, "retry_of": retry_of}
        await self._tell(dag, body, lambda _heard, view: view is not None, timeout_s=timeout_s)
        return dag

    async def start_node(self, dag: str, node: str, *, timeout_s: float = 30.0) -> None:
        """Says that a node runs. Raises `RefusedError` where the DAG is closed or lacks it."""

        def is_done(heard: Heard, view: View | None) -> bool:
            started = heard.find("node_started", node) is not None
            return started or _status(view, node) not in ("", "waiting")

        _name("node", node)
        await self._tell(dag, {"do": "start", "node": node}, is_done, timeout_s=timeout_s)

    async def finish_node(
        self,
        dag: str,
        node: str,
        *,
        status: str = "succeeded",
        release: Sequence[str] = (),
        timeout_s: float = 30.0,
    ) -> None:
        """Ends a node, and releases the slots that it was the last to use."""

        def is_done(heard: Heard, view: View | None) -> bool:
            ended = heard.find("node_finished", node) is not None
            return ended or _status(view, node) not in ("", "waiting", "running")

        _name("node", node)
        _word("status", status)
        slots = checks.texts("release", release)
        body = {"do": "finish_node", "node": node, "status": status, "release": slots}
        await self._tell(dag, body, is_done, timeout_s=timeout_s)

    async def acquire(
        self,
        dag: str,
        slot: str,
        spec: SandboxSpec | Mapping[str, Any] | None = None,
        *,
        replace: bool = False,
        wait: bool = True,
        acquisition: str | None = None,
        timeout_s: float = 60.0,
    ) -> Acquired:
        """
        Gets a fresh sandbox into a slot; with `wait` it has a live generation then.

        Its id is the acquisition's. Raises `RefusedError` where the DAG is closed, the slot is
        taken (without `replace`), or the sandbox cannot be made; `UnknownError` when it is not
        ready in time: then it is still on its way, and the DAG's cancel releases it.
        """
        made = f"sbx-{ulid.mint()}" if acquisition is None else acquisition
        sandbox = commands.require_id("acquisition", made)
        checks.flag("replace", replace)
        wanted = msgspec.to_builtins(commands.spec_of(spec))
        body = {"do": "acquire", "slot": slot, "spec": wanted, "replace": replace}
        try:
            return await self._get(dag, sandbox, slot, body, wait=wait, timeout_s=timeout_s)
        except UnknownError as error:
            with contextlib.suppress(RefusedError, UnknownError):
                if why := unserved(await self.show(sandbox)):
                    raise UnknownError(f"{error}: {why}") from error
            raise

    async def adopt(
        self,
        dag: str,
        slot: str,
        sandbox: str,
        *,
        replace: bool = False,
        wait: bool = True,
        timeout_s: float = 60.0,
    ) -> Acquired:
        """Gets a sandbox that exists into a slot; it is then held by this DAG too."""
        commands.require_id("sandbox", sandbox)
        checks.flag("replace", replace)
        body = {"do": "adopt", "slot": slot, "sandbox": sandbox, "replace": replace}
        return await self._get(
            dag, f"acq-{ulid.mint()}", slot, body, wait=wait, timeout_s=timeout_s
        )

    async def release_slot(self, dag: str, slot: str, *, timeout_s: float = 30.0) -> None:
        """Lets go of what a slot names. The release goes on by itself: see `show_dag`."""

        def is_done(_heard: Heard, view: View | None) -> bool:
            return view is not None and all(
                one["phase"] == "releasing" for one in view["outstanding"] if one["slot"] == slot
            )

        _name("slot", slot)
        await self._tell(dag, {"do": "release", "slot": slot}, is_done, timeout_s=timeout_s)

    async def cancel_dag(
        self, dag: str, *, reason: str = "cancelled", bound_s: float = 5.0
    ) -> Verdict:
        """
        Closes a DAG, releases all that it holds, and gives the verdict, within `bound_s`.

        `unconfirmed` is an answer, not an error: its `reason` says what is in the way, the release
        goes on, and `releases` tells of every change. Raises `RefusedError` for an unknown DAG.
        """
        commands.require_id("dag", dag)
        checks.text("reason", reason)
        bound_ms = int(checks.seconds("bound_s", bound_s) * 1000)
        if not 1 <= bound_ms <= limits.CANCEL_BOUND_MS_MAX:
            expected = f"seconds from 0.001 to {limits.CANCEL_BOUND_MS_MAX // 1000}"
            checks.refused("bound_s", expected, bound_s, reason="out_of_range")
        return await dags.cancel(
            self.link, self.shards, dag, ulid.mint(), reason=reason, bound_ms=bound_ms
        )

    async def finish_dag(
        self, dag: str, *, status: str = "succeeded", timeout_s: float = 30.0
    ) -> None:
        """Ends a DAG by itself: nothing more is acquired, and all that it holds is released."""

        def is_done(heard: Heard, view: View | None) -> bool:
            return "finished" in heard.kinds or bool(view and view["finished"])

        _word("status", status)
        await self._tell(dag, {"do": "finish", "status": status}, is_done, timeout_s=timeout_s)

    async def show_dag(self, dag: str) -> View:
        """
        What the owner of its shard says of a DAG, after a proof that it still owns it.

        Raises `RefusedError` for one that does not exist: that is proven.
        """
        commands.require_id("dag", dag)
        view = await dags.show(self.link, self.shards, dag)
        if view is None:
            raise RefusedError("unknown_dag", f"dag: there is no DAG {dag!r}", field="dag")
        return view

    async def list_dags(self, *, released: str | None = None) -> AsyncIterator[View]:
        """All DAGs, shard by shard; with `released`, those with this verdict."""
        if released is not None:
            checks.one_of("released", released, ("confirmed", "unconfirmed", "nothing_held"))
        for shard in range(self.shards):
            after: str | None = ""
            while after is not None:
                question = AskDag(
                    what="dags",
                    after=after,
                    limit=_PAGE,
                    released=released or "",  # type: ignore[arg-type]
                )
                page = await dags.ask(self.link, shard, question, timeout_s=5.0)
                for item in page["items"]:
                    yield item
                after = page["next"]

    async def releases(
        self, dag: str | None = None, *, from_start: bool = False
    ) -> AsyncIterator[Verdict]:
        """
        Verdicts as they are given, for ever: of one DAG, or of all.

        At least once each; order and tell repeats by `position`. `from_start` begins with those
        that the server still keeps. A connection that was lost is read on from where it was.
        """
        subject = subjects.release("*" if dag is None else commands.require_id("dag", dag))
        async for message in events(self.link, subject, from_start=from_start):
            yield dags.decode_verdict(message.data)

    async def releases_so_far(self, dag: str | None = None) -> list[Verdict]:
        """The verdicts that the server keeps now, oldest first."""
        subject = subjects.release("*" if dag is None else commands.require_id("dag", dag))
        last = await JetStreamLog(self.link, stream=streams.EVENTS).last(subject)
        if isinstance(last, Unknown):
            raise UnknownError(f"{streams.EVENTS} cannot be read: {last.reason}")
        found: list[Verdict] = []
        if isinstance(last, Valid):
            async with contextlib.aclosing(events(self.link, subject, from_start=True)) as read:
                async for message in read:
                    found.append(dags.decode_verdict(message.data))
                    if message.seq >= last.seq:
                        break
        return found

    # Inside

    async def _get(
        self, dag: str, id_: str, slot: str, body: View, *, wait: bool, timeout_s: float
    ) -> Acquired:
        sandbox = str(body.get("sandbox", id_))
        _name("slot", slot)

        def is_done(heard: Heard, view: View | None) -> bool:
            for kind in ("abandoned", "release_settled"):
                if ended := heard.find(kind, id_):
                    why = str(ended.get("reason") or "released")
                    raise RefusedError(why, f"slot: {slot!r} was not acquired: {why}", field="slot")
            if not wait:
                return heard.find("intended", id_) is not None or _phase(view, id_) != ""
            if _phase(view, id_) == "releasing":
                raise RefusedError("dag_closed", f"slot: {slot!r} is being released", field="slot")
            return heard.find("ready", id_) is not None or _phase(view, id_) == "ready"

        heard = await self._tell(dag, body, is_done, id_=id_, timeout_s=timeout_s)
        ready = heard.find("ready", id_) or {}
        return Acquired(
            dag=dag, slot=slot, sandbox=sandbox, acquisition=id_, epoch=ready.get("epoch", 0)
        )

    async def _tell(
        self,
        dag: str,
        body: View,
        is_done: Callable[[Heard, View | None], bool],
        *,
        timeout_s: float,
        id_: str | None = None,
    ) -> Heard:
        """Stores a command and waits until `is_done`, by what is heard and what is asked for."""
        commands.require_id("dag", dag)
        checks.seconds("timeout_s", timeout_s)
        command = id_ or ulid.mint()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async with dags.listening(self.link, dag) as heard:
            await dags.store(self.link, dag, command, body, within_s=min(timeout_s, _STORE_S))
            view: View | None = None
            while not is_done(heard, view):
                refused = heard.refusal_of(command)
                if refused is not None:
                    raise refused
                left = deadline - loop.time()
                if left <= 0:
                    raise UnknownError(
                        f"DAG {dag}: {body['do']} was stored, and not seen done within"
                        f" {timeout_s:g} s"
                    )
                await heard.wait(min(left, _LOOK_S))
                if not heard.woken.is_set() or _NEWS_OF.get(body["do"], "") in heard.kinds:
                    view = await self._look(dag)
            return heard

    async def _look(self, dag: str) -> View | None:
        try:
            return await dags.show(self.link, self.shards, dag, timeout_s=1.0)
        except UnknownError:
            return None


# Which event says that a look at the DAG is worth it at once.
_NEWS_OF: Final = {"open": "opened", "release": "release_begun"}


def unserved(view: Mapping[str, Any]) -> str:
    """
    Says that no gateway was found that could make this sandbox, or nothing.

    No refusal: one that offers its provider may come at any time, and it is made then.
    """
    if view.get("state") != "creating" or view.get("asked_of", "?"):
        return ""
    return f"no gateway that offers provider {view['provider']!r} is heard of"


def _word(field: str, value: object) -> None:
    if not 0 < len(checks.text(field, value)) <= _STATUS_MAX:
        checks.refused(field, f"1 to {_STATUS_MAX} characters", value, reason="out_of_range")


def _name(field: str, value: object) -> None:
    """Any text, within the bound: a name travels as a value."""
    checks.text(field, value, bytes_max=limits.NAME_BYTES_MAX)


def _status(view: View | None, node: str) -> str:
    nodes = view["nodes"] if view is not None else ()
    return next((str(one["status"]) for one in nodes if one["node"] == node), "")


def _phase(view: View | None, acquisition: str) -> str:
    found = view["outstanding"] if view is not None else ()
    return next((str(a["phase"]) for a in found if a["acquisition"] == acquisition), "")


async def events(
    link: Link, subject: str, *, from_start: bool = False
) -> AsyncGenerator[InputMessage]:
    """
    Public events of one subject in order, for ever.

    The server keeps them in memory only: where it was started again, those of before are gone, and
    the reading goes on with what comes.
    """
    inputs = JetStreamInputs(link)
    while True:
        info = await stream_info(link, streams.EVENTS)
        if info.error is not None:
            raise UnknownError(f"{streams.EVENTS} cannot be read: {info.error.description}")
        after = Position(info.created, 0 if from_start else info.state.last_seq)
        queue: asyncio.Queue[InputMessage | None] = asyncio.Queue()
        reader = await inputs.open(
            streams.EVENTS,
            [subject],
            after=after,
            take=queue.put_nowait,
            room=lambda queue=queue: _EVENTS_KEPT_MAX - queue.qsize(),  # type: ignore[misc]
            fail=lambda _error, queue=queue: queue.put_nowait(None),  # type: ignore[misc]
        )
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            await reader.close()
        from_start = True  # another stream in the same place: all of it is new
