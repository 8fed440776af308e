"""
What agents do while everything fails: steps, DAGs, cancels; and what they were told.

Everything that a client was told is kept, nothing else: that is what must hold afterwards. An
answer that says nothing ("not known", "again later") is counted, and asked for again at the end.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import nats.errors
from fencepost.client import Client, StepOutcome
from fencepost.core.errors import FencepostError, RefusedError, RetryLaterError
from fencepost.runtime.dags import Verdict

from scripts.chaos.world import World

LOG: Final = "log"
OUTCOME_S: Final = 25.0
EFFECTS: Final = ("file", "file", "patch", "line", "blob")
_BLOB_BYTES: Final = 40_000
_NO_STEP: Final = frozenset({"unknown_step"})
# What a client may be told of a DAG that is being torn down, or whose sandbox was taken away.
_NO_DAG: Final = frozenset(
    {
        "unknown_dag", "dag_closed", "released", "unknown_sandbox", "releasing", "gone",
        "create_failed", "stop_accepted", "cancelled", "closed", "sandbox_released",
    }
)  # fmt: skip


@dataclass
class Sent:
    """One step that was sent. `effect` is what it does to the workspace when it is done."""

    sandbox: str
    step: str
    effect: str
    outcome: StepOutcome | None = None
    refused: str = ""


@dataclass
class Dag:
    """One DAG: the sandboxes asked for, the one that it only adopted, and its last verdict."""

    name: str
    fresh: list[str] = field(default_factory=list)
    adopted: str = ""
    is_known: bool = False
    verdict: Verdict | None = None


@dataclass
class Told:
    """
    What clients were told, and what showed at once that it was not true.

    `taken`: how often the faults took a standing sandbox's disk, or tried to.
    """

    steps: list[Sent] = field(default_factory=list)
    dags: list[Dag] = field(default_factory=list)
    standing: list[str] = field(default_factory=list)
    taken: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    cancel_s_max: float = 0.0
    untrue: list[str] = field(default_factory=list)
    bugs: list[str] = field(default_factory=list)

    def states(self) -> Counter[str]:
        return Counter(one.outcome.state for one in self.steps if one.outcome is not None)


def blob(step: str) -> str:
    """A large content that is this step's alone."""
    return f"{step}\n" * (_BLOB_BYTES // (len(step) + 1))


class Workload:
    """Agents on one client, until `stop`. `name` keeps the ids of two workloads apart."""

    def __init__(self, world: World, client: Client, seed: int, *, name: str = "") -> None:
        self._name = name
        self.told = Told()
        self._world = world
        self._client = client
        self._seed = seed
        self._count = 0
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *, boxes: int, dags: int) -> None:
        """Makes the standing sandboxes and sets the agents to work."""
        names = [f"{self._name}box{number}" for number in range(boxes)]
        await asyncio.gather(*(self._client.create_sandbox(name) for name in names))
        self.told.standing += names
        agents = [self._on_box] * boxes + [self._on_dags] * dags
        for number, agent in enumerate(agents):
            rng = random.Random(f"{self._seed}.{number}")
            self._tasks.append(asyncio.create_task(self._work(agent, number, rng)))

    async def stop(self) -> None:
        """Lets every agent finish what it is at."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _work(
        self,
        agent: Callable[[int, random.Random], Awaitable[None]],
        number: int,
        rng: random.Random,
    ) -> None:
        while not self._stopping.is_set():
            await self._contained(agent(number, rng))
            await asyncio.sleep(rng.random() * 0.1)

    async def _contained(self, doing: Awaitable[None]) -> None:
        try:
            await doing
        except (RetryLaterError, TimeoutError, nats.errors.Error, OSError) as error:
            self.told.silent[type(error).__name__] += 1
            await asyncio.sleep(0.1)
        except RefusedError as error:
            if error.reason not in _NO_STEP | _NO_DAG:
                self.told.bugs.append(f"refused, {error.reason}: {error}")
        except FencepostError as error:
            self.told.bugs.append(f"{type(error).__name__}: {error}")

    # Steps.

    async def _on_box(self, number: int, rng: random.Random) -> None:
        box = self.told.standing[number]
        dice = rng.random()
        if dice < 0.1:
            await self._cancelled(box, rng)
        elif dice < 0.2:
            await asyncio.gather(*(self._step(box, rng) for _ in range(rng.randrange(2, 9))))
        else:
            await self._step(box, rng)

    async def _step(self, box: str, rng: random.Random) -> None:
        sent, handle = await self._submit(box, rng.choice(EFFECTS))
        await self._end(sent, handle)

    async def _end(self, sent: Sent, handle: Any) -> None:
        try:
            sent.outcome = await handle.outcome(timeout_s=OUTCOME_S)
        except RefusedError as error:
            sent.refused = error.reason
            raise

    async def _submit(self, box: str, effect: str, *, slow: str = "") -> tuple[Sent, Any]:
        self._count += 1
        step = f"{self._name}s{self._count}"
        sent = Sent(box, step, effect)
        if effect == "file":
            handle = await self._client.submit(
                box, "write_file", path=f"f/{step}", content=step, step=step
            )
        elif effect == "blob":
            # Above the inline bound: it travels by the object store.
            handle = await self._client.submit(
                box, "write_file", path=f"f/{step}", content=blob(step), step=step
            )
        elif effect == "patch":
            patch = f"--- /dev/null\n+++ b/p/{step}\n@@ -0,0 +1 @@\n+{step}\n"
            handle = await self._client.submit(box, "apply_patch", patch=patch, step=step)
        else:
            undo = f"touch {LOG}; sed -i '/^{step}$/d' {LOG}"
            handle = await self._client.submit(
                box,
                "run_command",
                {"shell": f"{slow}echo {step} >> {LOG}"},
                step=step,
                compensation={"kind": "command", "args": {"shell": undo}},
            )
        # Only now: what could not be submitted was never sent.
        self.told.steps.append(sent)
        return sent, handle

    async def _cancelled(self, box: str, rng: random.Random) -> None:
        slow = f"sleep {rng.random() * 0.3:.2f}; "
        sent, handle = await self._submit(box, rng.choice(("line", "file")), slow=slow)
        await asyncio.sleep(rng.random() * 0.3)
        try:
            sent.outcome = await self._client.cancel(box, sent.step, timeout_s=OUTCOME_S)
        except RefusedError:
            await self._end(sent, handle)

    # DAGs.

    async def _on_dags(self, number: int, rng: random.Random) -> None:
        self._count += 1
        dag = Dag(f"{self._name}dag{number}x{self._count}")
        self.told.dags.append(dag)
        await self._client.open_dag(dag.name, ["a", "b"], timeout_s=OUTCOME_S)
        dag.is_known = True
        try:
            await self._use(dag, rng)
        except (RetryLaterError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.reason not in _NO_DAG | _NO_STEP:
                raise
            self.told.silent[f"dag: {type(error).__name__}"] += 1
        dice = rng.random()
        if dice < 0.2:
            await self._client.finish_dag(dag.name, timeout_s=OUTCOME_S)
        elif dice < 0.4:
            await asyncio.gather(*(self.cancel(dag, bound_s=0.5) for _ in range(2)))
        await self.cancel(dag)

    async def _use(self, dag: Dag, rng: random.Random) -> None:
        for slot in range(rng.randrange(0, 3)):
            name = f"{dag.name}s{slot}"
            dag.fresh.append(name)
            # Not always waited for: a cancel must also catch what is only on its way.
            await self._client.acquire(
                dag.name,
                f"slot {slot * (rng.random() < 0.8)}",
                replace=True,
                acquisition=name,
                wait=rng.random() < 0.7,
                timeout_s=OUTCOME_S,
            )
        if rng.random() < 0.3 and self.told.standing:
            dag.adopted = rng.choice(self.told.standing)
            await self._client.adopt(dag.name, "shared", dag.adopted, timeout_s=OUTCOME_S)
        for name in dag.fresh:
            await self._step(name, rng)

    async def cancel(self, dag: Dag, *, bound_s: float = 5.0) -> Verdict:
        """Cancels, and looks at once whether what was said is so."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        verdict = await self._client.cancel_dag(dag.name, bound_s=bound_s)
        self.told.cancel_s_max = max(self.told.cancel_s_max, loop.time() - began)
        dag.verdict = verdict
        if verdict.released in ("confirmed", "nothing_held"):
            for name in dag.fresh:
                if left := self._world.traces(name):
                    self.told.untrue.append(f"{dag.name} {verdict.released}, and there is {left}")
        return verdict
