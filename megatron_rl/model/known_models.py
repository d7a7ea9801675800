"""Shapes of the checkpoints that recipes name, so that `plan` and `check --offline` work where none is at hand.

Each entry holds the keys of the checkpoint's own config.json that `read_architecture` reads, under the folder name that
the checkpoint has on the hub. Where the checkpoint is at hand, its config.json counts and this table is not looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.model.architecture import Architecture, architecture_from, read_architecture


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, tied: bool, longest: int = 32768) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


def _qwen2(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, tied: bool, longest: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 152064 if hidden > 3000 else 151936,
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_QWEN2_1_5B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
_LLAMA_3_2_3B = {
    "model_type": "llama",
    "num_hidden_layers": 28,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}

KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen3-30B-A3B-Base": {**_QWEN3_30B_A3B, "max_position_embeddings": 32768},
    "Qwen3-30B-A3B-Thinking-2507": {**_QWEN3_30B_A3B, "max_position_embeddings": 262144, "rope_theta": 1e7},
    "Qwen3-30B-A3B-Instruct-2507": {**_QWEN3_30B_A3B, "max_position_embeddings": 262144, "rope_theta": 1e7},
    "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, tied=True, longest=40960),
    "Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, tied=True, longest=40960),
    "Qwen3-4B": _qwen3(36, 2560, 9728, 32, tied=True, longest=40960),
    "Qwen3-8B": _qwen3(36, 4096, 12288, 32, tied=False, longest=40960),
    "Qwen3-14B": _qwen3(40, 5120, 17408, 40, tied=False, longest=40960),
    "Qwen3-32B": _qwen3(64, 5120, 25600, 64, tied=False, longest=40960),
    "Qwen2.5-0.5B-Instruct": _qwen2(24, 896, 4864, 14, 2, tied=True, longest=32768),
    "Qwen2.5-1.5B": _qwen2(28, 1536, 8960, 12, 2, tied=True, longest=131072),
    "Qwen2.5-1.5B-Instruct": _qwen2(28, 1536, 8960, 12, 2, tied=True, longest=32768),
    "Qwen2.5-3B": _qwen2(36, 2048, 11008, 16, 2, tied=True, longest=32768),
    "Qwen2.5-3B-Instruct": _qwen2(36, 2048, 11008, 16, 2, tied=True, longest=32768),
    "Qwen2.5-7B": _qwen2(28, 3584, 18944, 28, 4, tied=False, longest=131072),
    "Qwen2.5-7B-Instruct": _qwen2(28, 3584, 18944, 28, 4, tied=False, longest=32768),
    "Qwen3-4B-Base": _qwen3(36, 2560, 9728, 32, tied=True),
    "Qwen3-8B-Base": _qwen3(36, 4096, 12288, 32, tied=False),
    "Qwen3-14B-Base": _qwen3(40, 5120, 17408, 40, tied=False),
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        **_QWEN2_1_5B,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-Math-1.5B": {**_QWEN2_1_5B, "max_position_embeddings": 4096, "tie_word_embeddings": True},
    "OctoThinker-3B-Hybrid-Base": _LLAMA_3_2_3B,
}


HUB_ORGANIZATIONS = {"Qwen": "Qwen", "DeepSeek": "deepseek-ai", "OctoThinker": "OctoThinker"}  # by a name's beginning


def how_to_get(path: Path) -> str:
    """The command that downloads the checkpoint that ``path`` is named after; "" where the name is not known."""
    organization = next((o for start, o in HUB_ORGANIZATIONS.items() if path.name.startswith(start)), None)
    if path.name not in KNOWN_MODELS or organization is None:
        return ""
    name = f"{organization}/{path.name}"
    return f"hf download {name}" + ("" if str(path) == name else f" --local-dir {path}")


def shape_of(path: Path) -> tuple[Architecture, bool]:
    """The architecture of the checkpoint at ``path``, and whether it came from this table by the folder's name.

    Raises `InputError` where neither the checkpoint nor its name is known.
    """
    if (path / "config.json").is_file() or path.name not in KNOWN_MODELS:
        try:
            return read_architecture(path), False
        except InputError as error:
            if (path / "config.json").is_file():
                raise
            raise InputError(f"{error}; shapes known by folder name: {', '.join(KNOWN_MODELS)}") from error
    return architecture_from(KNOWN_MODELS[path.name]), True
