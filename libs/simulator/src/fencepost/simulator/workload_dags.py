"""
What clients ask of DAGs: slots with fresh, shared and replaced sandboxes, claims, cancels.

A DAG's author knows nothing of shards. Most of what is asked is asked at random times; some is
asked at the very moment at which something happens to the DAG, which is where races are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from fencepost.simulator.workload import Workload
from fencepost.simulator.world import World

SLOTS: Final = ("main", "größe ☃", "gpu/0", "")
CANCELS_MAX: Final = 5
SPREAD_MS: Final = 9_000
_encode = msgspec.json.Encoder().encode


class DagPlan:
    """One DAG as its author knows it: the acquisitions that were asked for, and the cancels."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made = 0
        self.sandboxes: dict[str, None] = {}
        self.cancels: list[str] = []
        self.ending = False


class DagWorkload:
    """
    `publish(dag, id, body)` puts a command into the stream of the DAG's shard; `steps` sends the
    commands of sandboxes, and repeats what was lost.
    """

    def __init__(
        self,
        world: World,
        steps: Workload,
        publish: Callable[[str, str, bytes], None],
    ) -> None:
        self.world = world
        self.steps = steps
        self.dags = [DagPlan(f"d{n}") for n in range(world.options.dags)]
        self.of = {plan.name: plan for plan in self.dags}
        self.claims: dict[tuple[str, str], None] = {}
        self.unsent = 0
        self._publish = publish
        self._ids = 0

    def start(self) -> None:
        for plan in self.dags:
            self.world.after(self.world.between(0, 3_000), self._open, plan)

    # --- what an author does ----------------------------------------------------------------

    def _open(self, plan: DagPlan) -> None:
        world = self.world
        self.ask(plan, {"do": "open", "nodes": ["fetch", "build"]})
        self.ask(plan, {"do": "start", "node": "fetch"}, after_ms=world.between(0, 500))
        for slot in SLOTS[: world.between(1, len(SLOTS))]:
            world.after(world.between(0, 2_500), self._acquire, plan, slot)
        for _ in range(world.between(1, 4)):
            world.after(world.between(500, SPREAD_MS), self._something, plan)
        lot = world.rng.random()
        if lot < 0.7:
            world.after(world.between(0, SPREAD_MS), self.cancel, plan)
        elif lot < 0.9:
            self.ask(plan, {"do": "finish"}, after_ms=world.between(2_000, SPREAD_MS))

    def _acquire(self, plan: DagPlan, slot: str, *, replace: bool = False) -> None:
        sandbox = self._id("a")
        provider = "other" if self.world.rng.random() < 0.3 else "process"
        plan.sandboxes[sandbox] = None
        body = {"do": "acquire", "slot": slot, "spec": {"provider": provider}}
        self.ask(plan, {**body, "replace": replace}, id_=sandbox)
        if provider == "process" or self.world.options.observes_gone:
            for _ in range(self.world.between(0, 2)):
                self.world.after(self.world.between(200, 4_000), self.steps.step_on, sandbox)
        if self.world.hit("sandbox_claimed"):
            self._claim(sandbox, after_ms=self.world.between(0, 4_000))

    def _something(self, plan: DagPlan) -> None:
        world = self.world
        slot = SLOTS[world.between(0, len(SLOTS) - 1)]
        lot = world.rng.random()
        if lot < 0.45:
            self._adopt(plan, self._any_sandbox(plan), slot=f"shared {self._ids}")
        elif lot < 0.6:
            self.ask(plan, {"do": "release", "slot": slot})
        elif lot < 0.8:
            self.ask(plan, {"do": "finish_node", "node": "fetch", "release": [slot]})
        elif world.hit("sandbox_replaced"):
            self._acquire(plan, slot, replace=True)
        else:
            self._acquire(plan, f"more {self._ids}")
        if world.hit("dag_command_bad"):
            self._bad(plan)

    def _any_sandbox(self, plan: DagPlan) -> str:
        """One of another DAG, or one that was made by hand."""
        others = [name for other in self.dags if other is not plan for name in other.sandboxes]
        found = others or self.steps.sandboxes
        if self.world.rng.random() < 0.3:
            found = self.steps.sandboxes
        return found[self.world.between(0, len(found) - 1)]

    def _adopt(self, plan: DagPlan, sandbox: str, *, slot: str) -> None:
        self.ask(plan, {"do": "adopt", "slot": slot, "sandbox": sandbox})
        others = [other for other in self.dags if sandbox in other.sandboxes]
        if others and self.world.hit("dag_holders_leave_at_once"):
            at_ms = self.world.between(100, 5_000)
            for one in (plan, *others):
                self.world.after(at_ms, self.cancel, one)

    def _claim(self, sandbox: str, *, after_ms: int) -> None:
        claim = self._id("c")
        self.claims[(sandbox, claim)] = None
        self.world.after(after_ms, self.steps.send, "claim", sandbox, claim, _encode({}))
        self.world.after(after_ms + self.world.between(0, 9_000), self._unclaim, sandbox, claim)

    def _unclaim(self, sandbox: str, claim: str) -> None:
        """A client ends its claim once it knows that the stream has it, never before."""
        if (sandbox, claim) not in self.steps.stored:
            self.world.after(500, self._unclaim, sandbox, claim)
        elif self.claims.pop((sandbox, claim), True) is None:
            self.steps.send("unclaim", sandbox, claim, _encode({}))

    def _bad(self, plan: DagPlan) -> None:
        bodies: tuple[dict[str, Any], ...] = (
            {"do": "no_such_thing"},
            {"do": "acquire", "slot": 7},
            {"do": "adopt", "slot": "x", "sandbox": "no such id"},
            {"do": "adopt", "slot": "x", "sandbox": "nobody"},
            {"do": "start", "node": "nowhere"},
            {"do": "open", "nodes": ["others"]},
        )
        self.ask(plan, bodies[self.world.between(0, len(bodies) - 1)])

    def cancel(self, plan: DagPlan, *, bound_ms: int | None = None) -> None:
        world = self.world
        if len(plan.cancels) >= CANCELS_MAX and bound_ms is None:
            return
        plan.ending = True
        id_ = self._id("x")
        plan.cancels.append(id_)
        bound = world.between(50, 5_000) if bound_ms is None else bound_ms
        self.ask(plan, {"do": "cancel", "bound_ms": bound}, id_=id_)
        if world.hit("dag_cancelled_again"):
            world.after(world.between(0, 6_000), self.cancel, plan)
        if plan.sandboxes and world.hit("dag_adopts_what_is_released"):
            others = [other for other in self.dags if other is not plan]
            if others:
                other = others[world.between(0, len(others) - 1)]
                sandbox = next(reversed(plan.sandboxes))
                at_ms = world.between(0, 60)
                world.after(at_ms, self._late_adopt, other, sandbox)

    def _late_adopt(self, plan: DagPlan, sandbox: str) -> None:
        self._adopt(plan, sandbox, slot=f"late {self._ids}")

    # --- at the very moment -----------------------------------------------------------------

    def happened(self, dag: str, kind: str) -> None:
        """An entry about a DAG was accepted: the moment at which a cancel is most in the way."""
        plan = self.of.get(dag)
        if plan is None or kind in ("answered", "refused"):
            return
        fault = "dag_cancelled_at_rebuild" if kind == "rebuild_intended" else ""
        if (fault and self.world.hit(fault)) or self.world.hit("dag_cancelled_at_point"):
            self.world.after(self.world.between(0, 25), self.cancel, plan)

    # --- the end ----------------------------------------------------------------------------

    def end_all(self, closed: set[str]) -> None:
        """
        Once faults stop: every claim ends, and every DAG is cancelled that is not closed.

        Of the others as often as not, since what is closed has to come to its end by itself.
        """
        for sandbox, claim in list(self.claims):
            self._unclaim(sandbox, claim)
        for plan in self.dags:
            if plan.name not in closed or self.world.rng.random() < 0.5:
                self.cancel(plan, bound_ms=1_000)

    # --- sending ----------------------------------------------------------------------------

    def _id(self, prefix: str) -> str:
        self._ids += 1
        return f"{prefix}{self._ids}"

    def ask(self, plan: DagPlan, body: dict[str, Any], *, id_: str = "", after_ms: int = 0) -> None:
        self.unsent += 1
        id_ = id_ or self._id("q")
        self.world.after(after_ms, self._try, plan.name, id_, _encode(body))

    def _try(self, dag: str, id_: str, body: bytes) -> None:
        world = self.world
        if world.hit("command_lost") or self.steps.is_cut("log"):
            world.after(world.between(200, 1_000), self._try, dag, id_, body)
            return
        self.unsent -= 1
        self._publish(dag, id_, body)
        if world.hit("command_repeated"):
            world.after(world.between(0, 6_000), self._publish, dag, id_, body)
