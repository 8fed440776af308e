"""The Python client, the fencepost command, and the embedded stack."""
