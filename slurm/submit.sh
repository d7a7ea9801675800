#!/usr/bin/env bash
# slurm/submit.sh [SBATCH OPTIONS] slurm/train.sbatch|slurm/eval.sbatch RECIPE [ARGUMENTS]
# Checks the recipe on this machine and submits only a good one, under the run's name, behind earlier jobs of that name
# (--dependency=singleton): submit twice, and the second continues where the first ran out of time.
set -euo pipefail
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  -h | --help)
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
options=() nodes='' gpus=''
die() {
  echo "${*:2}" >&2
  exit "$1"
}
while [ $# -gt 0 ] && [[ $1 != *.sbatch ]]; do
  options+=("$1")
  # Both spellings of sbatch: --nodes=4 and --nodes 4 (-N4, -N 4).
  case $1 in
    --nodes=* | --gpus-per-node=*) value=${1#*=} ;;
    --nodes | -N | --gpus-per-node) value=${2:-} ;;
    -N*) value=${1#-N} ;;
  esac
  case $1 in
    --nodes* | -N*) nodes=$value ;;
    --gpus-per-node*) gpus=${value##*:} ;; # a100:8 is 8
    --gres=gpu:*) gpus=${1##*:} ;;
  esac
  shift
done
script=${1:?the batch script: slurm/submit.sh [SBATCH OPTIONS] slurm/train.sbatch RECIPE}
recipe=${2:?the recipe (a YAML file) comes after the batch script}
shift 2
[ -r "$script" ] || die 2 "$script: no such file; the scripts are in $home/slurm"

if [ -n "${MRL_SITE:-}" ]; then # may set SBATCH_PARTITION, SBATCH_ACCOUNT and the like
  # shellcheck source=/dev/null
  source "$MRL_SITE"
fi
python=${MRL_SUBMIT_PYTHON:-${MRL_PYTHON:-$home/.venv/bin/python}}
command -v "$python" >/dev/null || die 2 "$python: not found here. Name a Python with pydantic, PyYAML and \
requirements.txt's other pure parts in MRL_SUBMIT_PYTHON, or use sbatch: the job then makes the same check"

# shellcheck source=slurm/lib/arguments.sh
source "$home/slurm/lib/arguments.sh"
kind=train
[[ $script != *eval.sbatch ]] || kind="eval"
read_arguments "$kind" "$@"
# shellcheck disable=SC2154 # set by read_arguments
[ -z "$begin_from" ] || [ -d "$begin_from" ] || die 2 "--begin-from $begin_from: no such folder"
servers=${MRL_SERVER_NODES:-0}
if [[ $script == *train_servers.sbatch ]]; then
  servers=${MRL_SERVER_NODES:-1}
  settings+=(--set rollout.engine=vllm_server --set rollout.servers.launch=0)
fi
asked=${SBATCH_GPUS_PER_NODE:-}
gpus=${gpus:-${asked##*:}}
per_node=${MRL_RANKS_PER_NODE:-$gpus}
[[ $per_node =~ ^([1-9][0-9]*)?$ ]] || die 2 "$per_node ranks per node (--gpus-per-node, MRL_RANKS_PER_NODE): a whole \
number is wanted"
ranks=() # known where both numbers are: one rank per GPU of the learner's nodes
if [[ $nodes =~ ^[0-9]+$ && $per_node =~ ^[0-9]+$ ]]; then
  [ "$nodes" -gt "$servers" ] || die 2 "--nodes $nodes: $servers are for servers (MRL_SERVER_NODES), none is left to learn"
  ranks=(--ranks $(((nodes - servers) * per_node)))
fi
report=$(PYTHONPATH=$home${PYTHONPATH:+:$PYTHONPATH} "$python" -m megatron_rl check "$recipe" "${settings[@]}" "${ranks[@]}")
if [ -n "$gpus" ] && lacks=$(grep '^ *on CUDA ' <<<"$report"); then
  die 2 "$recipe:$lacks"
fi
name=$(sed -nE 's/^ *run  [0-9]+ steps, .* updates, into (.*)$/\1/p' <<<"$report")
name=${name##*/}
[ "$kind" = train ] || name=$name-eval
submitted=$(sbatch --job-name="$name" --dependency=singleton "${options[@]}" "$script" "$recipe" "$@")
echo "$submitted"
scontrol show job "${submitted##* }" 2>/dev/null | sed -n 's/^ *StdOut=/log: /p' >&2 || true
