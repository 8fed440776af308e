"""The tables of transitions, `evolve`, the picture and the words of the ledger agree."""

import typing
from pathlib import Path
from typing import Any

from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import transitions
from fencepost.core.sandbox.state import Phase

from scripts.make_states import page
from tests.factories import Bench, external

TABLES = (transitions.STEP, transitions.EPOCH, transitions.RECOVERY, transitions.SANDBOX)


class Watched(Bench):
    """A bench that writes down which way each entry took a step."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str, str]] = set()
        super().__init__()

    def _accept(self, entries: list[Any]) -> None:
        evolve = self.machine.evolve

        def watched(state: Any, entry: Any, *rest: Any) -> None:
            name = getattr(entry, "step", "")
            before = self._where(entry, name)
            evolve(state, entry, *rest)
            after = self._where(entry, name)
            if name and (before, after) != ("", ""):
                tag = type(entry).__struct_config__.tag
                moves = type(entry) in (e.Parked, e.Fenced) or before != after
                if moves:
                    self.seen.add((before or "new", after, tag))

        self.machine.evolve = watched  # type: ignore[method-assign]
        try:
            super()._accept(entries)
        finally:
            del self.machine.evolve

    def _where(self, entry: Any, name: str) -> str:
        sandbox = self.state.sandboxes.get(getattr(entry, "sandbox", ""))
        if sandbox is None:
            return ""
        if name in sandbox.steps:
            return sandbox.steps[name].phase
        finished = sandbox.finished.get(name)
        return finished.state if finished is not None else ""


def walk() -> set[tuple[str, str, str]]:
    """Takes a step along every arrow of the table."""
    bench = Watched()
    bench.see_gateway()
    bench.create()
    bench.step("a")
    bench.step("d")
    bench.cancel("d")
    bench.tick()
    bench.assigned()
    bench.attach()
    bench.step("b")
    bench.answer("b")
    bench.reattach()
    bench.cold()
    bench.recover()
    bench.gone()
    bench.tick()
    bench.assigned()
    bench.attach()
    bench.recover()
    bench.step("h", on_moved_epoch="reject")
    bench.cold()
    bench.recover()
    for name in ("j", "n", "q", "l", "p"):
        bench.step(name)
        if name != "j":
            bench.cancel(name)
        if name in ("q", "p"):
            bench.answer(name, verdict="already_done")
    bench.reattach()
    for name in ("j", "n", "q"):
        bench.answer(name, verdict="indeterminate", outcome="")
    bench.answer("l")
    bench.answer("p")
    for name, word in (("j", "committed"), ("n", "compensated")):
        bench.command("resolve", name, {"as": word, "who": "me", "note": ""})
    bench.step("u")
    bench.cancel("u")
    bench.answer("u", verdict="already_done")
    bench.warm()
    bench.step("x", external())
    for name in ("a", "u", "x"):
        bench.answer(name)
    bench.step("v", commit_after="checkpoint")
    bench.answer("v")
    bench.checkpointed()
    bench.tick()
    for name, policy in (("w", "retry"), ("y", "reject"), ("z", "retry")):
        bench.step(name, commit_after="heartbeat", on_moved_epoch=policy)
        bench.answer(name)
    bench.cancel("z")
    bench.reattach()
    for name in ("w", "y"):
        bench.answer(name)
    bench.cold()
    return bench.seen


def test_s015_steps_move_along_the_arrows_of_the_table_and_along_all_of_them() -> None:
    arrows = {(a.source, a.target, a.entry) for a in transitions.STEP}
    assert walk() == arrows


def test_s015_nothing_leads_out_of_a_final_state() -> None:
    assert not [a for a in transitions.STEP if a.source in transitions.FINAL]
    assert transitions.is_legal(transitions.STEP, "apply", "committed", "committed")
    assert not transitions.is_legal(transitions.STEP, "committed", "apply", "fenced")
    assert not transitions.is_legal(transitions.STEP, "parked", "committed", "committed")


def test_the_tables_speak_the_words_of_the_state_and_of_the_ledger() -> None:
    phases = set(typing.get_args(Phase))
    known = {a.source for a in transitions.STEP} | {a.target for a in transitions.STEP}
    assert known == phases | {"new"} | transitions.FINAL
    tags = {
        kind.__struct_config__.tag
        for kind in vars(e).values()
        if isinstance(kind, type) and getattr(kind, "__struct_config__", None)
    }
    for table in TABLES:
        assert {a.entry for a in table} <= tags
        letters = [a.letter for a in table]
        assert letters == sorted(set(letters))


def test_the_picture_is_made_of_the_tables() -> None:
    assert Path("docs/states.md").read_text() == page()
