"""Subjects, streams, grants and wire messages: the one table of names."""
