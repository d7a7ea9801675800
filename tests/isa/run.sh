#!/usr/bin/env bash
# The computing tests as other processors run them: without vector instructions, with AVX2 alone, with AVX-512 alone, on
# two threads, and with torch's deterministic kernels. `make test` itself runs them with what this processor has.
#
#     tests/isa/run.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python}
engine=tests/e2e/test_vllm_engine.py::TestSampling
files=(
    tests/isa
    tests/unit/support/test_rounding.py
    tests/unit/objective/test_aggregation.py
    tests/unit/objective/test_metrics.py
    tests/unit/learner/test_logprobs_fused_head.py
    tests/unit/exact/test_invariant.py
    tests/unit/learner/test_logprobs.py
    tests/unit/learner/test_packing.py
    tests/unit/layers
    tests/unit/rollout/test_cpu_engine_sampler.py
    tests/unit/rollout/test_weights_rounding.py
    "$engine::test_logprobs_and_routes_are_those_of_the_hf_model"
    tests/e2e/test_families.py
)
ranks=(tests/parallel/test_patch_checkpoint.py::test_resumed_training_equals_uninterrupted_training)
# torch's questions by which vLLM chooses a build of its kernels (AVX2, AVX-512, AVX-512 with bf16) are answered alike.
older=PYTEST_PLUGINS=tests.support.older_processor
# Each in force in the tests' process and, but for the threads, in the ranks that they start (test_bits.py sees to it).
# oneDNN left alone takes this processor's bf16 and int8 instructions too.
settings=(
    "$older ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE"
    "$older ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2"
    "$older ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512"
    "PYTEST_PLUGINS=tests.support.deterministic"
    "OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE" # waiting actively beside any other process is slow
)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
capability=$(env -u ATEN_CPU_CAPABILITY "$python" -c 'import torch; print(torch.backends.cpu.get_cpu_capability().lower())')

possible() { # number of the setting: whether this processor has what it asks for; says so where not
    case "${settings[$1]}" in
    *=avx512\ *) [[ $capability == avx512 ]] ;;
    *=avx2\ *) [[ $capability == avx* ]] ;;
    esac || {
        printf '== %s\nskipped: torch finds no more than %s on this processor\n' "${settings[$1]}" "$capability"
        return 1
    }
}

run() { # number of the setting
    local variables selected=("${files[@]}")
    [[ ${settings[$1]} == OMP_NUM_THREADS=* ]] || selected+=("${ranks[@]}") # ranks have one thread in any case
    read -ra variables <<<"${settings[$1]}"
    # Inductor's cache does not know ATEN_CPU_CAPABILITY: code made for one would be compiled for another.
    env TORCHINDUCTOR_CACHE_DIR="$work/inductor-$1" "${variables[@]}" \
        "$python" -m pytest -q -m "not slow" -p no:cacheprovider "${selected[@]}" >"$work/$1.log" 2>&1
}

failed=0
together() { # numbers of settings
    local i process
    declare -A started=()
    for i in "$@"; do
        possible "$i" || continue
        run "$i" &
        started[$i]=$!
    done
    for i in "$@"; do
        process=${started[$i]:-}
        [ -n "$process" ] || continue
        wait "$process" || failed=1
        echo "== ${settings[$i]}"
        cat "$work/$i.log"
    done
}

together 0 1 # two single-threaded ones at a time, as CI has two cores
together 2 3
together 4
exit "$failed"
