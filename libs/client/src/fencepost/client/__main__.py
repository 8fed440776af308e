"""`python -m fencepost.client` is the `fencepost` command."""

from fencepost.client.cli import main

if __name__ == "__main__":
    main()
