#!/usr/bin/env bash
# Called by `make setup`: a virtual environment with the CPU engines, and Megatron-Core patched in it.
# Idempotent: a finished step leaves a stamp with the hash of what went into it, and is skipped until that changes.
# An interrupted run leaves no stamp, so the next one does the step again.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.11} VENV=${VENV:-.venv} TORCH_INDEX=${TORCH_INDEX:-}

say() { printf 'setup: %s\n' "$*"; }
command -v "$PYTHON" >/dev/null || PYTHON=python3
"$PYTHON" - <<'PY' || { say "needs Python 3.11 or 3.12; set PYTHON=/path/to/python3.11"; exit 1; }
import sys
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PY

mkdir -p .cache
exec 9>.cache/setup.lock
flock 9 # two `make` at once: the second waits, then finds everything done

# A virtual environment that was moved or half made cannot be repaired: make it anew.
if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
  say "creating $VENV"
  rm -rf "$VENV"
  "$PYTHON" -m venv "$VENV"
fi

stamp=$VENV/.installed
wanted=$(cat requirements-cpu.txt tools/stubs/*/pyproject.toml | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
  say "installing requirements-cpu.txt (vLLM, PyTorch, Megatron-Core; about 2 minutes, 2.5 GB)"
  rm -f "$stamp"
  # The configured sources first: an unreachable extra index costs minutes of retries.
  if ! "$VENV/bin/python" -m pip install --disable-pip-version-check -q -r requirements-cpu.txt; then
    if [ -z "$TORCH_INDEX" ]; then
      say "no configured package source has torch 2.13.0+cpu? then: make setup TORCH_INDEX=URL (README.md, Set-up)"
      exit 1
    fi
    say "trying again with $TORCH_INDEX"
    "$VENV/bin/python" -m pip install --disable-pip-version-check -q -r requirements-cpu.txt --extra-index-url "$TORCH_INDEX"
  fi
  "$VENV/bin/python" -m pip check
  echo "$wanted" >"$stamp"
fi

"$VENV/bin/python" tools/patches.py apply
say "ready"
