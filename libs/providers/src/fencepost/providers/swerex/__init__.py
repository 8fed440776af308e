"""Sandboxes on SWE-ReX servers: `provider` for the gateway, `agent` for the server's own side."""
