#!/usr/bin/env bash
# Called by `make test` after set-up: what tests run beside the environment, each in a folder of its own under .cache.
# Nothing of it enters the environment. Idempotent: a stamp holds the hash of what went into a folder. With arguments,
# only the folders that they name.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv} TEST_CACHE=.cache WANTED=${*:-transformer-engine wandb}

say() { printf 'setup: %s\n' "$*"; }
mkdir -p "$TEST_CACHE"
exec 9>"$TEST_CACHE/setup-tests.lock"
flock 9 # two `make` at once: the second waits, then finds everything done
log=$TEST_CACHE/setup-tests.log

is_wanted() { [[ " $WANTED " = *" $1 "* ]]; }

# fetch FOLDER REQUIREMENTS WHAT [FILE…]: FOLDER holds exactly REQUIREMENTS. False where it does already. The hash is of
# REQUIREMENTS and FILE…
fetch() {
  local folder=$1 requirements=$2 what=$3 wanted
  shift 3
  wanted=$({ "$VENV/bin/python" -V && cat "$requirements" "$@"; } | sha256sum | cut -d' ' -f1)
  [ "$(cat "$folder/.ready" 2>/dev/null || true)" != "$wanted" ] || return 1
  say "fetching $what"
  rm -rf "$folder"
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-deps --require-hashes --no-compile \
    --target "$folder" -r "$requirements" >"$log" 2>&1 || { tail -n 5 "$log" >&2; say "pip failed (all of its output: $log)"; exit 1; }
  stamp=$wanted
}

# TransformerEngine's Python for tests/support/te, patched.
folder=$TEST_CACHE/transformer-engine
if is_wanted transformer-engine && fetch "$folder" tests/support/te/requirements.txt "TransformerEngine's Python for the tests (300 MB, most of it triton)" patches/transformer-engine/*; then
  "$VENV/bin/python" -m megatron_rl patch apply --tree "$folder" transformer-engine
  echo "$stamp" >"$folder/.ready"
fi

# The client of monitor.sinks.wandb, in a folder of its own.
folder=$TEST_CACHE/sinks/wandb
if is_wanted wandb && fetch "$folder" tests/support/sinks/wandb.txt "the client of wandb for the tests (60 MB)"; then
  echo "$stamp" >"$folder/.ready"
fi
