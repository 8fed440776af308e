"""What a sandbox's past says of its workspace at a step, and how that is made again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fencepost.client.forks import Past
from fencepost.core import limits
from fencepost.core.errors import RefusedError
from fencepost.core.machine import Place
from fencepost.core.receipts import Change, Marker, Receipt
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import owed
from fencepost.core.steps import Compensation, Effect, Origin, SandboxSpec, StepSpec, digest_of

ARGS = b'{"content":"x","path":"a"}'
MANIFEST = "sha256:" + "0" * 64


def _spec(effect: Effect = "workspace") -> StepSpec:
    return StepSpec(
        tool="write_file",
        args=msgspec.Raw(ARGS),
        digest=digest_of(ARGS),
        compensation=Compensation(kind="pre_image"),
        attempts_max=5,
        deadline_at_ms=1,
        effect=effect,
    )


def _receipt(step: str, epoch: int, seq: int) -> Receipt:
    marker = Marker(epoch=epoch, session="s", nonce="n", instance="i")
    return Receipt(
        sandbox="box",
        step=step,
        attempt=f"{step}.1",
        direction="apply",
        no=seq,
        verdict="applied",
        epoch=epoch,
        session="s",
        nonce="n",
        instance="i",
        after=marker,
        tool="write_file",
        digest=digest_of(ARGS),
        outcome="ok",
        changes=[Change(path="a", before=None, after=f"sha256:{step}")],
        journal_seq=seq,
    )


class Story:
    """A sandbox's entries, one a batch, folded as they are told."""

    def __init__(self, **created: Any) -> None:
        self.past = Past("box")
        self.seq = 0
        self.tell(e.Created(sandbox="box", spec=SandboxSpec(**created), create_id="c"))

    def tell(self, *entries: e.SandboxEntry) -> None:
        for entry in entries:
            self.past.take(entry, Place(self.seq, 0))
            self.seq += 1

    def begins(self, step: str, effect: Effect = "workspace") -> None:
        self.tell(
            e.Fenced(
                sandbox="box",
                step=step,
                attempt=f"{step}.1",
                ordinal=1,
                no=1,
                epoch=1,
                session="s",
                spec=_spec(effect),
            )
        )

    def commits(self, step: str, seq: int, *, epoch: int = 1) -> None:
        receipt = _receipt(step, epoch, seq)
        self.tell(
            e.Committed(sandbox="box", step=step, attempt=f"{step}.1", receipt=receipt, gateway="g")
        )

    def step(self, step: str, seq: int, *, epoch: int = 1, effect: Effect = "workspace") -> None:
        self.begins(step, effect)
        self.commits(step, seq, epoch=epoch)

    def checkpoint(self, name: str, seq: int, *, line: int = 1) -> None:
        self.tell(
            e.CheckpointedEntry(
                sandbox="box",
                checkpoint=name,
                manifest=MANIFEST,
                epoch=line,
                journal_seq=seq,
                line=line,
                reason="asked",
            )
        )

    def gives_up(self, *, kept: tuple[int, int, str] = (0, 0, ""), lost: str = "") -> None:
        self.tell(e.Recovered(sandbox="box", epoch=2, mode="told", told=1, kept=kept, lost=lost))

    def made(self, at: str = "") -> tuple[str, list[str]]:
        """The checkpoint that a fork starts from, and the steps that follow."""
        plan = self.past.plan(at)
        start = plan.start.origin.checkpoint if plan.start is not None else ""
        return start, [done.step for done in plan.steps]


@pytest.fixture
def story() -> Story:
    return Story()


def test_without_a_checkpoint_it_is_made_from_the_beginning_in_the_disks_order(
    story: Story,
) -> None:
    for step in ("one", "two", "three"):
        story.begins(step)
    story.commits("two", 1)
    story.commits("three", 3)
    story.commits("one", 2)
    assert story.made("one") == ("", ["two", "one"])
    assert story.made() == ("", ["two", "one", "three"])
    assert story.past.plan().at == "three"


def test_a_later_generations_write_comes_after_every_earlier_ones(story: Story) -> None:
    story.step("one", 5, epoch=1)
    story.step("two", 1, epoch=2)
    assert story.made() == ("", ["one", "two"])


def test_it_starts_from_the_newest_checkpoint_that_holds_nothing_later(story: Story) -> None:
    story.step("one", 1)
    story.checkpoint("early", 1)
    story.step("two", 2)
    story.step("three", 3)
    story.checkpoint("late", 3)
    assert story.made("two") == ("early", ["two"])
    assert story.made("three") == ("late", [])
    assert story.made() == ("late", [])
    assert story.made("one") == ("early", [])


def test_a_checkpoint_may_hold_a_step_that_was_committed_only_after_it(story: Story) -> None:
    story.step("one", 1)
    story.begins("joined")
    story.begins("next")
    story.checkpoint("point", 2)
    story.commits("joined", 2)
    story.commits("next", 3)
    assert story.made() == ("point", ["next"])
    assert story.made("one") == ("", ["one"]), "the checkpoint holds more than was there then"


def test_what_acted_outside_is_not_run_again_and_is_named(story: Story) -> None:
    story.step("one", 1)
    story.step("charge", 2, effect="external")
    story.step("two", 3)
    plan = story.past.plan("two")
    assert [done.step for done in plan.steps] == ["one", "two"]
    assert plan.external == ["charge"]
    assert story.past.plan("one").external == []
    story.step("mail", 4, effect="external")
    assert story.past.plan().at == "two", "a step that can be gone back to"
    with pytest.raises(RefusedError, match="acted outside"):
        story.past.plan("charge")


def test_a_step_by_an_operators_word_is_named_and_cannot_be_gone_back_to(story: Story) -> None:
    story.begins("odd")
    resolved = e.Resolved(
        sandbox="box", step="odd", attempt="odd.1", state="committed", who="me", note="seen"
    )
    story.tell(resolved)
    story.step("one", 1)
    plan = story.past.plan()
    assert plan.unproven == ["odd"]
    assert [done.step for done in plan.steps] == ["one"]
    with pytest.raises(RefusedError, match="no receipt"):
        story.past.plan("odd")


@pytest.mark.parametrize("step", ["never", "open", "ended"])
def test_a_step_that_is_not_committed_is_refused(story: Story, step: str) -> None:
    story.begins("open")
    story.begins("ended")
    story.tell(
        e.Compensated(
            sandbox="box",
            step="ended",
            attempt="ended.1",
            reason="cancelled",
            evidence="undone",
            final=True,
        )
    )
    story.step("one", 1)
    assert story.made("one") == ("", ["one"])
    with pytest.raises(RefusedError, match="no committed step") as refused:
        story.past.plan(step)
    assert refused.value.field == "--at"


def test_what_was_given_up_is_there_before_and_not_after(story: Story) -> None:
    story.step("one", 1)
    story.step("two", 2)
    kept = story.past.plan("one").steps[0].key
    story.gives_up(kept=kept)
    story.step("three", 1, epoch=2)
    assert story.made("two") == ("", ["one", "two"])
    assert story.made("three") == ("", ["one", "three"])


def test_what_a_checkpoint_holds_is_not_given_up_with_the_rest(story: Story) -> None:
    story.step("one", 1)
    story.checkpoint("point", 1)
    story.step("two", 2)
    story.gives_up()
    assert story.made() == ("point", [])
    story.gives_up(lost="point")
    story.step("three", 1, epoch=3)
    assert story.made() == ("", ["three"]), "the checkpoint went, with all that it held"


def test_only_checkpoints_that_are_kept_are_started_from(story: Story) -> None:
    story.step("one", 1)
    story.checkpoint("first", 1)
    for number in range(limits.CHECKPOINTS_KEPT - 1):
        story.step(f"s{number}", number + 2)
        story.checkpoint(f"c{number}", number + 2)
    assert story.made("one") == ("first", [])
    story.step("last", 9)
    story.checkpoint("one too many", 9)
    assert story.made("one") == ("", ["one"])
    story.tell(e.GoneEntry(sandbox="box", instance="i", evidence="lost"))
    assert story.made() == ("one too many", []), "a reclaim alone drops nothing"
    story.tell(e.Releasing(sandbox="box", reason="released"))
    start, steps = story.made()
    assert start == "", "a sandbox that is gone keeps none"
    assert len(steps) == limits.CHECKPOINTS_KEPT + 1


def test_a_fork_of_a_fork_starts_from_what_the_fork_started_from() -> None:
    origin = Origin(sandbox="first", checkpoint="theirs", manifest=MANIFEST)
    story = Story(origin=origin)
    story.step("one", 1)
    plan = story.past.plan("one")
    assert plan.start is not None
    assert plan.start.origin == origin
    assert [done.step for done in plan.steps] == ["one"]


def test_an_accepted_difference_is_what_a_fork_expects(story: Story) -> None:
    story.step("one", 1)
    story.step("two", 2)
    story.tell(
        e.Replayed(
            sandbox="box",
            step="one",
            attempt="one.1",
            name="one.1:r9",
            epoch=2,
            verdict="applied",
            effect="ok:other",
            journal_seq=1,
            no=9,
            of=2,
            accepted=True,
        )
    )
    first, second = story.past.plan().steps
    assert first.effect == "ok:other"
    assert second.effect == owed.effect_of(_receipt("two", 1, 2))


def test_other_sandboxes_of_the_shard_are_passed_over(story: Story) -> None:
    story.step("one", 1)
    story.tell(e.Releasing(sandbox="other", reason="released"))
    assert not story.past.is_released
