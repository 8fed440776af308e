"""The edges: JetStream ledger and bus, ShardRunner, clock, settings, metrics, service life cycle."""
