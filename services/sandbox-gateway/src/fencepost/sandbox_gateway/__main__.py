"""`python -m fencepost.sandbox_gateway`: reads the environment and runs one gateway."""

from __future__ import annotations

from fencepost.runtime import service
from fencepost.sandbox_gateway import app

if __name__ == "__main__":
    service.main(app.build)
