"""
Swarm options: which faults a run has, and how often, all drawn from its seed.

A fault class that is absent from `rates` never happens in that run. Rates of messages and calls
are probabilities per opportunity; rates of the chaos classes are probabilities per chaos tick.
"""

from __future__ import annotations

import random
from typing import Final

import msgspec
from fencepost.simulator.numbers import share_problem

# Base rates. The draw leaves a class out, or takes it at a third, once, or three times of this.
MESSAGE_FAULTS: Final[dict[str, float]] = {
    "command_lost": 0.10,
    "command_repeated": 0.10,
    "command_malformed": 0.05,
    "command_id_reused": 0.05,
    "dispatch_lost": 0.08,
    "dispatch_repeated": 0.10,
    "dispatch_delayed": 0.06,
    "receipt_lost": 0.08,
    "receipt_repeated": 0.10,
    "receipt_delayed": 0.08,
    "receipt_corrupted": 0.05,
    "receipt_empty": 0.05,
    "fact_repeated": 0.10,
    "fact_delayed": 0.10,
    "fact_poisoned": 0.03,
    "heartbeat_lost": 0.20,
    "append_lost": 0.04,
    "append_answer_lost": 0.04,
    "append_slow": 0.05,
    "read_stale": 0.15,
    "read_lost": 0.10,
    "snapshot_torn": 0.30,
    "create_ambiguous": 0.20,
    "create_refused": 0.15,
    "provider_slow": 0.10,
    "observe_unknown": 0.25,
    "stop_refused": 0.20,
    "stop_lost": 0.15,
    "stop_stuck": 0.5,
    "disk_full": 0.05,
    "record_fails": 0.03,
    "naive_toolhost": 0.30,
    "tools_unkillable": 0.05,
    "owner_crash_between_effects": 0.01,
    "toolhost_crash_at_point": 0.02,
    "step_cancelled": 0.12,
    "step_deadline_short": 0.10,
    "sandbox_released": 0.60,
}
CHAOS_FAULTS: Final[dict[str, float]] = {
    "owner_crash": 0.03,
    "owner_pause": 0.04,
    "owner_rival": 0.03,
    "clock_jump": 0.05,
    "log_unreachable": 0.02,
    "gateway_crash": 0.03,
    "gateway_pause": 0.04,
    "gateway_cut_off": 0.03,
    "toolhost_crash": 0.05,
    "toolhost_pause": 0.03,
    "channel_cut": 0.05,
    "sandbox_preempted": 0.04,
    "preempted_but_acting": 0.03,
    "sandbox_restarted": 0.03,
    "snapshot_restored": 0.03,
    "disk_swapped_under_tool": 0.05,
}
# Drawn last, so that a class that is added at the end leaves the options of old seeds as they were.
LATER_FAULTS: Final[dict[str, float]] = {
    "disk_rolled_back_before_mark": 0.10,
    "replay_differs": 0.03,
    "checkpoint_fails": 0.15,
    "checkpoint_spoiled": 0.05,
    "restore_fails": 0.20,
    "preemption_announced": 0.04,
}
# Of runs with DAGs: messages between shards, trackers, sweepers, listings, partitions, clients.
DAG_FAULTS: Final[dict[str, float]] = {
    "append_refused": 0.04,
    "crash_after_append": 0.02,
    "snapshot_lost": 0.20,
    "message_lost": 0.10,
    "message_answer_lost": 0.10,
    "message_repeated": 0.10,
    "message_delayed": 0.10,
    "message_poisoned": 0.03,
    "question_lost": 0.10,
    "proposal_lost": 0.10,
    "proposal_repeated": 0.15,
    "tracker_crash_between_effects": 0.02,
    "sweeper_crash_between_effects": 0.10,
    "gateway_crash_at_point": 0.01,
    "stop_answer_lost": 0.15,
    "provider_rate_limited": 0.05,
    "observe_late": 0.20,
    "native_id_recycled": 0.50,
    "list_short": 0.20,
    "list_empty": 0.15,
    "list_incomplete": 0.20,
    "list_paged_wrong": 0.20,
    "list_stale": 0.20,
    "list_unfiltered": 0.20,
    "list_of_other_authority": 0.15,
    "list_of_other_deployment": 0.10,
    "gateway_reaches_one": 0.20,
    "gateway_creates_elsewhere": 0.30,
    "sweep_census_only": 0.10,
    "sweep_lead_lost": 0.10,
    "dag_cancelled_at_point": 0.03,
    "dag_cancelled_again": 0.50,
    "dag_command_bad": 0.15,
    "dag_holders_leave_at_once": 0.50,
    "dag_adopts_what_is_released": 0.40,
    "dag_cancelled_at_rebuild": 0.50,
    "sandbox_claimed": 0.40,
    "sandbox_replaced": 0.30,
}
DAG_CHAOS_FAULTS: Final[dict[str, float]] = {
    "tracker_crash": 0.04,
    "tracker_pause": 0.05,
    "tracker_rival": 0.04,
    "tracker_clock_jump": 0.05,
    "sweeper_crash": 0.03,
    "sweeper_pause": 0.04,
    "sweeper_clock_jump": 0.05,
    "instance_suspended": 0.03,
    "stray_started": 0.02,
    "neighbour_started": 0.03,
    "partition_planner_log": 0.02,
    "partition_tracker_log": 0.03,
    "partition_planner_gateway": 0.03,
    "partition_planner_tracker": 0.03,
    "partition_gateway_provider": 0.03,
    "partition_sweeper_planner": 0.03,
    "partition_sweeper_tracker": 0.03,
    "partition_sweeper_gateway": 0.03,
    "partition_sweeper_log": 0.03,
    "partition_client_log": 0.03,
}
SANDBOX_FAULTS: Final[dict[str, float]] = {**MESSAGE_FAULTS, **CHAOS_FAULTS, **LATER_FAULTS}
BASE_RATES: Final[dict[str, float]] = {**SANDBOX_FAULTS, **DAG_FAULTS, **DAG_CHAOS_FAULTS}
FAULTS: Final[tuple[str, ...]] = tuple(BASE_RATES)
DAG_ONLY: Final = frozenset((*DAG_FAULTS, *DAG_CHAOS_FAULTS))
"""Classes that strike only in runs with DAGs: those always have some where one is asked for."""


ENABLERS: Final[dict[str, tuple[str, ...]]] = {
    "observe_unknown": ("channel_cut",),
    "tools_unkillable": ("channel_cut",),
    "snapshot_torn": ("owner_crash",),
    "snapshot_lost": ("owner_crash",),
    "read_stale": ("owner_rival", "append_answer_lost"),
    "read_lost": ("owner_rival", "append_answer_lost"),
    "stop_refused": ("sandbox_released",),
    "stop_lost": ("sandbox_released",),
    "stop_stuck": ("sandbox_released",),
    "disk_rolled_back_before_mark": ("channel_cut",),
    "replay_differs": ("sandbox_preempted",),
    "checkpoint_spoiled": ("sandbox_preempted",),
    "restore_fails": ("sandbox_preempted",),
    "disk_swapped_under_tool": ("gateway_crash", "sandbox_restarted"),
    "native_id_recycled": ("sandbox_preempted",),
    "dag_cancelled_at_rebuild": ("sandbox_preempted",),
    "proposal_lost": ("stray_started",),
    "proposal_repeated": ("stray_started",),
    "sweeper_crash_between_effects": ("stray_started",),
    "sweep_lead_lost": ("stray_started",),
    "sweep_census_only": ("stray_started",),
    "list_unfiltered": ("neighbour_started",),
    "list_paged_wrong": ("stray_started",),
}
"""Classes that only show where something else happens too, with what that is."""


STEPS_MAX: Final = 100_000
_MS_MAX: Final = 24 * 3600 * 1000
_BOUNDS: Final[dict[str, tuple[int, int]]] = {
    "shards": (1, 1024),
    "planners": (1, 64),
    "gateways": (1, 64),
    "sandboxes": (1, 10_000),
    "steps": (1, STEPS_MAX),
    "safety_ms": (1, _MS_MAX),
    "settle_ms": (1, _MS_MAX),
    "snapshot_every": (1, 1_000_000),
    "dags": (0, 10_000),
    "trackers": (1, 64),
    "sweepers": (0, 64),
    "window": (1, 1_000_000),
    "checkpoints": (0, 1_000_000),
}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    One run. Times are virtual milliseconds.

    `spared` are faults, counted as they would strike, that do not: shrinking found them needless.
    `withheld` are numbers of steps that are made and not sent, for the same reason.
    `steps` is how many step commands the clients send; the safety phase ends when all are sent
    and `safety_ms` have passed; then faults stop and everything must settle within `settle_ms`.
    Without `dags` there are neither trackers nor sweepers. `window` bounds what a shard's owner
    keeps of messages that were not acknowledged. `observes_gone`: whether the second authority can.
    `checkpoints`: of so many committed steps one is taken, by policy; 0 for none at all.
    """

    shards: int = 2
    planners: int = 2
    gateways: int = 2
    sandboxes: int = 4
    steps: int = 40
    safety_ms: int = 20_000
    settle_ms: int = 120_000
    snapshot_every: int = 25
    external_share: float = 0.2
    command_share: float = 0.3
    dags: int = 2
    trackers: int = 2
    sweepers: int = 1
    window: int = 8
    observes_gone: bool = True
    checkpoints: int = 0
    rates: dict[str, float] = {}
    spared: tuple[int, ...] = ()
    withheld: tuple[int, ...] = ()


def problem(options: Options) -> str:
    """The first field out of its bounds, and what was expected of it; nothing where none is."""
    for name, (low, high) in _BOUNDS.items():
        if not low <= getattr(options, name) <= high:
            return f"{name}: expected {low} to {high}, got {getattr(options, name)}"
    shares = {"external_share": options.external_share, "command_share": options.command_share}
    shares |= {f"rates.{name}": rate for name, rate in options.rates.items()}
    for name, share in shares.items():
        if wrong := share_problem(share):
            return f"{name}: {wrong}"
    unknown = sorted(options.rates.keys() - BASE_RATES.keys())
    return f"rates: no such fault: {unknown[0][:80]!a}" if unknown else ""


def draw(seed: int, *, faults: tuple[str, ...] | None = None, steps: int | None = None) -> Options:
    """
    Draws the options of one run. `faults` restricts the draw to these classes, all of them on.

    The draw has its own generator, so that a run under other options keeps its seed's lots.
    """
    lots = random.Random(f"options/{seed}")
    few = lots.random() < 0.25
    drawn = Options(
        shards=lots.choice((1, 2, 3)),
        planners=lots.choice((1, 2, 3)),
        gateways=lots.choice((1, 2, 3)),
        sandboxes=lots.choice((1, 2, 4, 6)),
        steps=lots.choice((20, 40, 80)),
        snapshot_every=lots.choice((5, 25, 100)),
        external_share=lots.choice((0.0, 0.2, 0.5)),
        command_share=lots.choice((0.0, 0.3, 0.8)),
    )
    rates: dict[str, float] = {}
    # What belongs to DAGs has a generator of its own: neither half moves the other's draws.
    of_dags = random.Random(f"options of dags/{seed}")
    for name, base in BASE_RATES.items():
        if name in DAG_ONLY:
            lots = of_dags
        on = lots.random() < (0.12 if few else 0.5)
        rate = min(base * lots.choice((0.33, 1.0, 3.0)), 0.9)
        if on if faults is None else name in faults:
            rates[name] = round(rate, 4)
    checkpoints = random.Random(f"options of checkpoints/{seed}")
    drawn = msgspec.structs.replace(
        drawn,
        rates=rates,
        checkpoints=checkpoints.choice((0, 2, 5, 20)),
        dags=of_dags.choice((0, 1, 2, 4)),
        trackers=of_dags.choice((1, 2, 3)),
        sweepers=of_dags.choice((1, 2)),
        window=of_dags.choice((2, 8, 100)),
        observes_gone=of_dags.random() < 0.7,
    )
    if faults and any(name in DAG_ONLY for name in faults):
        drawn = msgspec.structs.replace(drawn, dags=max(drawn.dags, 2))
    return drawn if steps is None else msgspec.structs.replace(drawn, steps=steps)
