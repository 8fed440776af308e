"""What the machines do in their world is what the tables say, and every arrow is gone along."""

from __future__ import annotations

from random import Random

from fencepost.core.dag import entries as d
from fencepost.core.dag import transitions
from fencepost.core.sandbox.transitions import is_legal

from tests.properties import dag_world
from tests.properties.test_dags import SCRIPTS, run
from tests.unit.core.dag.test_told_and_verdict import reached, told

_TAKEN: dict[str, set[tuple[str, str, str]]] = {"acquisition": set(), "verdict": set()}


class Watch:
    """Follows the entries of one world's dag shard along the tables."""

    def __init__(self) -> None:
        self.phases: dict[str, str] = {}
        self.verdicts: dict[str, str] = {}

    def take(self, entry: object) -> None:
        kind = getattr(type(entry), "__struct_config__").tag
        if isinstance(entry, d.Answered):
            self._go("verdict", self.verdicts, entry.dag, entry.verdict, kind)
            return
        target = {
            d.Intended: "intent",
            d.Ready: "ready",
            d.ReleaseBegun: "releasing",
            d.ReleaseHeard: "releasing",
            d.ReleaseSettled: "gone",
            d.Abandoned: "abandoned",
        }.get(type(entry), getattr(entry, "phase", ""))
        if not target:
            return
        name = f"{entry.dag}/{entry.acquisition}"  # type: ignore[attr-defined]
        if self.phases.get(name) == "releasing" and isinstance(entry, d.Progressed | d.Ready):
            return  # heard late: it changes no phase
        self._go("acquisition", self.phases, name, target, kind)

    def _go(self, table: str, now: dict[str, str], name: str, target: str, kind: str) -> None:
        source = now.get(name, "new" if table == "acquisition" else "open")
        arrows = transitions.ACQUISITION if table == "acquisition" else transitions.VERDICT
        assert is_legal(arrows, source, target, kind), (name, source, target, kind)
        _TAKEN[table].add((source, target, kind))
        now[name] = target


def follow(world: dag_world.World) -> None:
    watch = Watch()
    for entry in world.dags.entries:
        watch.take(entry)


def test_every_way_of_an_acquisition_is_an_arrow() -> None:
    for script in SCRIPTS:
        for fault in ("none", "refused", "ambiguous_create"):
            for at in (0, 2, 5, 9, 14, 20):
                world, _ = run(script, fault, Random(at).randrange(99), at)
                follow(world)
    for phase in ("intent", "requested", "assigned", "ready"):
        world = reached(phase)
        if phase == "assigned":
            told(world, "assigned")
        world.ask("d", "x", do="cancel", bound_ms=0)
        world.dags.tick()
        told(world, "gone", evidence="never_created")
        world.dags.tick()
        world.ask("d", "y", do="cancel")
        world.dags.tick()
        follow(world)
    done = reached("ready")
    done.ask("d", "r", do="release", slot="s")
    told(done, "gone", evidence="observed_gone")
    done.ask("d", "x", do="cancel")
    done.dags.tick()
    follow(done)
    refused = reached("intent")
    told(refused, "refused", reason="overloaded")
    refused.ask("d", "x", do="cancel")
    refused.dags.tick()
    follow(refused)
    for table, arrows in (
        ("acquisition", transitions.ACQUISITION),
        ("verdict", transitions.VERDICT),
    ):
        missing = {(a.source, a.target, a.entry) for a in arrows} - _TAKEN[table]
        assert not missing
