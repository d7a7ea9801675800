"""Keys of verl, slime and NeMo-RL beside ours: one table for translations, for hints in messages, and for docs.

Names were read from the sources of `READ_FROM`. A row of `TABLE` begins with our key and with how the value becomes
ours; a cell for each project follows, a line that begins with a blank goes on with the row above. In a cell stand the
keys of which the first that is set counts, and after = the project's default. How a value becomes ours is a name of
`instruments.translate.translation.CONVERSIONS`, or, after @, the name under which the code of
`instruments.translate.rules` reads it, because it depends on other keys. To add a key, add it to a cell or add a row.

`WITHOUT` has the keys that have no counterpart: what changes without them, and patterns of the keys of each project,
of which the first that fits counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_rl.config.yaml12 import parse

READ_FROM = {
    "verl": ("0.10.0.dev", "1dda039b9c63", "2026-08-22"),
    "slime": ("0.3.1", "624b824a898a", "2026-08-21"),
    "NeMo-RL": ("0.6.0", "7ea279abfbeb", "2026-08-22"),
}
"""Version, commit and its date."""

PROJECTS = tuple(READ_FROM)
SHORT = {
    "verl": {
        "rollout": "actor_rollout_ref.rollout",
        "model": "actor_rollout_ref.model",
        "actor": "actor_rollout_ref.actor",
        "mcore": "actor_rollout_ref.actor.megatron",
        "own": "actor_rollout_ref.actor.megatron.override_transformer_config",
        "corr": "algorithm.rollout_correction",
    },
    "slime": {},
    "NeMo-RL": {
        "mcore": "policy.megatron_cfg",
        "fsdp": "policy.dtensor_cfg",
        "gen": "policy.generation",
        "vllm": "policy.generation.vllm_cfg",
    },
}
"""Beginnings of keys as the table writes them, in full."""

TABLE = """
name @name                           | trainer.experiment_name | --wandb-group |
name @nodes                          | trainer.nnodes=1 | --actor-num-nodes=1 | cluster.num_nodes=1
name @gpus                           | trainer.n_gpus_per_node=8 | --actor-num-gpus-per-node=8 | cluster.gpus_per_node=8
seed int                             | | --seed=1234 | grpo.seed=42
run_root text                        | trainer.default_local_dir | --save | checkpointing.checkpoint_dir
num_steps @steps                     | trainer.total_training_steps | --num-rollout | grpo.max_num_steps
num_epochs @epochs                   | trainer.total_epochs=30 | --num-epoch | grpo.max_num_epochs=1

model.path @model                    | model.path | --hf-checkpoint | policy.model_name
- @begins_from                       | trainer.resume_mode | --load |
data.train @train                    | data.train_files=~/data/rlhf/gsm8k/train.parquet | --prompt-data
    | data.train data.train.data_path data.train.dataset_name
data.train @prompt_key               | data.prompt_key | --input-key=input | data.train.input_key
data.train @answer_key               | | --label-key | data.train.output_key
data.validation @validation          | data.val_files=~/data/rlhf/gsm8k/test.parquet | --eval-prompt-data
    | data.validation data.validation.data_path data.validation.dataset_name
data.validation @val_prompt_key      | | | data.validation.input_key
data.validation @val_answer_key      | | | data.validation.output_key
data.shuffle same                    | data.shuffle=true | --rollout-shuffle=false | data.shuffle=true
data.seed int                        | data.seed | --rollout-seed=42 | grpo.seed=42
data.prompt.chat_template @template  | | --apply-chat-template=false |
data.prompt.chat_template_args same  | data.apply_chat_template_kwargs | --apply-chat-template-kwargs
    | policy.tokenizer.chat_template_kwargs
data.prompt.max_length @prompt       | data.max_prompt_length=512 | --rollout-max-prompt-len | data.max_input_seq_length
data.prompt.overlong @overlong       | data.filter_overlong_prompts=false | |
data.prompt.overlong @truncation     | data.truncation=error | |
rollout.max_response_length @response| data.max_response_length=512 | --rollout-max-response-len | gen.max_new_tokens
rollout.max_response_length @total   | | --rollout-max-context-len | policy.max_total_sequence_length

batch.prompts int                    | data.train_batch_size=1024 | --rollout-batch-size=32
    | grpo.num_prompts_per_step=32
rollout.num_samples int              | rollout.n=1 | --n-samples-per-prompt=1 | grpo.num_generations_per_prompt=16
batch.minibatches @updates           | | --num-steps-per-rollout |
batch.minibatches @update_size       | actor.ppo_mini_batch_size=256 | --global-batch-size
    | policy.train_global_batch_size
batch.filter_groups @filter          | algorithm.filter_groups.enable | --dynamic-sampling-filter-path
    | grpo.use_dynamic_sampling
batch.filter_metric @filter_metric   | algorithm.filter_groups.metric | |
batch.max_generations @rounds        | algorithm.filter_groups.max_num_gen_batches |
    | grpo.dynamic_sampling_max_gen_batches=10
batch.generation_prompts @asked      | data.gen_batch_size | --over-sampling-batch-size |
batch.generation_prompts @times      | | | grpo.batch_multiplier

reward.name @reward_file             | custom_reward_function.path reward.custom_reward_function.path
    | --custom-rm-path |
reward.name @reward_function         | custom_reward_function.name reward.custom_reward_function.name | |
reward.name @reward_kind             | | --rm-type | data.train.env_name data.default.env_name
reward.overlong.buffer @has_buffer   | reward_model.reward_kwargs.overlong_buffer_cfg.enable
    reward.reward_kwargs.overlong_buffer_cfg.enable | | grpo.reward_shaping.enabled
reward.overlong.buffer @buffer       | reward_model.reward_kwargs.overlong_buffer_cfg.len
    reward.reward_kwargs.overlong_buffer_cfg.len | | grpo.reward_shaping.overlong_buffer_length=128
reward.overlong.penalty @penalty     | reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
    reward.reward_kwargs.overlong_buffer_cfg.penalty_factor | | grpo.reward_shaping.overlong_buffer_penalty=1.0
reward.mask_truncated true           | | | grpo.overlong_filtering

rollout.engine @engine               | rollout.name=vllm | | gen.backend=vllm
rollout.engine @colocated            | | --colocate=false | gen.colocated.enabled=true
rollout.servers.count @server_gpus   | | --rollout-num-gpus | gen.colocated.resources.gpus_per_node
rollout.servers.count @server_nodes  | | | gen.colocated.resources.num_nodes
rollout.max_staleness @ahead         | | train_async.py | grpo.async_grpo.enabled
rollout.max_staleness @age           | | | grpo.async_grpo.max_trajectory_age_steps=1
rollout.in_flight.mode @in_flight    | | | grpo.async_grpo.in_flight_weight_updates
rollout.in_flight.mode @anew         | | | grpo.async_grpo.recompute_kv_cache_after_weight_updates
rollout.temperature float            | rollout.temperature=1.0 | --rollout-temperature=1.0 | gen.temperature=1.0
rollout.top_p float                  | rollout.top_p=1 | --rollout-top-p=1.0 | gen.top_p=1.0
rollout.top_k count                  | rollout.top_k=-1 | --rollout-top-k=-1 | gen.top_k=0
rollout.tensor_parallel @engine_ranks| rollout.tensor_model_parallel_size=2 | --rollout-num-gpus-per-engine=1
    | vllm.tensor_parallel_size=1
rollout.gpu_memory_utilization float | rollout.gpu_memory_utilization=0.5 | --sglang-mem-fraction-static
    | vllm.gpu_memory_utilization=0.6
rollout.max_num_seqs int             | rollout.max_num_seqs=256 | --sglang-max-running-requests
    | vllm.max_num_seqs gen.vllm_kwargs.max_num_seqs
rollout.max_num_batched_tokens int   | rollout.max_num_batched_tokens |
    | vllm.max_num_batched_tokens gen.vllm_kwargs.max_num_batched_tokens
rollout.enforce_eager same           | rollout.enforce_eager | | vllm.enforce_eager
rollout.seed int                     | rollout.seed | |
rollout.quantization.weights fp8     | rollout.quantization | | vllm.precision
rollout.quantization.kv_cache fp8    | | | vllm.kv_cache_dtype

objective.advantage @estimator       | algorithm.adv_estimator=gae | --advantage-estimator=grpo
    | grpo.adv_estimator.name=grpo
objective.advantage @by_std          | algorithm.norm_adv_by_std_in_grpo=true |
    | grpo.adv_estimator.normalize_rewards grpo.normalize_rewards=true
objective.advantage @without_std     | | --disable-grpo-std-normalization |
objective.advantage @without_mean    | | --disable-rewards-normalization |
objective.advantage @whiten          | | --normalize-advantages |
objective.advantage @leave_one_out   | |
    | grpo.adv_estimator.use_leave_one_out_baseline grpo.use_leave_one_out_baseline=true
objective.advantage @minus_baseline  | | | grpo.adv_estimator.minus_baseline
objective.policy_term.name @loss     | actor.policy_loss.loss_mode=vanilla | |
objective.policy_term.name @loss_type| corr.loss_type=ppo_clip | |
objective.policy_term.name @gspo     | | | loss_fn.sequence_level_importance_ratios
objective.policy_term.name @cispo    | | | loss_fn.use_cispo
objective.policy_term.name @reinforce| | | loss_fn.disable_ppo_ratio
objective.policy_term.clip_low @low  | actor.clip_ratio_low=0.2 | --eps-clip=0.2 | loss_fn.ratio_clip_min=0.2
objective.policy_term.clip_high @high| actor.clip_ratio_high=0.2 | --eps-clip-high | loss_fn.ratio_clip_max=0.2
objective.policy_term.dual_clip @dual| actor.clip_ratio_c=3.0 | --eps-clip-c | loss_fn.ratio_clip_c
objective.policy_term.tau_positive @tau_positive | actor.policy_loss.tau_pos actor.tau_pos=1.0 | |
objective.policy_term.tau_negative @tau_negative | actor.policy_loss.tau_neg actor.tau_neg=1.05 | |
objective.aggregation @aggregation   | actor.loss_agg_mode=token-mean | |
objective.aggregation @by_token      | | --calculate-per-token-loss=false | loss_fn.token_level_loss=true
objective.score_centering @centered  | | | loss_fn.score_centering
objective.max_response_length @norm  | actor.loss_scale_factor | |
objective.entropy_bonus float        | actor.entropy_coeff=0 | --entropy-coef=0.0 |
objective.kl_loss @kl_loss           | actor.use_kl_loss | --use-kl-loss |
objective.kl_loss.coef @kl_coefficient | actor.kl_loss_coef=0.001 | --kl-loss-coef
    | loss_fn.reference_policy_kl_penalty=0.01
objective.kl_loss.type @kl_type      | actor.kl_loss_type=low_var_kl | --kl-loss-type=k1
    | loss_fn.reference_policy_kl_type=k3
objective.kl_loss.cap @kl_cap        | | | loss_fn.kl_output_clamp_value=10.0
objective.kl_loss.unbiased @kl_weighed | | --use-unbiased-kl | loss_fn.use_on_policy_kl_approximation
objective.kl_in_reward @kl_in_reward | algorithm.use_kl_in_reward | | loss_fn.use_kl_in_reward
objective.kl_in_reward.coef @kl_of_reward | algorithm.kl_ctrl.kl_coef=0.001 | --kl-coef |
objective.kl_in_reward.type @kl_reward_type | algorithm.kl_penalty=kl | |
- @kl_controller                     | algorithm.kl_ctrl.type=fixed | |
objective.anchor @bypass             | corr.bypass_mode | --use-rollout-logprobs |
objective.correction @weighs         | corr.rollout_is | --use-tis | loss_fn.use_importance_sampling_correction
objective.correction @bound          | corr.rollout_is_threshold=2.0 | --tis-clip=2.0
    | loss_fn.truncated_importance_sampling_ratio
objective.correction @least          | | --tis-clip-low=0.0 | loss_fn.truncated_importance_sampling_ratio_min
objective.correction @weight         | | --custom-tis-function-path | loss_fn.truncated_importance_sampling_type
objective.correction @normalize      | corr.rollout_is_batch_normalize | |
objective.correction @token_cap      | actor.tis_imp_ratio_cap | |
objective.correction @rejects        | corr.rollout_rs | |
objective.correction @rejects_at     | corr.rollout_rs_threshold | |
objective.correction @opsm           | | --use-opsm |
objective.correction @opsm_delta     | | --opsm-delta=1e-4 |
routing.replay replay                | actor.router_replay.mode mcore.router_replay.mode | |
routing.replay r2                    | | --use-routing-replay |
routing.replay r3                    | rollout.enable_rollout_routing_replay | --use-rollout-routing-replay
    | policy.router_replay.enabled

learner.optimizer.lr float           | actor.optim.lr=1e-6 | --lr=1e-6 | mcore.optimizer.lr policy.optimizer.kwargs.lr
learner.optimizer.beta1 first        | actor.optim.betas=[0.9,0.999] | --adam-beta1=0.9
    | mcore.optimizer.adam_beta1 policy.optimizer.kwargs.betas
learner.optimizer.beta2 second       | actor.optim.betas=[0.9,0.999] | --adam-beta2=0.999
    | mcore.optimizer.adam_beta2 policy.optimizer.kwargs.betas
learner.optimizer.eps float          | | --adam-eps=1e-8 | mcore.optimizer.adam_eps policy.optimizer.kwargs.eps
learner.optimizer.weight_decay float | actor.optim.weight_decay=0.01 | --weight-decay=0.01
    | mcore.optimizer.weight_decay policy.optimizer.kwargs.weight_decay
learner.optimizer.clip_grad float    | actor.optim.clip_grad=1.0 actor.grad_clip | --clip-grad=1.0
    | mcore.optimizer.clip_grad policy.max_grad_norm=1.0
schedule.warmup_steps @warmup        | actor.optim.lr_warmup_steps | --lr-warmup-iters
    | mcore.scheduler.lr_warmup_iters policy.scheduler.LinearLR.total_iters
schedule.warmup_steps @warmup_share  | actor.optim.lr_warmup_steps_ratio | --lr-warmup-fraction |
schedule.warmup_from @warmup_from    | actor.optim.lr_warmup_init | --lr-warmup-init | mcore.scheduler.lr_warmup_init
schedule.warmup_from @warmup_factor  | | | policy.scheduler.LinearLR.start_factor
schedule.style @style                | actor.optim.warmup_style actor.optim.lr_scheduler_type actor.optim.lr_decay_style
    | --lr-decay-style=linear | mcore.scheduler.lr_decay_style
schedule.decay_steps @decay          | actor.optim.lr_decay_steps | --lr-decay-iters | mcore.scheduler.lr_decay_iters
schedule.min_lr @min_lr              | actor.optim.min_lr=0.0 | --min-lr=0.0 | mcore.optimizer.min_lr=0.0
schedule.min_lr @min_lr_ratio        | actor.optim.min_lr_ratio | |

learner.parallel.tensor @tensor      | mcore.tensor_model_parallel_size=1 | --tensor-model-parallel-size=1
    | mcore.tensor_model_parallel_size=1
learner.parallel.tensor @fsdp_tensor | | | fsdp.tensor_parallel_size
learner.parallel.pipeline int        | mcore.pipeline_model_parallel_size=1 | --pipeline-model-parallel-size=1
    | mcore.pipeline_model_parallel_size=1
learner.parallel.context int         | mcore.context_parallel_size=1 | --context-parallel-size=1
    | mcore.context_parallel_size=1 fsdp.context_parallel_size
learner.parallel.expert @expert      | mcore.expert_model_parallel_size=1 | --expert-model-parallel-size=1
    | mcore.expert_model_parallel_size=1
learner.parallel.expert_tensor @expert_tensor | mcore.expert_tensor_parallel_size | --expert-tensor-parallel-size
    | mcore.expert_tensor_parallel_size
learner.token_dispatcher @dispatcher | own.moe_token_dispatcher_type | --moe-token-dispatcher-type
    | mcore.moe_token_dispatcher_type
learner.token_dispatcher @deepep     | own.moe_enable_deepep | --moe-enable-deepep | mcore.moe_enable_deepep
precision.fp32_router @router_type   | own.moe_router_dtype | --moe-router-dtype | mcore.moe_router_dtype
learner.recompute @recomputes        | model.enable_gradient_checkpointing=true |
    | mcore.activation_checkpointing fsdp.activation_checkpointing
learner.recompute @recompute         | own.recompute_granularity | --recompute-granularity
    | mcore.recompute_granularity=full
learner.offload.weights true         | mcore.param_offload actor.fsdp_config.param_offload | | fsdp.cpu_offload
learner.offload.optimizer true       | mcore.optimizer_offload actor.fsdp_config.optimizer_offload | | fsdp.cpu_offload
learner.offload.gradients true       | mcore.grad_offload | |
learner.offload.weights @aside       | | --no-offload-train |
learner.offload.optimizer true       | actor.optim.override_optimizer_config.optimizer_cpu_offload
    | --optimizer-cpu-offload | mcore.optimizer.optimizer_cpu_offload
learner.offload.during_passes true   | actor.optim.override_optimizer_config.optimizer_cpu_offload
    | --optimizer-cpu-offload | mcore.optimizer.optimizer_cpu_offload
learner.max_tokens_per_microbatch @tokens | actor.ppo_max_token_len_per_gpu=16384 | --max-tokens-per-gpu
    | policy.sequence_packing.train_mb_tokens policy.dynamic_batching.train_mb_tokens
learner.max_tokens_per_microbatch @sequences | actor.ppo_micro_batch_size_per_gpu | --micro-batch-size=1
    | policy.train_micro_batch_size=1
learner.max_tokens_per_microbatch @by_tokens | actor.use_dynamic_bsz | --use-dynamic-batch-size
    | policy.sequence_packing.enabled policy.dynamic_batching.enabled
learner.fused_head true              | model.use_fused_kernels | | mcore.use_fused_linear_logprobs
learner.dtype fp16                   | | --fp16 |
learner.lora.rank @rank              | model.lora_rank model.lora.rank | | mcore.peft.dim fsdp.lora_cfg.dim
learner.lora.alpha @alpha            | model.lora_alpha model.lora.alpha | | mcore.peft.alpha fsdp.lora_cfg.alpha

checkpoint.every count               | trainer.save_freq=-1 | --save-interval | checkpointing.save_period=10
checkpoint.every @saves              | | | checkpointing.enabled=true
checkpoint.keep_last int             | trainer.max_actor_ckpt_to_keep | |
checkpoint.async_save true           | actor.checkpoint.async_save | --async-save |
validation.every count               | trainer.test_freq=-1 | --eval-interval | grpo.val_period=10
validation.at_start @at_start        | trainer.val_before_train=true | | grpo.val_at_start
validation.at_start @not_at_start    | | --skip-eval-before-train |
validation.num_samples int           | rollout.val_kwargs.n=1 | --n-samples-per-eval-prompt=1
    | grpo.val_num_generations_per_prompt=1
validation.num_samples @repeat       | | | data.validation.repeat
validation.temperature float         | rollout.val_kwargs.temperature=0 | --eval-temperature | gen.val_temperature
validation.temperature @eval_top_k   | | --eval-top-k |
validation.top_p float               | rollout.val_kwargs.top_p=1.0 | --eval-top-p | gen.val_top_p
validation.limit int                 | | | grpo.max_val_samples
monitor.tensorboard same             | | --use-tensorboard | logger.tensorboard_enabled
monitor.sinks @loggers               | trainer.logger | --use-wandb | logger.wandb_enabled
monitor.sinks @project               | trainer.project_name=verl_examples | --wandb-project=slime
    | logger.wandb.project=nemo-rl
monitor.sinks.wandb.entity @entity   | | --wandb-team |
monitor.sinks.wandb.group @group     | | --wandb-group |
teacher @teaches                     | distillation.enabled | --use-opd | on_policy_distillation.enabled
teacher.path @teacher                | distillation.teacher_models.teacher_model.model_path
    distillation.teacher_model.model_path | --opd-teacher-load | teacher.model_name
teacher.weight @teacher_weight       | distillation.distillation_loss.distillation_loss_coef=1.0 | --opd-kl-coef=1.0 |
teacher.engine @teacher_kind         | | --opd-type |
- @distils_by                        | distillation.distillation_loss.loss_mode=k3 | |
- @distils_by_policy                 | distillation.distillation_loss.use_policy_gradient=false | |
- @distils_alone                     | distillation.distillation_loss.use_task_rewards=true | |
teacher.top_k @set_size              | distillation.distillation_loss.topk=32 | --opd-log-prob-top-k
    | distillation.topk_logits_k
teacher.tokens @sets_of              | | --opd-top-k-strategy=only-student |
- @weighs_sets                       | | --opd-reward-weight-mode=student_p |
teacher.forward @divergence          | | | loss_fn.kl_type=mixed
teacher.forward @forward             | | | loss_fn.mixed_kl_weight=0.5
teacher.normalized @outside_sets     | | | loss_fn.zero_outside_topk=false
"""

WITHOUT = """
Adam is the optimizer
    | | --optimizer=adam | mcore.optimizer.optimizer=adam policy.optimizer.name=torch.optim.AdamW
the reference policy stays what it was | | --ref-update-interval |
weight decay stays as it is
    | actor.optim.weight_decay_incr_style=constant | --end-weight-decay --weight-decay-incr-style=constant
    | mcore.scheduler.weight_decay_incr_style=constant
nothing
    | actor_rollout_ref.ref.* critic.* trainer.critic_warmup algorithm.gamma algorithm.lam algorithm.kl_ctrl.*
    ray_kwargs.* model_engine *.strategy trainer.device *.use_mbridge
    *.vanilla_mbridge *.use_remove_padding *.use_torch_compile *.calculate_log_probs *.free_cache_engine *.load_format
    rollout.mode rollout.log_prob_* rollout.prompt_length rollout.response_length rollout.disable_log_stats
    data.return_raw_* data.filter_overlong_prompts_workers data.val_batch_size data.dataloader_* *.trust_remote_code
    trainer.balance_batch trainer.esi_* trainer.log_val_generations *.ppo_micro_batch_size* *.overlong_buffer_cfg.log
    *.max_resp_len reward.num_workers *.sequence_parallel *.use_distributed_optimizer *dist_checkpointing*
    rollout.val_kwargs.do_sample actor.optim.total_training_steps *.layered_summon *.nccl_timeout *.hybrid_engine
    *.use_shm *.profiler.*
    | --bf16 --attention-* --hidden-dropout --accumulate-allreduce-grads-in-fp32 --sequence-parallel --overlap-*
    --tp-comm-* --transformer-impl --balance-data --use-distributed-optimizer --update-weight-* --log-* --distributed-*
    --train-* --no-gradient-accumulation-fusion --use-precision-aware-optimizer --no-check-for-nan-*
    --recompute-loss-function --moe-grouped-gemm --moe-permute-fusion --moe-token-drop-policy
    --ref-* --ckpt-* --no-save-* --no-load-* --finetune --dist-ckpt-* --megatron-to-hf-mode
    --num-gpus-per-node --wandb-* --tb-* --ci-* --debug-* --profile-* --record-memory-* --memory-* --dump-details
    --save-debug-* --use-fault-tolerance --metadata-key --reward-key --rollout-health-check-*
    --rollout-skip-special-tokens --offload* --no-offload* --eval-max-prompt-len --num-layers --hidden-size
    --ffn-hidden-size --num-attention-heads --group-query-attention --num-query-groups --kv-channels --normalization
    --position-embedding-type --norm-epsilon --rotary-* --swiglu --use-rotary-position-embeddings --use-rope-scaling
    --untie-embeddings-and-output-weights --vocab-size --qk-layernorm --disable-bias-linear --add-qkv-bias
    --max-position-embeddings --seq-length --make-vocab-size-divisible-by --num-experts --moe-ffn-hidden-size
    --moe-router-topk --moe-router-score-function --moe-router-pre-softmax --moe-layer-freq --model-name --spec
    --moe-aux-loss-coeff --moe-router-load-balancing-type --moe-router-bias-update-rate
    | policy.tokenizer.* policy.precision policy.logprob_* policy.generation_batch_size
    policy.make_sequence_length_divisible_by policy.offload_optimizer_for_logprob policy.draft.* policy.hf_overrides.*
    policy.dynamic_batching.* policy.sequence_packing.* policy.scheduler.* grpo.max_rollout_turns grpo.val_* grpo.skip_*
    grpo.debug_* grpo.async_grpo.* grpo.stop_at_* reward_penalties.* loss_fn.kl_* loss_fn.*_kl_* checkpointing.*
    logger.* env.*.num_workers data.num_workers data.use_multiple_dataloader data_plane.* cluster.*
    on_policy_distillation on_policy_distillation.*teacher* fault_tolerance.* data.*.processor data.*.seed
    gen.mcore_generation_config.* gen.refit_*
    gen.real_quant_* gen.port_range_* gen.sglang_* gen.trtllm_* gen.colocated.* vllm.max_model_len vllm.async_engine
    vllm.precision vllm.use_tqdm vllm.*metrics_logger* vllm.*port* mcore.sequence_parallel mcore.pipeline_dtype
    mcore.checkpoint.* mcore.force_* mcore.empty_* mcore.use_gloo_* mcore.enabled fsdp.enabled mcore.fused_linear_*
    mcore.*_fusion mcore.cuda_graph_* mcore.distributed_data_parallel_* mcore.attention_* mcore.moe_[gpes]*
    mcore.train_iters mcore.moe_router_[lb]* mcore.env_vars* mcore.mtp_* mcore.recompute_modules mcore.defer_*
    mcore.optimizer.* mcore.scheduler.* fsdp._v2 *_target_
a batch is learned from once | actor.ppo_epochs=1 | |
nothing in verl either: clip_ratio_low and clip_ratio_high are set by default | actor.clip_ratio | |
data.train.0.limit takes the first rows of a file; verl draws them at random | data.*_max_samples=-1 | |
a step waits for its longest response | rollout.over_sample_rate | |
the newest checkpoints stay, not the best; checkpoint.keep_last 0 keeps all | | | checkpointing.keep_top_k
it generates ahead of the learner; here rollout.engine vllm_server and max_staleness do | verl.*async* | |
rewards are those of reward.name | reward_model.reward_manager=naive reward.reward_manager.name=naive | --group-rm |
    env.*
a reward is a function, not a model | reward_model.* reward.reward_model.* reward.*sandbox* | |
layers are recomputed one by one | *.recompute_* | --recompute-* |
stages of the pipeline have the same number of layers, and are not interleaved
    | *.virtual_pipeline_model_parallel_size
    | --decoder-*-pipeline-num-layers --num-layers-per-virtual-pipeline-stage
    | mcore.num_layers_in_*
this project sets Megatron's fields, and learner.megatron those that it does not | own.* | | mcore.model_overrides.*
the engine has its own value; speed and memory may differ
    | rollout.max_model_len rollout.enable_chunked_prefill rollout.enable_prefix_caching=true |
    | vllm.enable_prefix_caching gen.vllm_kwargs.enable_prefix_caching
experts and layers of an engine are cut by rollout.tensor_parallel alone
    | rollout.expert_parallel_size=1 rollout.moe_tensor_parallel_size=1 rollout.data_parallel_size=1 |
    | vllm.expert_parallel_size=1 vllm.pipeline_parallel_size=1
the engine is used without it | rollout.engine_kwargs.* rollout.checkpoint_engine.* | --sglang-* | vllm.*
    gen.vllm_kwargs.*
several turns need a function of your own (rollout.function) | rollout.multi_turn.* rollout.agent.* | |
there is no FSDP; learner.parallel says how the model is cut
    | *.fsdp_config.* *.ulysses_sequence_parallel_size=1 | | fsdp.*
memory alone; learner.fused_head has that effect | *.entropy_checkpointing *.entropy_from_logits_with_chunking | |
samples.jsonl in the run directory holds sampled texts | trainer.rollout_data_dir trainer.validation_data_dir | |
    logger.num_val_samples_to_print
the learner does not compute in fp8 | | --fp8-* | mcore.fp8_cfg.*
all linear layers get adapters | model.target_modules=all-linear | | *.peft.target_modules *.lora_cfg.target_modules
held-out responses have the length of rollout.max_response_length | | --eval-max-response-len |
held-out data is data.validation, with columns and lengths as in training | | --eval-* |
your function is not called | | --custom-* --rollout-function-path --data-source-path --buffer-filter-path *-hook-path
    *-process-path |
there is no multi-token prediction | | --mtp-* --enable-mtp-* |
no such mode of the learner; docs/exact.md has what is bit for bit here | | --deterministic-mode |
a teacher is a folder in Hugging Face layout, or a server | distillation.* | --opd-* | on_policy_distillation.*
rollout.stop_token_ids has token ids; texts do not stop a response
    | | --rollout-stop*
    | gen.stop_strings gen.stop_token_ids
responses are not carried over in parts | | --partial-rollout --mask-offpolicy-in-partial-rollout |
all parameters learn; learner.lora has adapters | | --only-train-* --freeze-* | mcore.freeze_moe_router
prompts are texts or chat messages, without images and tools | | --multimodal-keys --tool-key --loss-mask-type |
the checkpoint's config.json is taken as it is | model.override_config.* | | policy.hf_config_overrides.*
such tokens and sequences are learned from as others; objective.correction has masks
    | | | grpo.seq_logprob_error_threshold grpo.*_advantage
rewards of truncated responses are not scaled; see reward.mask_truncated
    | | | grpo.reward_shaping.stop_properly_penalty_coef
the buffer ends at rollout.max_response_length | | | grpo.reward_shaping.max_response_length
rewards keep their scale, which normalized advantages do not have | | | grpo.reward_scaling.*
the loss lacks that of correct responses | | | loss_fn.positive_example_nll_weight
advantages are not clipped | | | grpo.advantage_clip_*
from the second update of a step on the ratio is not 1 and is clipped | | | loss_fn.force_on_policy_ratio
the text was not read; data.prompt.template and data.prompt.system have texts
    | | | data.*.prompt_file data.*.system_prompt_file
no part of the data is held out; name a file of its own under data.validation | | | data.train.split_validation_size
"""
"""Keys without counterpart: what changes, and patterns of keys; after =, the value that changes nothing."""


@dataclass(frozen=True)
class Row:
    """One of our keys, "-" for none, how its value is made, and each project's keys with their defaults."""

    ours: str
    how: str
    keys: dict[str, tuple[tuple[str, Any], ...]]


def _lines(table: str) -> list[list[str]]:
    """First column and the projects' cells of each row."""
    rows = re.sub(r"\n +", " ", table.strip()).splitlines()
    return [[cell.strip() for cell in row.split("|")] for row in rows if row]


def _cell(text: str, project: str) -> tuple[tuple[str, Any], ...]:
    keys = []
    for word in text.split():
        key, separator, default = word.partition("=")
        first, dot, rest = key.partition(".")
        key = f"{SHORT[project].get(first, first)}{dot}{rest}"
        keys.append((key, parse(f"value: {default}")[0]["value"] if separator else None))
    return tuple(keys)


def _cells(texts: list[str]) -> dict[str, tuple[tuple[str, Any], ...]]:
    return {project: _cell(text, project) for project, text in zip(PROJECTS, texts, strict=True)}


@cache
def rows() -> tuple[Row, ...]:
    """The rows of `TABLE`."""
    return tuple(Row(*first.split(), _cells(cells)) for first, *cells in _lines(TABLE))


@cache
def without(project: str) -> tuple[tuple[str, Any, str], ...]:
    """Pattern, value that changes nothing, and what changes otherwise ("" for nothing) of a project's other keys."""
    return tuple(
        (pattern, neutral, "" if effect == "nothing" else effect)
        for effect, *cells in _lines(WITHOUT)
        for pattern, neutral in _cells(cells)[project]
    )


FOREIGN_SECTIONS = {
    "actor_rollout_ref": "verl",
    "algorithm": "verl",
    "trainer": "verl",
    "reward_model": "verl",
    "critic": "verl",
    "policy": "NeMo-RL",
    "grpo": "NeMo-RL",
    "loss_fn": "NeMo-RL",
    "cluster": "NeMo-RL",
}
"""Sections at the top of their configurations that no recipe has, and whose they are."""


def hint(key: str) -> str:
    """What of ours a key of another project means; "" where the table does not know it."""
    if (project := FOREIGN_SECTIONS.get(key)) is not None:
        how = f"; `megatron-rl recipe from-{project.lower()} FILE` translates its configurations"
        return f"it is a section of {project}{how}"
    names = {key, f"actor_rollout_ref.{key}", f"--{key.replace('_', '-')}"}
    for project in PROJECTS:
        ours = {row.ours: None for row in rows() for name, _ in row.keys[project] if name in names and row.ours != "-"}
        if ours:
            return f"it is a key of {project}; here it is {' and '.join(ours)}"
    return ""
