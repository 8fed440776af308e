"""
Tasks over HTTP: a task is a DAG, or a node of one. Cancels, proofs, and what is outstanding.

Rule 1: a cancel is stored before it is answered, and answered within its bound, whatever the
        release does: status and all fields but the verdict's are the same.
Rule 2: a root that has ended by itself is not cancelled again: nothing is torn down for it here.
Rule 3: a node holds nothing by itself; its cancel says nothing of a release.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fencepost.contracts.messages import AskDag
from fencepost.core import limits
from fencepost.core.errors import RefusedError, RetryLaterError, UnknownError
from fencepost.release_tracker.problems import ProblemError
from fencepost.runtime import dags
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import TrackerMetrics

_ASK_S: Final = 2.0
_LOOK_S: Final = 0.25
_WAITS_FOR_OTHERS: Final = ("shared", "retained", "held")


class Tasks:
    """Talks to the owners of dag shards, wherever they are, by NATS alone."""

    def __init__(self, link: Link, *, shards: int, metrics: TrackerMetrics) -> None:
        self._link = link
        self._shards = shards
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()

    async def show(self, dag: str) -> dict[str, Any] | None:
        """What the owner says after a proof; None is a proven absence. Raises `UnknownError`."""
        view = await dags.show(self._link, self._shards, dag, timeout_s=_ASK_S)
        return None if view is None else shown(view)

    async def page(self, after: str, limit: int, released: str) -> tuple[list[Any], str | None]:
        """A page of all shards' DAGs by id, each as its owner proves it. Raises `UnknownError`."""
        question = AskDag(what="dags", after=after, limit=limit + 1, released=released)  # type: ignore[arg-type]
        pages = await asyncio.gather(
            *(
                dags.ask(self._link, shard, question, timeout_s=_ASK_S)
                for shard in range(self._shards)
            )
        )
        found = sorted((item for page in pages for item in page["items"]), key=lambda x: x["dag"])
        more = len(found) > limit
        return found[:limit], found[limit - 1]["dag"] if more else None

    async def cancel(self, dag: str, *, reason: str, bound_ms: int) -> dict[str, Any]:
        """Cancels a root. Raises `ProblemError` 404 for one that does not exist."""
        began = self._loop.time()
        deadline = began + bound_ms / 1000
        try:
            view = await dags.show(
                self._link, self._shards, dag, timeout_s=min(_LOOK_S, bound_ms / 4000)
            )
        except UnknownError:
            pass  # nobody owns it now: the cancel is stored for whoever does next
        else:
            if view is None:
                raise no_task(dag)
            if view["finished"]:
                return {"ok": True, "cancelled": 0}
        left_ms = max(1, int((deadline - self._loop.time()) * 1000))
        try:
            found = await dags.cancel(
                self._link, self._shards, dag, _mint(), reason=reason, bound_ms=left_ms
            )
        except UnknownError:
            raise
        except (RefusedError, RetryLaterError) as error:
            raise _refused(dag, error) from error
        self._metrics.cancel_seconds.observe(self._loop.time() - began)
        answer: dict[str, Any] = {
            "ok": True,
            "cancelled": found.cancelled,
            "released": found.released,
        }
        for name in ("reason", "evidence"):
            if value := getattr(found, name):
                answer[name] = value
        if found.released == "unconfirmed":
            answer |= await self._outstanding(dag, deadline)
        return answer

    async def _outstanding(self, dag: str, deadline: float) -> dict[str, Any]:
        """What is left, where its owner says so before the bound; a verdict needs no list."""
        left_s = deadline - self._loop.time()
        if left_s <= 0:
            return {}
        try:
            view = await dags.show(self._link, self._shards, dag, timeout_s=min(_LOOK_S, left_s))
        except UnknownError:
            return {}
        return {} if view is None else {"outstanding": shown(view)["outstanding"]}

    async def cancel_node(self, dag: str, node: str, *, bound_ms: int) -> dict[str, Any]:
        """Cancels one node, which ends it; what the DAG holds is not touched."""
        deadline = self._loop.time() + bound_ms / 1000
        id_ = _mint()
        async with dags.listening(self._link, dag) as heard:
            body = {"do": "finish_node", "node": node, "status": "cancelled"}
            try:
                before = await dags.show(
                    self._link, self._shards, dag, timeout_s=min(_LOOK_S, bound_ms / 4000)
                )
                if before is None:
                    raise no_task(dag)
                status = _status_of(before, node)
                if status is not None and status not in ("waiting", "running"):
                    return {"ok": True, "cancelled": 0}
            except UnknownError:
                pass
            try:
                await dags.store(self._link, dag, id_, body, within_s=bound_ms / 1000)
            except UnknownError:
                return {"ok": True, "cancelled": 0, "reason": "pending_shard"}
            while (left := deadline - self._loop.time()) > 0:
                ended = heard.find("node_finished", node)
                if ended is not None:
                    return {"ok": True, "cancelled": int(ended["status"] == "cancelled")}
                refused = heard.refusal_of(id_)
                if refused is not None:
                    raise _refused(dag, refused)
                await heard.wait(left)
        return {"ok": True, "cancelled": 0, "reason": "pending_shard"}


def _status_of(view: Mapping[str, Any], node: str) -> str | None:
    return next((str(one["status"]) for one in view["nodes"] if one["node"] == node), None)


def _mint() -> str:
    return f"http-{secrets.token_hex(13)}"


def _refused(dag: str, error: RefusedError | RetryLaterError) -> ProblemError:
    if isinstance(error, RefusedError):
        if error.reason == "unknown_dag":
            return no_task(dag)
        if error.reason == "too_old":
            return ProblemError(HTTPStatus.GONE, "too_old", str(error), field="task")
        if error.reason == "unknown_node":
            return ProblemError(HTTPStatus.NOT_FOUND, "not_found", str(error), field="node")
        return ProblemError(HTTPStatus.CONFLICT, error.reason, str(error), field=error.field)
    return ProblemError(
        HTTPStatus.SERVICE_UNAVAILABLE, "overloaded", str(error), headers={"retry-after": "1"}
    )


def no_task(dag: str) -> ProblemError:
    return ProblemError(HTTPStatus.NOT_FOUND, "not_found", f"there is no task {dag}", field="task")


def shown(view: Mapping[str, Any]) -> dict[str, Any]:
    """An owner's view as the API shows a task: the same fields as from the projection."""
    fields = (
        *("dag", "closed", "close_reason", "finished", "released", "reason", "evidence"),
        *("held_ever", "gone", "abandoned", "cancelled", "retry_of", "opened_at_ms"),
        *("nodes", "nodes_count", "outstanding_count"),
    )
    return {name: view[name] for name in fields} | {
        "outstanding": [outstanding(item) for item in view["outstanding"]]
    }


def outstanding(item: Mapping[str, Any]) -> dict[str, Any]:
    """One acquisition that is not settled, and when it is looked at again at the latest."""
    return {
        **{
            name: item[name]
            for name in ("slot", "sandbox", "acquisition", "instance", "phase", "reason")
        },
        "evidence": item["evidence"],
        "since_ms": item["since_ms"],
        # Orders to providers are repeated until they are answered; for others one only waits.
        "next_check_within_ms": (
            None if item["reason"] in _WAITS_FOR_OTHERS else limits.EFFECT_REPEAT_MS_MAX
        ),
    }
