"""PostgreSQL projection of the ledger, and the HTTP API over it."""
