"""Convergence: compares providers, projections and time with the ledger."""
