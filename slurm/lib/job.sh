# shellcheck shell=bash
# shellcheck disable=SC2034 # a sourced file: what it sets is used elsewhere
# Sourced by the batch scripts, in their strict mode: what a training and an evaluation job have in common.
: "${home:?the folder of the checkout, set before this file is sourced}"

within=() # what ends the ranks of `launch`, such as (timeout 60)

say() { printf '[%(%H:%M:%S)T +%ds] %s\n' -1 "$SECONDS" "$*"; }

die() { # die STATUS MESSAGE…: end the job for good
  local status=$1
  shift
  say "ERROR: $*" >&2
  exit "$status"
}

# JobState begins a line and EndTime comes second in one: a job's name or comment may hold "EndTime=" as well.
job_field() { # job_field NAME: of this job's record, JobState or EndTime
  scontrol show job "$SLURM_JOB_ID" | sed -nE "s/^ *(StartTime=[^ ]+ )?$1=([^ ]+).*/\\2/p"
}

# Everything that a site decides, and how many ranks there are. Topology comes from Slurm and from nowhere else.
prepare() {
  if [ -n "${MRL_SITE:-}" ]; then
    [ -r "$MRL_SITE" ] || die 2 "MRL_SITE=$MRL_SITE: no such file; copy one of $home/slurm/env/ and name it"
    # shellcheck source=/dev/null
    source "$MRL_SITE"
  fi
  if [ -z "${MRL_PYTHON:-}" ] && [ -z "${MRL_CONTAINER:-}" ] && [ -x "$home/.venv/bin/python" ]; then
    MRL_PYTHON=$home/.venv/bin/python
  fi
  : "${MRL_PYTHON:?the Python that has requirements.txt installed, as compute nodes (or the container) see it}"
  : "${SLURM_JOB_ID:?this is a batch script: submit it with sbatch or slurm/submit.sh}"
  mapfile -t all_nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  split_nodes
  count_ranks
  num_ranks=$((${#nodes[@]} * ranks_per_node))
  cpus_per_rank=$((SLURM_CPUS_ON_NODE / ranks_per_node))
  [ "$cpus_per_rank" -gt 0 ] || die 2 "$ranks_per_node ranks per node, but $SLURM_CPUS_ON_NODE CPUs; ask for more"
  restart=${SLURM_RESTART_COUNT:-0}

  export PYTHONPATH=$home${PYTHONPATH:+:$PYTHONPATH}
  export MASTER_ADDR=${MRL_HEAD_ADDRESS:-${nodes[0]}}
  # Below the range that systems hand out by themselves; another one for every job and attempt.
  export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 16 + restart) % 10000))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
  export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # models and data are paths; compute nodes should not ask the network
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
  # A hang then leaves a trace of every rank's last collectives instead of nothing.
  export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1} TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
  # Compilers' caches belong on the node: thousands of small files, and locks that shared file systems do badly.
  local cache=${MRL_LOCAL_DIR:-${TMPDIR:-/tmp}}/megatron_rl-$SLURM_JOB_ID
  export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton} VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$cache/vllm}
  export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
  export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$cache/flashinfer} # not in HOME, where its locks would be
  export TILELANG_CACHE_DIR=${TILELANG_CACHE_DIR:-$cache/tilelang} QUACK_CACHE_DIR=${QUACK_CACHE_DIR:-$cache/quack}
  export HUMMING_CACHE_DIR=${HUMMING_CACHE_DIR:-$cache/humming} HUMMING_TMP_DIR=${HUMMING_TMP_DIR:-$cache/humming-tmp}
  export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$cache/cuda}
  export DG_JIT_CACHE_DIR=${DG_JIT_CACHE_DIR:-$cache/deep_gemm} TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$cache/extensions}
  ulimit -n 65535 2>/dev/null || ulimit -n "$(ulimit -Hn)"
  use_container
}

# The last MRL_SERVER_NODES nodes run rollout servers, the others the learner's ranks.
split_nodes() {
  local servers=${MRL_SERVER_NODES:-0}
  [[ $servers =~ ^[0-9]+$ ]] || die 2 "MRL_SERVER_NODES=$servers: a number of nodes is wanted"
  [ "$servers" -lt "${#all_nodes[@]}" ] || die 2 "MRL_SERVER_NODES=$servers of ${#all_nodes[@]} nodes leaves none for the" \
    "learner; submit with more --nodes"
  nodes=("${all_nodes[@]:0:${#all_nodes[@]}-servers}")
  server_nodes=("${all_nodes[@]:${#nodes[@]}}")
}

list() { # list NODE…: as --nodelist takes them
  local IFS=,
  echo "$*"
}

# One rank per GPU. SLURM_GPUS_ON_NODE is the only one of its kind that is a plain number under every way to ask for
# GPUs. On exclusive nodes it also counts GPUs that nobody asked for, and those no step is given: so ask a step.
count_ranks() {
  local gpus
  # shellcheck disable=SC2016 # for the step's shell to expand
  gpus=$(srun --nodes=1 --ntasks=1 bash -c 'echo "${SLURM_GPUS_ON_NODE:-0}"')
  if [ "$gpus" -eq 0 ] && [ "${SLURM_GPUS_ON_NODE:-0}" -gt 0 ] && [ -z "${MRL_RANKS_PER_NODE:-}" ]; then
    die 2 "the job did not ask for the nodes' GPUs: submit with --gpus-per-node=$SLURM_GPUS_ON_NODE (or, for a run on" \
      "CPUs, set MRL_RANKS_PER_NODE)"
  fi
  ranks_per_node=${MRL_RANKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}
}

# One variable chooses: MRL_CONTAINER=IMAGE.sif (or a folder) is apptainer's, any other value pyxis's; unset: bare.
use_container() {
  container_srun=() container_run=()
  [ -n "${MRL_CONTAINER:-}" ] || return 0
  [[ $home$PWD != *[,:]* ]] || die 2 "$home, $PWD: a folder with a comma or colon cannot be mounted; rename it"
  local mounts="$home:$home,$PWD:$PWD${MRL_MOUNTS:+,$MRL_MOUNTS}"
  if [[ $MRL_CONTAINER == *.sif || -d $MRL_CONTAINER ]]; then
    container_run=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$MRL_CONTAINER")
  else
    container_srun=("--container-image=$MRL_CONTAINER" "--container-mounts=$mounts" "--container-workdir=$PWD")
    container_srun+=(--no-container-mount-home)
  fi
}

# `check` on one node, before anything costs GPU time: stops the job on a bad recipe. Sets run_dir and num_steps.
check_recipe() { # check_recipe RECIPE [--set a.b=c …]
  local report status=0
  report=$(srun --nodes=1 --ntasks=1 --cpus-per-task=1 "${container_srun[@]}" "${container_run[@]}" \
    "$MRL_PYTHON" -m megatron_rl check "$@" --ranks "$num_ranks") || status=$?
  [ "$status" -ne 2 ] || die 2 "bad recipe (above); nothing was started, not requeued"
  [ "$status" -eq 0 ] || die 1 "$MRL_PYTHON -m megatron_rl check ended with status $status (above); not requeued"
  printf '%s\n' "$report"
  # The line `run  N steps, M updates, into DIR` of the report (tests/slurm checks that it reads this way).
  num_steps=$(sed -nE 's/^ *run  ([0-9]+) steps, .*/\1/p' <<<"$report")
  run_dir=$(sed -nE 's/^ *run  [0-9]+ steps, .* updates, into (.*)$/\1/p' <<<"$report")
  [ -n "$run_dir" ] || die 1 "check did not say where the run goes"
  [[ $run_dir == /* ]] || run_dir=$PWD/$run_dir
}

# A folder for this attempt's logs, `latest` pointing at it, and what the attempt ran with.
open_attempt() { # open_attempt LABEL COMMAND…
  attempt=$run_dir/slurm/$1$SLURM_JOB_ID-$restart
  shift
  rm -rf "$attempt"
  mkdir -p "$attempt/status" "$attempt/preflight"
  ln -sfn "${attempt##*/}" "$run_dir/slurm/latest"
  {
    printf 'command: %s\n' "$*"
    printf 'nodes: %s\nranks: %s\nserver nodes: %s\n' "${nodes[*]}" "$num_ranks" "${server_nodes[*]:-none}"
    printf 'commit: %s\n' "$(git -C "$home" describe --always --dirty 2>/dev/null || echo unknown)"
    printf 'started: %s\n' "$(date --iso-8601=seconds)"
  } >"$attempt/about.txt"
  say "logs: $attempt"
}

# Every node says whether it can work; the job ends, naming those that cannot.
preflight() {
  local node bad=() said
  printf '%s\n' "$SLURM_JOB_ID-$restart" >"$attempt/preflight/canary"
  timeout "${MRL_PREFLIGHT_SECONDS:-300}" srun --nodes="${#all_nodes[@]}" --ntasks="${#all_nodes[@]}" --ntasks-per-node=1 \
    "${container_srun[@]}" "${container_run[@]}" \
    bash "$home/slurm/lib/preflight.sh" "$attempt/preflight" "$SLURM_JOB_ID-$restart" "$MRL_PYTHON" || true
  for node in "${all_nodes[@]}"; do
    said=$(cat "$attempt/preflight/$node" 2>/dev/null || echo "no answer, or it does not see the shared file system")
    [ "$said" = ok ] && continue
    bad+=("$node")
    say "preflight: $node: $said" >&2
  done
  [ "${#bad[@]}" -eq 0 ] || die 1 "preflight: bad nodes; submit again with --exclude=$(list "${bad[@]}")"
  say "preflight: ${#all_nodes[@]} nodes ok"
  preflight_network
}

# A small all_reduce over the links between the nodes; the job ends, naming the nodes that are slow or do not answer.
preflight_network() {
  local found=$attempt/preflight/network what node reason bad=()
  if [ "${#nodes[@]}" -eq 1 ] || [ "${MRL_NETWORK_MIB:-64}" -eq 0 ]; then return 0; fi
  timeout "${MRL_PREFLIGHT_SECONDS:-300}" \
    srun --nodes="${#nodes[@]}" --nodelist="$(list "${nodes[@]}")" --ntasks="${#nodes[@]}" --ntasks-per-node=1 \
    --output="$attempt/preflight/network-%t.log" \
    "${container_srun[@]}" "${container_run[@]}" \
    "$MRL_PYTHON" "$home/slurm/lib/network.py" "$attempt/preflight" "${nodes[@]}" || true
  [ -f "$found" ] || die 1 "preflight: network: ${nodes[0]} did not finish measuring; see $attempt/preflight/network-*.log"
  while read -r what node reason; do
    case $what in
      bad) bad+=("$node") && say "preflight: network: $node: $reason" >&2 ;;
      summary) say "preflight: network: $node $reason" ;;
    esac
  done <"$found"
  [ "${#bad[@]}" -eq 0 ] || die 1 "preflight: slow or unreachable nodes; submit again with --exclude=$(list "${bad[@]}")"
}

# One process per rank, in the background: sets srun_pid. Each rank logs to its own file and leaves its exit status.
launch() { # launch ARGUMENTS OF python -m megatron_rl
  "${within[@]}" srun --nodes="${#nodes[@]}" --nodelist="$(list "${nodes[@]}")" --ntasks="$num_ranks" \
    --ntasks-per-node="$ranks_per_node" --cpus-per-task="$cpus_per_rank" --kill-on-bad-exit=1 --output="$attempt/rank-%3t.log" \
    "${container_srun[@]}" "${container_run[@]}" \
    bash "$home/slurm/lib/rank.sh" "$attempt/status" "$MRL_PYTHON" -m megatron_rl "$@" &
  srun_pid=$!
  say "started $num_ranks ranks on ${nodes[*]}; progress: tail -f $attempt/rank-*0.log"
  say "a shell beside them: srun --jobid=$SLURM_JOB_ID --overlap --pty bash"
}

# Wait for the ranks (traps run meanwhile), then sets outcome: done | bad-input | ended | failed.
await_ranks() {
  local status_file statuses=()
  # A trapped signal ends `wait`, so wait until the process is really gone.
  while kill -0 "$srun_pid" 2>/dev/null; do wait "$srun_pid" || true; done
  for status_file in "$attempt"/status/*; do
    [ -f "$status_file" ] && statuses+=("$(cat "$status_file")")
  done
  # srun's own status is no guide: it is the peers' death by signal as soon as one rank leaves with an error.
  outcome="done"
  [ "${#statuses[@]}" -eq "$num_ranks" ] || outcome=failed
  [[ " ${statuses[*]} " =~ ^(\ 0)+\ $ ]] || outcome=failed
  [[ " ${statuses[*]} " != *" 3 "* ]] || outcome=ended
  [[ " ${statuses[*]} " != *" 2 "* ]] || outcome="bad-input"
  say "ranks ended: $outcome (exit statuses: ${statuses[*]:-none} of $num_ranks)"
}

show_last_lines() { # of the ranks that failed, or of the first
  local log shown=0 rank
  for log in "$attempt"/rank-*.log; do
    [ -f "$log" ] || continue
    rank=${log##*/rank-}
    rank=$((10#${rank%.log}))
    case $(cat "$attempt/status/$rank" 2>/dev/null || echo killed) in 0 | killed) continue ;; esac
    say "last lines of $log:"
    tail -n 15 "$log"
    shown=$((shown + 1))
    [ "$shown" -lt 2 ] || break
  done
}
