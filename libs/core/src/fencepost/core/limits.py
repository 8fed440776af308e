"""
Every bound in the system, with the relations between them asserted at import.

Bytes and counts are plain; times are milliseconds and end in `_MS`.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# One batch is one message.
BATCH_BYTES_MAX: Final = 256 * KIB
BATCH_INPUTS_MAX: Final = 512
INPUT_ENTRIES_BYTES_MAX: Final = 64 * KIB

# Arguments and results are inline up to here, by digest in the object store above.
INLINE_BYTES_MAX: Final = 16 * KIB
CONTENT_BYTES_MAX: Final = 64 * MIB
COMMAND_BYTES_MAX: Final = 48 * KIB
NATS_PAYLOAD_BYTES_MAX: Final = MIB
# What a receipt may add to the ledger: its result, and the list of what changed.
RECEIPT_BYTES_MAX: Final = 48 * KIB
NESTING_MAX: Final = 64

# Admission, per sandbox and per shard. A shard refuses, it never waits.
OPEN_STEPS_PER_SANDBOX_MAX: Final = 16
PARKED_STEPS_PER_SANDBOX_MAX: Final = 10_000
OPEN_STEPS_PER_SHARD_MAX: Final = 20_000
SANDBOXES_PER_SHARD_MAX: Final = 100_000

# Sandboxes that are gone, and have told everybody so: the latest are remembered with their final
# steps, those before by name alone (an id is never used twice), and before that not at all.
GONE_REMEMBERED_PER_SHARD: Final = 1_000
GONE_NAMES_PER_SHARD: Final = 100_000
HOLDERS_PER_SANDBOX_MAX: Final = 64
CLAIMS_PER_SANDBOX_MAX: Final = 64
# DAGs that let go of a sandbox which is not gone, and are still to be told.
DEBTORS_PER_SANDBOX_MAX: Final = 4_096
STRAYS_PER_SHARD_MAX: Final = 1_000

# DAGs.
DAGS_PER_SHARD_MAX: Final = 200_000
NODES_PER_DAG_MAX: Final = 1_000
ACQUISITIONS_PER_DAG_MAX: Final = 20_000
NAME_BYTES_MAX: Final = 1_024
CANCEL_BOUND_MS_MAX: Final = 60_000
ANSWERS_REMEMBERED_PER_DAG: Final = 64
CANCELS_WAITING_PER_DAG_MAX: Final = 1_024
# Of one input or one turn, so that its entries fit a batch; the rest follows in the next turns.
RELEASES_PER_TURN: Final = 100
ANSWERS_PER_TURN: Final = 16
TOLD_PER_TURN: Final = 16
# DAGs with a last verdict: so many are kept whole, and so many more as their verdict.
DAGS_ENDED_WHOLE: Final = 2_000
DAGS_ENDED_REMEMBERED: Final = 50_000

# Attempts.
ATTEMPTS_MAX_DEFAULT: Final = 5
ATTEMPTS_MAX: Final = 20
REFUSALS_RECORDED_PER_ATTEMPT_MAX: Final = 8
UNDO_TRIES_MAX: Final = 5

# Duplicates are decided over this many final steps of one sandbox.
FINISHED_WINDOW: Final = 1024

DEADLINE_MS_DEFAULT: Final = 300_000
DEADLINE_MS_MIN: Final = 100
DEADLINE_MS_MAX: Final = 24 * 3600 * 1000

# Leases.
HEARTBEAT_MS: Final = 1_000
LEASE_MS: Final = 5_000
GATEWAY_SILENT_MS: Final = 3_000

# Effects are made again from the state by timer until they are answered.
EFFECT_REPEAT_MS: Final = 2_000
EFFECT_REPEAT_MS_MAX: Final = 30_000
CREATE_HORIZON_MS: Final = 60_000

# Recovery.
CHECKPOINTS_KEPT: Final = 4
CHECKPOINTS_ASKED_MAX: Final = 16
# New fences are held while one is taken: that has an end, whatever became of the order.
CHECKPOINT_MS: Final = 600_000
CHECKPOINT_RETRY_MS: Final = 1_000
CHECKPOINT_RETRY_MS_MAX: Final = 60_000
RESTORE_TRIES_MAX: Final = 5
RESTORE_RETRY_MS: Final = 1_000
# Generations that are given up because a replay was cut down in the middle, in a row.
REPLAY_DISCARDS_MAX: Final = 3
OWED_PAGE: Final = 200
CHANGES_SHOWN_MAX: Final = 100
CHANGES_SHOWN_BYTES: Final = 8 * KIB
# What the commits of one checkpoint may take of its input's entries; the rest goes by reference.
JOINED_BYTES_MAX: Final = 32 * KIB

# Commands stay in their stream this long; a step's deadline must fit well inside.
COMMANDS_AGE_MS: Final = 72 * 3600 * 1000

# The toolhost's journal window, in records; every open fence must be inside it. So a sandbox hands
# out no new one so far ahead of an open step's. What is so far behind all the same, by new sessions
# and replays, the journal is not asked for: what all others are fenced for first may push it out.
JOURNAL_WINDOW: Final = 4096
FENCES_AHEAD_MAX: Final = JOURNAL_WINDOW // 2
FENCES_BEHIND_MAX: Final = JOURNAL_WINDOW * 3 // 4

assert INPUT_ENTRIES_BYTES_MAX < BATCH_BYTES_MAX < NATS_PAYLOAD_BYTES_MAX
assert INLINE_BYTES_MAX < RECEIPT_BYTES_MAX < INPUT_ENTRIES_BYTES_MAX
assert INLINE_BYTES_MAX < COMMAND_BYTES_MAX < INPUT_ENTRIES_BYTES_MAX
assert HEARTBEAT_MS * 3 < LEASE_MS
assert GATEWAY_SILENT_MS < LEASE_MS
assert DEADLINE_MS_MAX < COMMANDS_AGE_MS
assert OPEN_STEPS_PER_SANDBOX_MAX * ATTEMPTS_MAX < JOURNAL_WINDOW - FENCES_BEHIND_MAX
assert FENCES_AHEAD_MAX + OPEN_STEPS_PER_SANDBOX_MAX * ATTEMPTS_MAX < FENCES_BEHIND_MAX
assert ATTEMPTS_MAX_DEFAULT <= ATTEMPTS_MAX
