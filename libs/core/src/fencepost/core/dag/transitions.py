"""The lives of an acquisition and of a verdict as tables; `docs/states.md` is made of them."""

from __future__ import annotations

from typing import Final

from fencepost.core.sandbox.transitions import Arrow

ACQUISITION: Final = (
    Arrow("a", "new", "intent", "intended", "asked for, and the barrier is open"),
    Arrow("b", "intent", "requested", "progressed", "a gateway session is told to create it"),
    Arrow("c", "intent", "assigned", "progressed", "an adopted one has a name already"),
    Arrow("d", "requested", "assigned", "progressed", "the provider named it"),
    Arrow("e", "assigned", "ready", "ready", "a session is attached to its epoch"),
    Arrow("f", "ready", "assigned", "progressed", "its next generation was named"),
    Arrow("g", "assigned", "assigned", "progressed", "lost before it was ready, and named again"),
    Arrow("h", "intent", "releasing", "release_begun", "released, replaced, or the DAG closed"),
    Arrow("i", "requested", "releasing", "release_begun", "released, replaced, or the DAG closed"),
    Arrow("j", "assigned", "releasing", "release_begun", "released, replaced, or the DAG closed"),
    Arrow("k", "ready", "releasing", "release_begun", "released, replaced, or the DAG closed"),
    Arrow("l", "releasing", "releasing", "release_heard", "why it is not gone yet"),
    Arrow("m", "releasing", "gone", "release_settled", "gone, by evidence"),
    Arrow("n", "releasing", "abandoned", "abandoned", "it never came to be, by evidence"),
    Arrow("o", "intent", "abandoned", "abandoned", "its sandbox's shard refused it"),
)

VERDICT: Final = (
    Arrow("a", "open", "unconfirmed", "answered", "closed, and something is outstanding"),
    Arrow("b", "open", "confirmed", "answered", "closed, and all that it held is gone"),
    Arrow("c", "open", "nothing_held", "answered", "closed, and it never held anything"),
    Arrow("d", "unconfirmed", "unconfirmed", "answered", "another reason is the gravest now"),
    Arrow("e", "unconfirmed", "confirmed", "answered", "the last outstanding one is gone"),
    Arrow("f", "unconfirmed", "nothing_held", "answered", "what was on its way never came to be"),
    Arrow("g", "confirmed", "confirmed", "answered", "another cancel"),
    Arrow("h", "nothing_held", "nothing_held", "answered", "another cancel"),
)
