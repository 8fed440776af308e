"""Compares what providers list and shards hold, and proposes what is nobody's any more."""
