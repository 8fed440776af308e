"""`python -m fencepost.sweeper`: reads the environment and runs one sweeper."""

from __future__ import annotations

from fencepost.runtime import service
from fencepost.sweeper import app

if __name__ == "__main__":
    service.main(app.build)
