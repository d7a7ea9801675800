"""Make the tiny Qwen3-MoE checkpoint and its data that ship in ``recipes/tiny``.

    python -m tools.dev.make_tiny_checkpoint --out recipes/tiny

writes ``model/`` (HF layout) and ``data/{train,validation}.jsonl`` (fields ``id``, ``problem``, ``answer``; no problem
is in both). The model is trained by imitation of deliberately imperfect demonstrations of the digit-sum task
(megatron_rl/rewards/rewarder.py) until it solves somewhat less than half of the held-out problems when sampled at
temperature 1, which leaves reinforcement learning something to do. The tool fails where that accuracy is outside
``--accept``. Everything follows from ``--seed`` on one thread; another processor or torch version may round
differently.

Tests import ``build_tiny_config`` and ``build_tokenizer`` to make smaller, dense or random models of the same kind.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.rewards.rewarder import ANSWER_MARK, modsum_reward

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
FIRST_CHAR_ID = 3
VOCAB_SIZE = 128  # Megatron pads vocabularies to a multiple of 128, so a smaller one would save nothing
CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"
MAX_POSITIONS = 2048

# name -> widths. Heads divide by TP 2, experts by EP 4, layers by PP 2 in every one.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "experts": 8, "expert_width": 64},
    "nano": {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "experts": 4, "expert_width": 32},
}
CLASSES = {
    "qwen3_moe": "Qwen3MoeConfig",
    "qwen2_moe": "Qwen2MoeConfig",
    "glm4_moe": "Glm4MoeConfig",
    "deepseek_v3": "DeepseekV3Config",
    "bailing_moe": "BailingMoeConfig",
    "olmoe": "OlmoeConfig",
    "gpt_oss": "GptOssConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
    "qwen3": "Qwen3Config",
    "qwen2": "Qwen2Config",
    "llama": "LlamaConfig",
}
FAMILIES = tuple(CLASSES)


@dataclass(frozen=True)
class ModsumProblem:
    """One problem. Example: ``ModsumProblem(digits=(2, 4, 1, 3), base=5)`` reads ``^2413=`` and its answer is ``0``."""

    digits: tuple[int, ...]
    base: int = 5

    @property
    def text(self) -> str:
        return "^" + "".join(str(digit) for digit in self.digits) + "="

    @property
    def answer(self) -> str:
        return str(sum(self.digits) % self.base)


def make_problem(rng: random.Random, *, min_digits: int = 3, max_digits: int = 7, base: int = 5) -> ModsumProblem:
    """Draw a problem: its number of digits uniformly from ``min_digits … max_digits``, then each digit uniformly."""
    num_digits = rng.randint(min_digits, max_digits)
    return ModsumProblem(digits=tuple(rng.randrange(base) for _ in range(num_digits)), base=base)


def make_demonstration(rng: random.Random, problem: ModsumProblem, *, think_prob: float, slip_prob: float) -> str:
    """Write a response to imitate, not always a right one.

    With probability ``think_prob`` it works step by step, and then each running sum after the first is replaced with
    probability ``slip_prob`` by another digit, from which the later sums go on, as after a real mistake. Otherwise it
    answers at once, correctly.
    """
    if rng.random() >= think_prob:
        return ANSWER_MARK + problem.answer
    running, steps = 0, []
    for position, digit in enumerate(problem.digits):
        running = (running + digit) % problem.base
        if position > 0 and rng.random() < slip_prob:
            running = (running + rng.randrange(1, problem.base)) % problem.base
        steps.append(f"{digit}{running}")
    return "".join(steps) + ANSWER_MARK + str(running)


def build_tiny_config(family: str = "qwen3_moe", size: str = "tiny", **overrides: Any):
    """A transformers config of ``family`` at ``size``; ``overrides`` are set last, in the config's own key names.

    The initial standard deviation is 0.06: at the usual 0.02 a network this narrow stays at chance on the task.
    """
    import transformers

    from megatron_rl.model import transformers_classes

    transformers_classes.register()
    widths = SIZES[size]
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": widths["hidden"],
        "intermediate_size": 2 * widths["hidden"],
        "num_hidden_layers": widths["layers"],
        "num_attention_heads": widths["heads"],
        "num_key_value_heads": widths["kv_heads"],
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "initializer_range": 0.06,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    if family not in ("qwen2", "qwen2_moe", "olmoe"):  # their head width always is hidden / heads
        common["head_dim"] = widths["head_dim"]
    if family in ("qwen3_moe", "qwen2_moe"):
        common |= {
            "moe_intermediate_size": widths["expert_width"],
            "num_experts": widths["experts"],
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        }
    if family == "qwen2_moe":
        common |= {"shared_expert_intermediate_size": 2 * widths["expert_width"], "norm_topk_prob": False}
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        common |= {  # vLLM's delta net on CPUs takes heads of 64 or 128 numbers alone
            "moe_intermediate_size": widths["expert_width"],
            "shared_expert_intermediate_size": 2 * widths["expert_width"],
            "num_experts": widths["experts"],
            "num_experts_per_tok": 2,
            "linear_num_key_heads": widths["kv_heads"],
            "linear_num_value_heads": widths["heads"],
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": ["full_attention" if i % 2 else "linear_attention" for i in range(widths["layers"])],
        }
    if family == "olmoe":
        common |= {
            "intermediate_size": widths["expert_width"],
            "num_experts": widths["experts"],
            "num_experts_per_tok": 2,
        }
    if family == "glm4_moe":
        common |= {
            "moe_intermediate_size": widths["expert_width"],
            "n_routed_experts": widths["experts"],
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
            "num_nextn_predict_layers": 0,
        }
    if family == "deepseek_v3":
        del common["head_dim"]
        common |= {
            "num_key_value_heads": widths["heads"],
            "moe_intermediate_size": widths["expert_width"],
            "n_routed_experts": widths["experts"],
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 1.5,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "num_nextn_predict_layers": 0,
        }
    if family == "bailing_moe":
        common |= {
            "num_experts": 2 * widths["experts"],
            "num_experts_per_tok": 4,
            "moe_intermediate_size": widths["expert_width"],
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
        }
    if family == "gpt_oss":
        common |= {
            "intermediate_size": widths["expert_width"],
            "num_local_experts": widths["experts"],
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        }
    made = getattr(transformers, CLASSES[family], None) or getattr(transformers_classes, CLASSES[family])
    return made(**common | overrides)


def build_model(config: Any, seed: int = 0):
    """A randomly initialised fp32 causal LM of ``config`` (seeded)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def build_tokenizer():
    """One token per printable ASCII character; ``<bos>`` in front, nothing behind; other characters become pad."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}
    vocabulary |= {character: FIRST_CHAR_ID + index for index, character in enumerate(CHARACTERS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()  # without it characters would be joined by spaces
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def save_checkpoint(model: Any, out: Path) -> None:
    """Write model, tokenizer and generation settings in HF layout."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=True, temperature=1.0
    )
    model.save_pretrained(out)
    build_tokenizer().save_pretrained(out)


def make_splits(
    num_train: int, num_validation: int, seed: int, digits: Sequence[int] = (3, 7)
) -> tuple[list[ModsumProblem], list[ModsumProblem]]:
    """Distinct problems of at least ``digits[0]`` and at most ``digits[1]`` digits, dealt to the two splits at random
    so that both have the same mix of lengths."""
    rng = random.Random(f"splits {seed}")
    problems: dict[str, ModsumProblem] = {}
    while len(problems) < num_train + num_validation:
        problem = make_problem(rng, min_digits=digits[0], max_digits=digits[1])
        problems.setdefault(problem.text, problem)
    dealt = list(problems.values())
    rng.shuffle(dealt)
    return dealt[num_validation:], dealt[:num_validation]


def write_jsonl(problems: list[ModsumProblem], split: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"id": f"{split}-{row:04d}", "problem": problem.text, "answer": problem.answer}
        for row, problem in enumerate(problems)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def demonstration_batch(rng: random.Random, tokenizer: Any, held_out: set[str], args: argparse.Namespace):
    """``args.batch_size`` problems with demonstrations: tokens [B, T] int64, labels [B, T], -100 off the response."""
    rows = []
    while len(rows) < args.batch_size:
        problem = make_problem(rng, min_digits=args.digits[0], max_digits=args.digits[1])
        if problem.text not in held_out:
            response = make_demonstration(rng, problem, think_prob=args.think_prob, slip_prob=args.slip_prob)
            rows.append((tokenizer.encode(problem.text), tokenizer.encode(response, add_special_tokens=False)))
    length = max(len(prompt) + len(response) + 1 for prompt, response in rows)
    tokens = torch.full((len(rows), length), PAD_ID)
    labels = torch.full((len(rows), length), -100)
    for row, (prompt, response) in enumerate(rows):
        sequence = torch.tensor([*prompt, *response, EOS_ID])
        tokens[row, : len(sequence)] = sequence
        labels[row, len(prompt) : len(sequence)] = sequence[len(prompt) :]
    return tokens, labels


def warm_up(model: Any, tokenizer: Any, held_out: set[str], args: argparse.Namespace) -> None:
    """Imitation by AdamW; linear warm-up over 50 steps, then cosine to a tenth. Padding is on the right, so causality
    alone keeps it away from real tokens and no attention mask is needed."""
    rng = random.Random(f"warm-up {args.seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def lr_scale(step: int) -> float:
        progress = min(1.0, max(0.0, (step - 50) / max(1, args.steps - 50)))
        return min(1.0, (step + 1) / 50) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_scale)
    model.train()
    for step in range(args.steps):
        tokens, labels = demonstration_batch(rng, tokenizer, held_out, args)
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def sample_responses(model: Any, tokenizer: Any, prompts: list[str], max_new_tokens: int, seed: int) -> list[str]:
    """One response to each prompt at temperature 1."""
    torch.manual_seed(seed)
    encoded = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**encoded, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max_new_tokens)
    return tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)


def accuracy(
    model: Any, tokenizer: Any, problems: list[ModsumProblem], num_samples: int, max_new_tokens: int = 24
) -> tuple[float, float]:
    """Mean reward and mean length in characters over ``num_samples`` responses to each problem."""
    model.eval()
    rewards, lengths = [], []
    for sample in range(num_samples):
        prompts = [problem.text for problem in problems]
        responses = sample_responses(model, tokenizer, prompts, max_new_tokens, seed=sample)
        rewards += [modsum_reward(response, problem.answer) for response, problem in zip(responses, problems)]
        lengths += [len(response) for response in responses]
    return sum(rewards) / len(rewards), sum(lengths) / len(lengths)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("recipes/tiny"), help="folder that gets model/ and data/")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_moe", help="architecture")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny", help="widths of the network")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, initial weights and demonstrations")
    parser.add_argument("--steps", type=int, default=600, help="imitation steps; 0 saves random weights")
    parser.add_argument("--batch-size", type=int, default=64, help="demonstrations a step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--think-prob", type=float, default=0.62, help="share of step-by-step demonstrations")
    parser.add_argument("--slip-prob", type=float, default=0.1, help="probability of a wrong running sum")
    parser.add_argument(
        "--digits", type=int, nargs=2, default=(3, 7), metavar=("LEAST", "MOST"), help="digits of a problem"
    )
    parser.add_argument("--max-response", type=int, default=24, help="longest response in tokens when measuring")
    parser.add_argument("--num-train", type=int, default=2048, help="training problems")
    parser.add_argument("--num-validation", type=int, default=256, help="held-out problems")
    parser.add_argument("--samples", type=int, default=8, help="responses to each held-out problem when measuring")
    parser.add_argument("--accept", type=float, nargs=2, default=(0.38, 0.47), help="accuracy range that is saved")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    train, validation = make_splits(args.num_train, args.num_validation, args.seed, args.digits)
    tokenizer = build_tokenizer()
    model = build_model(build_tiny_config(args.family, args.size), args.seed)
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    start = time.process_time()
    warm_up(model, tokenizer, {problem.text for problem in validation}, args)
    print(f"warm-up: {time.process_time() - start:.0f} CPU s")
    reward, length = accuracy(model, tokenizer, validation, args.samples, args.max_response)
    print(f"held-out accuracy at temperature 1: {reward:.3f}, mean response length {length:.1f} characters")
    if args.steps and not args.accept[0] <= reward <= args.accept[1]:
        print(f"nothing written: accuracy is outside {args.accept}; change --steps, --think-prob or --seed")
        return 1
    save_checkpoint(model, args.out / "model")
    write_jsonl(train, "train", args.out / "data" / "train.jsonl")
    write_jsonl(validation, "validation", args.out / "data" / "validation.jsonl")
    print(f"wrote {args.out / 'model'} and {args.out / 'data'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
