"""Hands and eyes: providers, channels, leases, stamping; decides nothing durable."""
