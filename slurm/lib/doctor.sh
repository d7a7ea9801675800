#!/usr/bin/env bash
# doctor.sh DIR PYTHON -m megatron_rl doctor …: run by srun once per node. Leaves the node's report in DIR.
set -euo pipefail
dir=$1
shift
exec "$@" --json "$dir/${SLURMD_NODENAME:-$(hostname -s)}.json" --shared "$dir"
