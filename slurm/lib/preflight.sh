#!/usr/bin/env bash
# preflight.sh DIR TOKEN PYTHON: run by srun once per node. Writes `ok`, or what is wrong, to DIR/<node>.
set -uo pipefail
dir=$1 token=$2 python=$3 node=${SLURMD_NODENAME:-$(hostname -s)}
problems=()

free_gib() { df --output=avail --block-size=1G "$1" 2>/dev/null | tail -n 1 | tr -d ' '; }

# The batch script wrote the canary on another node: reading it back proves that both see one file system.
[ "$(cat "$dir/canary" 2>/dev/null)" = "$token" ] || problems+=("does not see $dir/canary as the first node wrote it")

for place in "$dir" "${MRL_LOCAL_DIR:-${TMPDIR:-/tmp}}"; do
  free=$(free_gib "$place")
  if [ "${free:-0}" -lt "${MRL_MIN_FREE_GIB:-10}" ]; then
    problems+=("${free:-?} GiB free in $place, MRL_MIN_FREE_GIB is ${MRL_MIN_FREE_GIB:-10}")
  fi
done

expected=${SLURM_GPUS_ON_NODE:-0}
if [ "$expected" -gt 0 ]; then
  if ! listed=$(nvidia-smi --query-gpu=ecc.errors.uncorrected.volatile.total --format=csv,noheader 2>&1); then
    problems+=("nvidia-smi fails: ${listed%%$'\n'*}")
  else
    [ "$(wc -l <<<"$listed")" -eq "$expected" ] || problems+=("$(wc -l <<<"$listed") GPUs, Slurm says $expected")
    grep -qE '^[1-9]' <<<"$listed" && problems+=("uncorrected ECC errors on a GPU")
    running=$(nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null | paste -sd' ')
    [ -z "$running" ] || problems+=("GPUs are in use by processes $running")
    usable=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>&1 | tail -n 1)
    [ "$usable" = "$expected" ] || problems+=("CUDA sees $usable GPUs, Slurm says $expected")
  fi
else
  missing=$("$python" -c 'import megatron_rl, importlib.metadata as m; m.version("torch")' 2>&1 | tail -n 1)
  [ -z "$missing" ] || problems+=("$python cannot run the program: $missing")
fi

if [ "${#problems[@]}" -eq 0 ]; then said=ok; else said=$(printf '%s; ' "${problems[@]}"); fi
printf '%s\n' "$said" >"$dir/.$node" && mv "$dir/.$node" "$dir/$node"
