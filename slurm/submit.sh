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
options=()
while [ $# -gt 0 ] && [[ $1 != *.sbatch ]]; do
  options+=("$1")
  shift
done
script=${1:?the batch script: slurm/submit.sh [SBATCH OPTIONS] slurm/train.sbatch RECIPE}
recipe=${2:?the recipe (a YAML file) comes after the batch script}
shift 2

if [ -n "${MRL_SITE:-}" ]; then # may set SBATCH_PARTITION, SBATCH_ACCOUNT and the like
  # shellcheck source=/dev/null
  source "$MRL_SITE"
fi
python=${MRL_SUBMIT_PYTHON:-${MRL_PYTHON:-$home/.venv/bin/python}}
command -v "$python" >/dev/null || {
  echo "$python: not found here. Name a Python with pydantic, PyYAML and requirements.txt's other pure parts in" \
    "MRL_SUBMIT_PYTHON, or use sbatch: the job then makes the same check" >&2
  exit 2
}

settings=()
for ((i = 1; i <= $#; i++)); do
  case ${!i} in
    --set)
      next=$((i + 1))
      settings+=(--set "${!next:?--set needs KEY.PATH=VALUE}")
      ;;
    --set=*) settings+=("${!i}") ;;
  esac
done
report=$(PYTHONPATH=$home${PYTHONPATH:+:$PYTHONPATH} "$python" -m megatron_rl check "$recipe" "${settings[@]}")
name=$(sed -nE 's/^ *run  [0-9]+ steps, .* updates, into (.*)$/\1/p' <<<"$report")
name=${name##*/}
[[ $script != *eval.sbatch ]] || name=$name-eval
submitted=$(sbatch --job-name="$name" --dependency=singleton "${options[@]}" "$script" "$recipe" "$@")
echo "$submitted"
scontrol show job "${submitted##* }" 2>/dev/null | sed -n 's/^ *StdOut=/log: /p' >&2 || true
