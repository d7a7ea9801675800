#!/usr/bin/env bash
# rank.sh STATUS_DIR COMMAND…: run by srun once per rank. Slurm's numbers under the names that torch reads, then COMMAND;
# its exit status is left in STATUS_DIR/<rank>.
set -euo pipefail
status_dir=$1
shift
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE:-1} GROUP_RANK=$SLURM_NODEID
# Slurm signals every process of a step. This shell must outlive COMMAND, which saves before it leaves; a trap (not
# an ignored signal) is reset in the child.
trap : TERM USR1
status=0
"$@" || status=$?
printf '%s\n' "$status" >"$status_dir/$RANK.part"
mv "$status_dir/$RANK.part" "$status_dir/$RANK"
# An alarm ends the run on every rank at the same step (3): an error now would kill peers that are still closing files.
[ "$status" -eq 3 ] && exit 0
exit "$status"
