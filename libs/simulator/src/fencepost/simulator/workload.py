"""
What agents ask for: sandboxes, steps of three kinds, repeats, cancels, bad commands, releases.

A client repeats a command until the commands stream has it, and knows nothing else. What it was
promised is in `sent`: each must end, be refused, or stand as indeterminate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from fencepost.simulator.world import Process, World

DEADLINE_MS: Final = 3_600_000
_encode = msgspec.json.Encoder().encode


def _after(lot: float) -> str:
    """What a step waits for before it is committed."""
    return "checkpoint" if lot < 0.1 else "heartbeat" if lot < 0.25 else "receipt"


class Sent(msgspec.Struct):
    """One step command that the stream accepted."""

    sandbox: str
    step: str


class Workload(Process):
    """`publish(kind, sandbox, id, body)` puts a command into the durable stream of its shard."""

    def __init__(self, world: World, publish: Callable[[str, str, str, bytes], None]) -> None:
        super().__init__(world, "clients")
        self.sent: list[Sent] = []
        self.sandboxes = [f"sb{n}" for n in range(world.options.sandboxes)]
        self.done = False
        self.unsent = 0
        self._publish = publish
        self._left = world.options.steps
        self._made = 0
        self._on_dags = 0
        self.stored: dict[tuple[str, str], None] = {}
        self._released: dict[str, None] = {}

    def start(self) -> None:
        every = self.world.options.checkpoints
        for name in self.sandboxes:
            spec = {"checkpoint_every_steps": every} if every else {}
            self.send("create", name, f"c-{name}", _encode({"spec": spec}))
        self.world.after(self.world.between(0, 500), self._next)

    def _next(self) -> None:
        if self._left <= 0:
            self.done = True
            return
        self._left -= 1
        world = self.world
        self._step(self.sandboxes[world.between(0, len(self.sandboxes) - 1)])
        # Bursts, so that steps queue behind each other; and gaps, so that owners are idle.
        gap = world.rng.random()
        world.after(
            0 if gap < 0.4 else world.between(1, 1_000 if gap < 0.95 else 6_000), self._next
        )

    def step_on(self, sandbox: str) -> None:
        """A step on a sandbox of a DAG, whether it is there or not."""
        if self.world.faults_on:
            self._on_dags += 1
            name = f"t{self._on_dags}"
            self.sent.append(Sent(sandbox, name))
            self.send("step", sandbox, name, _encode(self._body(name)))

    def _step(self, sandbox: str) -> None:
        world = self.world
        self._made += 1
        name = f"s{self._made}"
        body = self._body(name)
        if self._made in world.options.withheld:
            return
        if world.hit("command_malformed"):
            self.send("step", sandbox, f"bad{self._made}", self._malformed(body))
        self.sent.append(Sent(sandbox, name))
        self.send("step", sandbox, name, _encode(body))
        if world.hit("command_id_reused"):
            other = {**body, "args": {"path": "other", "content": "another call"}}
            other["tool"] = "write_file"
            other.pop("compensation", None)
            other.pop("effect", None)
            world.after(world.between(0, 4_000), self.send, "step", sandbox, name, _encode(other))
        if world.options.checkpoints and world.rng.random() < 0.05:
            self.send("checkpoint", sandbox, f"k{self._made}", b"{}")
        if world.hit("step_cancelled"):
            world.after(world.between(0, 2_500), self.send, "cancel", sandbox, name, b"{}")
        if self._made * 3 > world.options.steps and sandbox not in self._released:
            released = sum(1 for _ in self._released) + 1
            if released < len(self.sandboxes) and world.hit("sandbox_released"):
                self.release(sandbox, after_ms=world.between(0, 3_000))

    def _body(self, name: str) -> dict[str, Any]:
        world, options = self.world, self.world.options
        lot = world.rng.random()
        body: dict[str, Any] = {
            "on_moved_epoch": "retry" if world.rng.random() < 0.8 else "reject",
            "attempts_max": world.between(1, 6),
            "deadline_ms": DEADLINE_MS,
        }
        if world.hit("step_deadline_short"):
            body["deadline_ms"] = world.between(100, 2_000)
        if lot < options.external_share + options.command_share:
            body["tool"] = "run_command"
            body["args"] = {"shell": f"act {name}"}
            body["compensation"] = {"kind": "command", "args": {"shell": f"undo {name}"}}
            if lot < options.external_share:
                body["effect"] = "external"
        else:
            body["tool"] = "write_file"
            body["args"] = {"path": f"f{world.between(0, 3)}", "content": name}
        if options.checkpoints and "effect" not in body:
            body["commit_after"] = _after(world.rng.random())
        return body

    def _malformed(self, body: dict[str, Any]) -> bytes:
        lot = self.world.between(0, 4)
        if lot == 0:
            return b"not json"
        if lot == 1:
            return _encode({**body, "surprise": 1})
        if lot == 2:
            return _encode({**body, "tool": "no_such_tool"})
        if lot == 3:
            return _encode(
                {**body, "args": {"path": "../out", "content": ""}, "tool": "write_file"}
            )
        return _encode({key: value for key, value in body.items() if key != "args"})

    def release(self, sandbox: str, *, after_ms: int = 0) -> None:
        self._released[sandbox] = None
        self.world.after(after_ms, self.send, "release", sandbox, f"r-{sandbox}", b"{}")

    def release_all(self) -> None:
        """Again for those that were released before: it may have come before the create did."""
        for name in self.sandboxes:
            self.release(name)

    def resolve(self, sandbox: str, step: str) -> None:
        body = {"as": "compensated", "who": "operator", "note": "looked"}
        self.send("resolve", sandbox, step, _encode(body))

    def recover(self, sandbox: str, number: int) -> None:
        """An operator looks at a recovery that stopped, and decides."""
        lot = self.world.rng.random() if self.world.faults_on else 0.0
        decision = "accept" if lot < 0.4 else "tell" if lot < 0.7 else "discard"
        body = {"decision": decision, "who": "operator"}
        self.send("recover", sandbox, f"rc{number}", _encode(body))

    def send(self, kind: str, sandbox: str, id_: str, body: bytes) -> None:
        """Publishes until the stream has it; a lost publication or answer is repeated."""
        self.unsent += 1
        self._try(kind, sandbox, id_, body)
        if self.world.hit("command_repeated"):
            late_ms = self.world.between(0, 6_000)
            self.world.after(late_ms, self._publish, kind, sandbox, id_, body)

    def _try(self, kind: str, sandbox: str, id_: str, body: bytes) -> None:
        world = self.world
        if world.hit("command_lost") or self.is_cut("log"):
            world.after(world.between(200, 1_000), self._try, kind, sandbox, id_, body)
        else:
            world.after(world.between(0, 5), self._arrived, kind, sandbox, id_, body)

    def _arrived(self, kind: str, sandbox: str, id_: str, body: bytes) -> None:
        self.unsent -= 1
        if kind == "claim":
            self.stored[(sandbox, id_)] = None
        self._publish(kind, sandbox, id_, body)
