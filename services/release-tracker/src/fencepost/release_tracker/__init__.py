"""PostgreSQL projection and HTTP API; later the dag machine."""
