#!/usr/bin/env bash
# server.sh GPUS PYTHON -m megatron_rl serve RECIPE …: run by srun once per rollout server. One that dies is started again,
# as often as MRL_MAX_RESTARTS says; the run goes on meanwhile with the others.
set -uo pipefail
gpus=$1
shift
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then # this server's part of the node's
  IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
  if [ "${#devices[@]}" -gt "$gpus" ]; then # else Slurm has given this task its own already (--gpus-per-task)
    devices=("${devices[@]:$((SLURM_LOCALID * gpus)):gpus}")
  fi
  CUDA_VISIBLE_DEVICES=$(
    IFS=,
    echo "${devices[*]}"
  )
  export CUDA_VISIBLE_DEVICES
fi
node=${SLURMD_NODENAME:-$(hostname -s)}
host=$node
if [ -n "${MRL_SERVER_INTERFACE:-}" ]; then
  host=$(ip -4 -o addr show dev "$MRL_SERVER_INTERFACE" | sed -nE 's/.* inet ([0-9.]+).*/\1/p' | head -n 1)
  [ -n "$host" ] || { echo "MRL_SERVER_INTERFACE=$MRL_SERVER_INTERFACE: no IPv4 address on $node" >&2 && exit 2; }
fi
ended='' server=''
trap 'ended=1; [ -z "$server" ] || kill -TERM "$server" 2>/dev/null' TERM
for ((start = 0; start <= ${MRL_MAX_RESTARTS:-3}; start++)); do
  "$@" --host "$host" --name "$node-$SLURM_LOCALID" &
  server=$!
  status=0
  wait "$server" || status=$?
  while kill -0 "$server" 2>/dev/null; do wait "$server" || status=$?; done
  [ -z "$ended" ] || exit 0
  [ "$status" -ne 2 ] || exit 2 # bad input: again would not help
  echo "server on $node ended with status $status; starting it again" >&2
  sleep 2
done
exit 1
