#!/bin/sh
# A service by its name, or else the command that was given.
set -eu
case "${1:-}" in
    planner | sandbox-gateway | release-tracker | sweeper)
        module=$(echo "$1" | tr - _)
        shift
        exec python -m "fencepost.$module" "$@"
        ;;
esac
exec "$@"
