"""Sandboxes as pods: `provider` for the gateway, `pods` for what a pod says, `channel` for exec."""
