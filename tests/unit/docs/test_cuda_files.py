"""Every file that mentions CUDA is reached by a test that says how, or named in docs/limits.md."""

import re
from pathlib import Path

import megatron_rl

ROOT = Path(megatron_rl.__file__).parents[1]
REACHED = {
    "megatron_rl/checkpoint/save.py": "tests/unit/checkpoint/test_save.py",
    "megatron_rl/config/model.py": "tests/unit/config/test_config.py",
    "megatron_rl/config/rules.py": "tests/unit/config/test_config.py",
    "megatron_rl/commands/doctor.py": "tests/unit/doctor/test_command.py",
    "megatron_rl/doctor/collectives.py": "tests/unit/doctor/test_collectives.py",
    "megatron_rl/doctor/learner.py": "tests/unit/doctor/test_learner.py",
    "megatron_rl/doctor/memory.py": "tests/unit/doctor/test_engine.py",
    "megatron_rl/doctor/machine.py": "tests/unit/doctor/test_machine.py",
    "megatron_rl/doctor/setting.py": "tests/unit/doctor/test_command.py",
    "megatron_rl/learner/model.py": "tests/parallel/test_transformer_engine.py",
    "megatron_rl/learner/offload.py": "tests/unit/learner/test_offload.py",
    "megatron_rl/learner/optimizer.py": "tests/parallel/test_trace.py",
    "megatron_rl/learner/packed_attention.py": "tests/parallel/test_transformer_engine.py",
    "megatron_rl/learner/process_groups.py": "tests/parallel/test_trace.py",
    "megatron_rl/process/devices.py": "tests/unit/process/test_devices.py",
    "megatron_rl/rollout/engine_arguments.py": "tests/unit/rollout/test_engine_arguments.py",
    "megatron_rl/rollout/process_state.py": "tests/unit/rollout/test_vllm_on_cuda.py",
    "megatron_rl/rollout/servers/server.py": "tests/unit/rollout/test_vllm_on_cuda.py",
    "megatron_rl/rollout/servers/settings.py": "tests/unit/rollout/test_vllm_on_cuda.py",
    "megatron_rl/rollout/vllm_engine.py": "tests/unit/rollout/test_sleep.py",
    "megatron_rl/trace/fake_rank.py": "tests/parallel/test_trace.py",
    "megatron_rl/trace/learner.py": "tests/parallel/test_trace.py",
    "megatron_rl/trace/recorder.py": "tests/parallel/test_trace.py",
}


def test_files_that_mention_cuda_are_reached_or_named():
    pattern = re.compile(r"torch\.cuda|\bcuda\b")
    mention = {
        str(path.relative_to(ROOT)) for path in (ROOT / "megatron_rl").rglob("*.py") if pattern.search(path.read_text())
    }
    (line,) = re.findall(r"No test reaches what is for CUDA in ([^;]+);", (ROOT / "docs" / "limits.md").read_text())
    named = set(re.findall(r"`([^`]+)`", line))
    assert mention == REACHED.keys() | named
    assert not REACHED.keys() & named
    assert all((ROOT / test).is_file() for test in REACHED.values())
