#!/usr/bin/env bash
# The computing tests as other processors run them: without vector instructions, with AVX2 alone, on two threads, and
# with torch's deterministic kernels. `make test` itself runs them with what this processor has.
#
#     tests/isa/run.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python}
engine=tests/e2e/test_vllm_engine.py::TestSampling
files=(
    tests/isa
    tests/unit/support
    tests/unit/objective/test_aggregation.py
    tests/unit/objective/test_metrics.py
    tests/unit/learner/test_fused_head.py
    tests/unit/learner/test_invariant.py
    tests/unit/learner/test_logprobs.py
    tests/unit/learner/test_packing.py
    tests/unit/rollout/test_cpu_sampler.py
    "$engine::test_logprobs_and_routes_are_those_of_the_hf_model"
)
settings=(
    "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE"
    "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2"
    "PYTEST_PLUGINS=tests.support.deterministic"
    "OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE" # waiting actively beside any other process is slow
)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

run() { # number of the setting
    local variables
    read -ra variables <<<"${settings[$1]}"
    # Inductor's cache does not know ATEN_CPU_CAPABILITY: code made for one would be compiled for another.
    env TORCHINDUCTOR_CACHE_DIR="$work/inductor-$1" "${variables[@]}" \
        "$python" -m pytest -q -p no:cacheprovider "${files[@]}" >"$work/$1.log" 2>&1
}

report() { # number of the setting, its process
    wait "$2" || failed=1
    echo "== ${settings[$1]}"
    cat "$work/$1.log"
}

failed=0
run 0 &
first=$!
run 1 & # two single-threaded ones at a time, as CI has two cores
second=$!
report 0 "$first"
report 1 "$second"
for i in 2 3; do
    run "$i" &
    report "$i" $!
done
exit "$failed"
