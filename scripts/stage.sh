#!/bin/sh
# stage.sh NAME COMMAND...: runs one check, prints one line for it, and its output only when it fails.
name=$1
shift
if out=$("$@" 2>&1); then
    printf '%-18s ok\n' "$name"
else
    code=$?
    printf '%-18s FAILED: %s\n%s\n' "$name" "$*" "$out" >&2
    exit "$code"
fi
