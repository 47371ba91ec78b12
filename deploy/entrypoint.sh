#!/bin/sh
# Starts a command with a folder for temporary files that is this user's alone. The engine's socket
# lies in it, and a volume that is mounted at /tmp may be open to all, which the engine refuses.
set -eu
TMPDIR="${TMPDIR:-/tmp}/nanocore-$(id -u)"
mkdir -p -m 0700 "$TMPDIR"
# For healthcheck.py: who is asked, and that it was not ready yet, though one before it may have been.
rm -f "$TMPDIR/was-ready"
echo $$ >"$TMPDIR/pid"
export TMPDIR
exec "$@"
