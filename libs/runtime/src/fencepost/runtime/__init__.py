"""The edges: JetStream ledger and bus, ShardRunner, clock, settings, metrics, services."""
