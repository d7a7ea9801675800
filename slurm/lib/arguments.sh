# shellcheck shell=bash
# shellcheck disable=SC2034 # a sourced file: what it sets is used elsewhere
# Sourced by submit.sh and by the batch scripts, which define `die`.

read_arguments() { # read_arguments train|eval ARGUMENT…: what follows the recipe. Sets the variables below
  local kind=$1 allowed="--smoke, --begin-from DIR"
  [ "$kind" = train ] || allowed="--checkpoint DIR, --output FILE"
  smoke='' begin_from='' checkpoint='' output='' settings=()
  shift
  while [ $# -gt 0 ]; do
    case $kind$1 in
      *--set=*) settings+=(--set "${1#--set=}") && shift && continue ;;
      train--smoke) smoke=1 && shift && continue ;;
      train--begin-from | eval--checkpoint | eval--output | *--set) [ -n "${2:-}" ] || die 2 "$1: a value comes after it" ;;
      *) die 2 "unknown argument $1; allowed after the recipe: $allowed, --set KEY.PATH=VALUE" ;;
    esac
    case $1 in
      --begin-from) begin_from=$2 ;;
      --checkpoint) checkpoint=$2 ;;
      --output) output=$2 ;;
      --set) settings+=(--set "$2") ;;
    esac
    shift 2
  done
  [ "$kind" = train ] || [ -d "${checkpoint:-/dev/null}" ] || die 2 "--checkpoint ${checkpoint:-(not given)}: no such \
folder; name RUN/checkpoints/step_… or a folder in Hugging Face layout"
}
