# shellcheck shell=bash
# shellcheck disable=SC2154 # what job.sh and the batch script have set
# Sourced by train.sbatch where some of the job's nodes are for rollout servers.

# Servers in the background, each logging to its own file: sets servers_pid, and adds to settings how many ranks have to
# wait for. The token is made here for this attempt alone; it travels in the environment and is written nowhere.
launch_servers() { # launch_servers RECIPE
  local count per_node gpus_per_server=${MRL_GPUS_PER_SERVER:-1}
  # As many as there are GPUs for, as ranks on the other nodes; without GPUs, one.
  per_node=${MRL_SERVERS_PER_NODE:-$((ranks_per_node > gpus_per_server ? ranks_per_node / gpus_per_server : 1))}
  count=$((per_node * ${#server_nodes[@]}))
  MRL_SERVER_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
  export MRL_SERVER_TOKEN
  rm -rf "$run_dir/servers" # addresses of the attempt before
  settings+=(--set "rollout.servers.count=$count")
  srun --nodes="${#server_nodes[@]}" --nodelist="$(list "${server_nodes[@]}")" --ntasks="$count" \
    --ntasks-per-node="$per_node" --cpus-per-task="$((SLURM_CPUS_ON_NODE / per_node))" --kill-on-bad-exit=0 \
    --output="$attempt/server-%3t.log" "${container_srun[@]}" "${container_run[@]}" \
    bash "$home/slurm/lib/server.sh" "$gpus_per_server" "$MRL_PYTHON" -m megatron_rl serve "$1" "${settings[@]}" &
  servers_pid=$!
  say "started $count servers on ${server_nodes[*]}; logs: $attempt/server-*.log"
}

end_servers() {
  kill -TERM "$servers_pid" 2>/dev/null || true # srun passes it on
  while kill -0 "$servers_pid" 2>/dev/null; do wait "$servers_pid" || true; done
  say "servers ended"
}
