"""
Seeds that once found a bug, by its name. Each runs under its own drawn options and the added ones.

A seed's meaning moves when the workload does; what was wrong is said, so that it can be sought
again.
"""

# name -> (seed, fault classes added to the drawn ones)
REGRESSIONS: dict[str, tuple[int, tuple[str, ...]]] = {
    # A session's own finding, repeated after its epoch had closed, opened another epoch under the
    # same nonce; and one taken before the first marking called a full disk blank.
    "a stale finding opened an epoch": (0, ("fact_repeated", "fact_delayed")),
    # An older point of the disk, from an epoch before, was taken for a blank disk: the effect of a
    # carried step was called lost and stood on it.
    "an older epoch's snapshot was called cold": (
        4,
        ("snapshot_restored", "disk_swapped_under_tool"),
    ),
    # A step was revoked by its latest attempt; what the disk held was that of the one before.
    "a carried attempt was called never applied": (
        35,
        ("step_cancelled", "receipt_lost", "channel_cut"),
    ),
    # A create was asked twice under one id; the failure of one call was taken for that of both, and
    # what the other had made ran on under no name.
    "one call's failure ended a create id": (
        371,
        ("dispatch_delayed", "dispatch_repeated", "gateway_pause", "create_refused"),
    ),
    # A disk was rolled back between the reading and the marking, and the marking was lost: the next
    # reading was compared with what had been committed, not with what had been read.
    "a rolled back disk passed as the same": (
        302,
        ("dispatch_delayed", "dispatch_repeated", "gateway_pause", "create_refused"),
    ),
    # An older point of the disk held an earlier attempt than the one that was being undone: there
    # was "nothing to undo", and the step was called never applied.
    "an undo named an attempt that older bytes did not know": (1247, ()),
}
