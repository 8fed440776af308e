"""Runtimes that hold sandboxes, behind one small protocol (`fencepost.providers.protocol`)."""
