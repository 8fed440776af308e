"""Every Prometheus metric of every service, named here only. One registry per service."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

SECONDS: Final = (
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class ServiceMetrics:
    """What every service counts."""

    def __init__(self, service: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self.service = service
        # Resident memory, file descriptors and processor time of the process.
        ProcessCollector(namespace="fencepost", registry=self.registry)
        self.up = self._gauge("up", "1 while the service is ready")
        self.publish_denied = self._counter(
            "publish_denied_total", "publishes that the server's permissions refused"
        )
        self.publish_dropped = self._gauge(
            "publish_dropped", "messages that were dropped because too much was waiting"
        )
        self.reconnects = self._counter("reconnects_total", "lost connections to NATS")

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"fencepost_{name}", help_, labels, registry=self.registry)

    def _gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return Gauge(f"fencepost_{name}", help_, labels, registry=self.registry)

    def _histogram(self, name: str, help_: str, *labels: str) -> Histogram:
        return Histogram(
            f"fencepost_{name}", help_, labels, registry=self.registry, buckets=SECONDS
        )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class RunnerMetrics(ServiceMetrics):
    """What every service counts that runs shards."""

    def __init__(self, service: str, registry: CollectorRegistry | None = None) -> None:
        super().__init__(service, registry)
        self.shards_owned = self._gauge("shards_owned", "shards that this process owns")
        self.shards_unowned = self._gauge(
            "shards_unownable", "shards that this process may not own until a person looks"
        )
        self.takeovers = self._counter("takeovers_total", "shards taken over", "outcome")
        self.takeover_seconds = self._histogram("takeover_seconds", "time to own a shard")
        self.ownerships_lost = self._counter(
            "ownerships_lost_total", "shards that ended here", "reason"
        )
        self.batches = self._counter("batches_total", "accepted batches")
        self.batch_entries = self._counter("batch_entries_total", "entries in accepted batches")
        self.batch_bytes = self._counter("batch_bytes_total", "bytes of accepted batches")
        self.append_seconds = self._histogram("append_seconds", "time of one append")
        self.appends_unknown = self._counter(
            "appends_unknown_total", "appends without an answer that proves something"
        )
        self.inputs_poisoned = self._counter("inputs_poisoned_total", "inputs set aside", "source")
        self.inputs_dropped = self._counter(
            "inputs_dropped_total", "volatile inputs dropped because too many were waiting"
        )
        self.inputs_lag = self._gauge("inputs_waiting", "inputs read and not yet taken", "shard")
        self.effects = self._counter("effects_total", "effects made at once")
        self.effects_repeated = self._counter("effects_repeated_total", "effects made again")
        self.publish_lag = self._gauge(
            "publications_waiting", "publications without acknowledgement", "kind", "shard"
        )
        self.publish_repeated = self._counter(
            "publications_repeated_total", "publications made again", "kind"
        )
        self.messages_early = self._counter(
            "messages_early_total", "messages between shards that came before their turn"
        )
        self.snapshots = self._counter("snapshots_total", "snapshots stored", "outcome")
        self.entries = self._counter("entries_total", "accepted entries", "kind")


class PlannerMetrics(RunnerMetrics):
    """Counted from accepted entries, so once per step and shard owner."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("planner", registry)
        self.steps_committed = self._counter("steps_committed_total", "steps committed")
        self.steps_compensated = self._counter(
            "steps_compensated_total", "steps compensated for good", "reason"
        )
        self.steps_indeterminate = self._counter(
            "steps_indeterminate_total", "steps that became indeterminate", "reason"
        )
        self.commands_refused = self._counter(
            "commands_refused_total", "commands that never became anything", "reason"
        )
        self.receipts_refused = self._counter(
            "receipts_refused_total", "receipts that did not join", "reason"
        )
        self.epochs_opened = self._counter("epochs_opened_total", "generations opened", "disk")
        self.epochs_closed = self._counter("epochs_closed_total", "generations ended", "reason")
        self.checkpoints = self._counter("checkpoints_total", "checkpoints recorded", "outcome")
        self.steps_replayed = self._counter(
            "steps_replayed_total", "committed steps applied again", "verdict"
        )
        self.recoveries = self._counter("recoveries_total", "recoveries that ended", "mode")
        self.recoveries_stopped = self._counter(
            "recoveries_stopped_total", "recoveries that wait for a person", "reason"
        )


class TrackerMetrics(RunnerMetrics):
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("release-tracker", registry)
        self.verdicts = self._counter("verdicts_total", "verdicts answered", "released", "reason")
        self.cancel_seconds = self._histogram("cancel_seconds", "from an HTTP cancel to its answer")
        self.projected_seq = self._gauge(
            "projected_sequence", "ledger sequence that the projection has", "family", "shard"
        )
        self.projection_lag = self._gauge(
            "projection_lag_sequences",
            "ledger sequences that the projection has not reached",
            "family",
        )
        self.projected = self._counter("projected_batches_total", "batches projected")
        self.projection_errors = self._counter(
            "projection_errors_total", "times that the projection had to stop", "reason"
        )
        self.projection_stopped = self._gauge(
            "projection_shards_stopped",
            "shards that are not projected until a person looks",
            "family",
        )
        self.http_requests = self._counter("http_requests_total", "requests answered", "status")


class GatewayMetrics(ServiceMetrics):
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("sandbox-gateway", registry)
        self.sandboxes = self._gauge("gateway_sandboxes", "sandboxes attached to this gateway")
        self.dispatches = self._counter("dispatches_total", "fenced calls handed on", "direction")
        self.receipts = self._counter("receipts_total", "receipts stamped", "verdict")
        self.tool_seconds = self._histogram("tool_seconds", "from a dispatch to its receipt")
        self.orders = self._counter("orders_total", "orders taken", "kind")
        self.orders_refused = self._counter("orders_refused_total", "orders not taken", "reason")
        self.provider_calls = self._counter(
            "provider_calls_total", "calls of a provider", "call", "answer"
        )
        self.facts = self._counter("facts_total", "facts published", "kind")
        self.channels_lost = self._counter("channels_lost_total", "channels that ended", "observed")
        self.heartbeats = self._counter("heartbeats_total", "heartbeats of toolhosts")
        self.reads = self._counter("reads_total", "read-only calls", "status")
        self.facts_unacknowledged = self._counter(
            "facts_unacknowledged_total",
            "tries to publish a fact that were not acknowledged",
            "kind",
        )
        self.lease_renewals_failed = self._counter(
            "lease_renewals_failed_total", "renewals of the gateway's lease without an answer"
        )
        self.checkpoints = self._counter(
            "checkpoint_orders_total", "checkpoints ordered", "outcome"
        )
        self.checkpoint_seconds = self._histogram("checkpoint_seconds", "time of one checkpoint")
        self.checkpoint_bytes = self._counter("checkpoint_bytes_total", "bytes stored by them")
        self.restores = self._counter("restore_orders_total", "restores ordered", "outcome")
        self.restore_seconds = self._histogram("restore_seconds", "time of one restore")
        self.chunks_dropped = self._counter("chunks_dropped_total", "chunks that none needed more")
        self.chunks_lost = self._counter(
            "chunks_lost_total", "chunks that the store had lost of a base, sent again"
        )
        self.prunes_given_up = self._counter(
            "prunes_given_up_total", "times that a store did not say enough to drop chunks"
        )


class SweeperMetrics(ServiceMetrics):
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("sweeper", registry)
        self.sweeps = self._counter("sweeps_total", "sweeps", "outcome")
        self.sweep_seconds = self._histogram("sweep_seconds", "time of one sweep")
        self.reached = self._gauge("sweep_reached", "sandboxes that the last sweep saw")
        self.released = self._counter("sweep_released_total", "releases proposed", "reason")
        self.deferred = self._counter("sweep_deferred_total", "releases deferred", "reason")
        self.orphans = self._gauge("sweep_orphans", "sandboxes that no ledger names")
