"""
Bugs that the simulator found, by name, each with a seed that finds it again.

A seed's meaning moves when the workload does, so each is tied to the mutant that brings the bug
back: the seed must kill that mutant and pass without it.
"""

# name -> (seed, mutant)
REGRESSIONS: dict[str, tuple[int, str]] = {
    # A session's own finding, repeated after its epoch had closed, opened another epoch under the
    # same nonce; and one taken before the first marking called a full disk blank.
    "a stale finding opened an epoch": (50, "believe a reading of the disk that is out of date"),
    # An older point of the disk, from an epoch before, was taken for a blank disk: the effect of a
    # carried step was called lost and stood on it.
    "an older epoch's snapshot was called cold": (
        50,
        "take an older point of the disk for a blank one",
    ),
    # A step was revoked by its latest attempt; what the disk held was that of the one before.
    "a carried attempt was called never applied": (
        264,
        "a revocation that looks at the attempt alone",
    ),
    # A create was asked twice under one id; the failure of one call was taken for that of both, and
    # what the other had made ran on under no name.
    "one call's failure ended a create id": (
        263,
        "take one call's failure for the end of its create id",
    ),
    # A disk was rolled back between the reading and the marking, and the marking was lost: the next
    # reading was compared with what had been committed, not with what had been read.
    "a rolled back disk passed as the same": (
        90,
        "forget what was read of a disk when its marking comes to nothing",
    ),
    # A checkpoint was put back for a second time on the same disk, and the journal was asked for an
    # external effect that had begun since the first time: it was taken for one that never began.
    "an external effect was repeated after a restore": (
        7046,
        "let the journal of before a restore vouch for external effects",
    ),
    # What was sent again after a loss named the wrong message before it: another one of the same
    # batch was passed over for good.
    "what was sent again broke its chain": (19, "break the chain of what is sent again"),
    # Released after its instance had ended and before the next came to be: how the last one had
    # ended was forgotten, and it was called observed, by a provider that observes nothing.
    "an accepted stop was called an observed end": (
        183,
        "say that an end was observed by who observes nothing",
    ),
    # A carried attempt was undone and its epoch closed at that instant: asked anew, the journal said
    # that the attempt never began, and the step ended as never applied.
    "what was undone was called never applied": (
        103780,
        "call a carried attempt that was undone one that never began",
    ),
    # An operator's word on a recovery came while no session was attached; it was refused, and
    # nobody said it again.
    "a recovery waited for an operator for ever": (
        356,
        "ask an operator once, whoever was not there to hear it",
    ),
    # A create whose gateway fell silent was asked of one that creates at another authority.
    "one create id was asked for at two authorities": (
        22,
        "ask for a create again at another authority",
    ),
    # A disk had gone on from an older point; what it had written before that was not counted into
    # its next checkpoint, neither by the core nor by the auditor.
    "a checkpoint was without its disk's former lines": (
        6567,
        "judge what a checkpoint holds by its newest line alone",
    ),
    # Of two authorities one cannot see what is gone. Its listing held the other's things, and the
    # accepted stop of one of those, which could still be seen, was taken for its end.
    "an authority's blindness was believed of another": (
        25,
        "take what one authority lists of another for its own",
    ),
}

# Raised in the machine: name -> (seed, the rates it had beside those of its draw).
RAISED: dict[str, tuple[int, dict[str, float]]] = {
    # A stray that was found and gone in one batch had no state left to make its stop from.
    "a stray found and gone in one batch": (
        59,
        {
            "snapshot_restored": 0.08,
            "step_cancelled": 0.5,
            "channel_cut": 0.1,
            "receipt_lost": 0.3,
            "receipt_empty": 0.2,
        },
    ),
}
