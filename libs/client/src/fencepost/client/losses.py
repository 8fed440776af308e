"""
What a sandbox's recovery stopped at, path by path, and what was given up, as its ledger tells.

An owner keeps neither: the state has a count and a sum, and one effect to compare with. Both are
read here in the entries, from the first one on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from fencepost.client.client import Client
from fencepost.client.forks import Past, tell
from fencepost.core.machine import Place
from fencepost.core.receipts import Change, Receipt
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import owed

NOTHING = "nothing"
NOT_CHANGED = "not changed"


class Differs(msgspec.Struct, frozen=True, kw_only=True):
    """One path: what the first receipt says became of it, and what it came to this time."""

    path: str
    expected: str
    found: str


class GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step that no later generation gets back."""

    step: str
    tool: str


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """
    `stopped` is why the recovery waits for a person, "" where none does; `differs` the paths at
    `step` that came to something else, which are not all where `is_cut`.

    `given_up` are all steps that `tell` gave up, those included that a lost checkpoint held;
    `lost` names such checkpoints. What a fork's first checkpoint held is its origin's: `origin`.
    """

    sandbox: str
    stopped: str = ""
    step: str = ""
    differs: list[Differs] = []
    is_cut: bool = False
    given_up: list[GivenUp] = []
    lost: list[str] = []
    origin: str = ""


@dataclass(slots=True)
class Story:
    """A fold of one sandbox's entries, from its first on."""

    sandbox: str
    past: Past = field(init=False)
    _stopped: e.RecoveryStopped | None = None
    _first: dict[str, Receipt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.past = Past(self.sandbox)

    def take(self, entry: e.SandboxEntry, place: Place) -> None:
        """Takes the next entry; other sandboxes' are passed over."""
        if getattr(entry, "sandbox", "") != self.sandbox:
            return
        self.past.take(entry, place)
        match entry:
            case e.Committed():
                self._first[entry.attempt] = entry.receipt
            case e.RecoveryStopped():
                self._stopped = entry
            case e.RecoveryDecided() | e.EpochOpened() | e.Releasing():
                self._stopped = None
            case _:
                pass

    def told(self) -> Losses:
        origin, stopped = self.past.known_spec().origin, self._stopped
        differs, is_cut = self._differs(stopped) if stopped is not None else ([], False)
        return Losses(
            sandbox=self.sandbox,
            stopped=stopped.reason if stopped is not None else "",
            step=stopped.step if stopped is not None else "",
            differs=differs,
            is_cut=is_cut,
            given_up=[GivenUp(step=d.step, tool=d.spec.tool) for d in self.past.given_up()],
            lost=list(self.past.lost),
            origin=origin.sandbox if origin and origin.checkpoint in self.past.lost else "",
        )

    def _differs(self, stopped: e.RecoveryStopped) -> tuple[list[Differs], bool]:
        """The paths that differ; all that were written where the first receipt lists none."""
        first = self._first.get(stopped.attempt)
        found = {change.path: _became(change) for change in stopped.changes}
        # After an accepted difference it is that which was expected, and no receipt lists it.
        is_listed = first is not None and owed.effect_of(first) == stopped.expected
        if first is None or not is_listed or not first.changes:
            listed = [Differs(path=path, expected="", found=what) for path, what in found.items()]
            return listed, stopped.reason == "differs"
        expected = {change.path: _became(change) for change in first.changes}
        again = msgspec.structs.replace(
            first, outcome=stopped.found.partition(":")[0], changes=list(stopped.changes)
        )
        whole = owed.effect_of(again) == stopped.found
        paths = sorted(expected.keys() | found.keys() if whole else expected.keys() & found.keys())
        differ = [
            Differs(
                path=path,
                expected=expected.get(path, NOT_CHANGED),
                found=found.get(path, NOT_CHANGED),
            )
            for path in paths
            if expected.get(path) != found.get(path)
        ]
        return differ, not whole


def _became(change: Change) -> str:
    return f"{change.after or NOTHING} {change.mode}".strip()


async def losses(client: Client, sandbox: str) -> Losses:
    """
    Reads what is lost of a sandbox in its shard's whole ledger.

    Raises `RefusedError` for a sandbox that is not known, and `UnknownError`.
    """
    story = Story(sandbox)
    await tell(client, sandbox, story.take)
    return story.told()
