#!/usr/bin/env bash
# Called by `make test` after set-up: TransformerEngine's Python for tests/support/te, in a folder of its own, patched.
# Nothing of it enters the environment. Idempotent: the stamp holds the hash of what went into the folder.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}

say() { printf 'setup: %s\n' "$*"; }
folder=.cache/transformer-engine requirements=tests/support/te/requirements.txt
mkdir -p .cache
exec 9>.cache/setup-tests.lock
flock 9 # two `make` at once: the second waits, then finds everything done

wanted=$({ "$VENV/bin/python" -V && cat "$requirements" patches/transformer-engine/*; } | sha256sum | cut -d' ' -f1)
[ "$(cat "$folder/.ready" 2>/dev/null || true)" != "$wanted" ] || exit 0

say "fetching TransformerEngine's Python for the tests (300 MB, most of it triton)"
log=.cache/setup-tests.log
rm -rf "$folder"
"$VENV/bin/python" -m pip install --disable-pip-version-check --no-deps --require-hashes --no-compile \
  --target "$folder" -r "$requirements" >"$log" 2>&1 || { tail -n 5 "$log" >&2; say "pip failed (all of its output: $log)"; exit 1; }
"$VENV/bin/python" -m megatron_rl patch apply --tree "$folder" transformer-engine
echo "$wanted" >"$folder/.ready"
