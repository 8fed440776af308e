"""The sandbox machine, its shards spread over replicas; the only one that commits."""
