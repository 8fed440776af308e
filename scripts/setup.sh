#!/bin/sh
# Finds a Python that can carry the workspace and hands over to setup.py; says what to install otherwise.
set -eu
cd "$(dirname "$0")/.."

usable='import sys; sys.exit(sys.version_info < (3, 11))'
found=
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c "$usable" >/dev/null 2>&1; then
        found=$candidate
        break
    fi
done

advice() {
    case $(uname -s) in
        Darwin) echo "  install it with:  brew install python@3.13" ;;
        *)
            if command -v apt-get >/dev/null 2>&1; then
                echo "  install it with:  sudo apt-get install python3 python3-venv"
            else
                echo "  install python3 (3.11 or later) with venv and pip by your system's package manager"
            fi
            ;;
    esac
    echo "  or name one:      make setup PYTHON=/path/to/python3"
}

if [ -z "$found" ]; then
    {
        if [ -n "${PYTHON:-}" ]; then
            echo "setup: $PYTHON is not a Python 3.11 or later"
        else
            echo "setup: Python 3.11 or later was not found (python3 is $(python3 --version 2>/dev/null || echo missing))"
        fi
        advice
    } >&2
    exit 2
fi

if ! "$found" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    {
        echo "setup: $found ($("$found" --version)) has no venv or ensurepip module"
        advice
    } >&2
    exit 2
fi

exec "$found" scripts/setup.py
