"""`python -m fencepost.planner`: reads the environment and runs one planner."""

from __future__ import annotations

from fencepost.planner import app
from fencepost.runtime import service

if __name__ == "__main__":
    service.main(app.build)
