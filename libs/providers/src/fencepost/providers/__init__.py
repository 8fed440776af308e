"""Runtimes that hold sandboxes, behind one small protocol."""
