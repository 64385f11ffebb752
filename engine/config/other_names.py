"""What TRL, verl and slime call the keys of a recipe, for the message about an unknown key (docs/coming_from.md)."""

from __future__ import annotations

from engine.config.table import keys_in
from engine.config.tree import Tree

NO_LORA = "not supported: LoRA and other adapters; all weights are trained"
NO_HUB = "not supported: the policy of a run is a Hugging Face folder; `hf upload OWNER/NAME RUN/policy` uploads it"
NO_TRACKER = "not supported: trackers beside MLflow, which every run has (tracking.uri)"
NO_CRITIC = "not supported: critics and value models"
NO_BATCH = "not needed: responses are packed up to train.micro_batch_tokens; a step has train.prompts_per_step prompts"
NO_PASSES = "not supported: one pass over each batch; train.updates splits it into several updates"
OTHER_NAMES = {
    "accumulation_steps": NO_BATCH,
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "agent_loop_config_path": "rollout.program",
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "beta": "algorithm.kl_coef",
    "betas": "train.betas",
    "bf16": "train.dtype",
    "bypass_mode": "algorithm.old_policy",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "clip_grad": "train.max_grad_norm",
    "clip_ratio_c": "algorithm.dual_clip",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "context_parallel_size": "parallel.context",
    "critic": NO_CRITIC,
    "custom_generate_function_path": "rollout.program",
    "custom_reward_function.name": "reward.function",
    "custom_reward_function.path": "reward.function",
    "delta": "algorithm.dual_clip",
    "device": "platform.device",
    "entropy_coef": "algorithm.entropy_coef",
    "entropy_coeff": "algorithm.entropy_coef",
    "eps_clip": "algorithm.clip_low",
    "eps_clip_high": "algorithm.clip_high",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "evaluate.every",
    "expert_model_parallel_size": "parallel.expert",
    "generation_batch_size": "train.prompts_per_step",
    "global_batch_size": "train.prompts_per_step",
    "grad_offload": "train.offload",
    "gradient_accumulation_steps": NO_BATCH,
    "gradient_checkpointing": "train.recompute",
    "hub": NO_HUB,
    "hub_model_id": NO_HUB,
    "importance_sampling_level": "algorithm.loss",
    "kl_loss_coef": "algorithm.kl_coef",
    "kl_loss_type": "algorithm.kl_estimator",
    "learning_rate": "train.learning_rate",
    "logger": NO_TRACKER,
    "lora": NO_LORA,
    "lora_alpha": NO_LORA,
    "lora_rank": NO_LORA,
    "loss_agg_mode": "algorithm.loss",
    "loss_mode": "algorithm.loss",
    "loss_type": "algorithm.loss",
    "lr": "train.learning_rate",
    "lr_decay_style": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "lr_warmup_steps": "train.warmup_steps",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "max_assistant_turns": "rollout.max_turns",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "train.max_grad_norm",
    "max_prompt_length": "rollout.max_context",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "train.steps",
    "multi_turn": "rollout.program",
    "n_gpus_per_node": "not a key: the ranks are the product of the keys of parallel, on parallel.nodes",
    "n_samples_per_prompt": "rollout.group_size",
    "nnodes": "parallel.nodes",
    "norm_adv_by_std_in_grpo": "algorithm.advantage",
    "num_generations": "rollout.group_size",
    "num_iterations": NO_PASSES,
    "num_rollout": "train.steps",
    "num_train_epochs": "train.steps",
    "one_step_off_policy": "train.mode",
    "optimizer_offload": "train.offload",
    "param_offload": "train.offload",
    "peft_config": NO_LORA,
    "per_device_train_batch_size": NO_BATCH,
    "pipeline_model_parallel_size": "parallel.pipeline",
    "ppo_epochs": NO_PASSES,
    "ppo_micro_batch_size_per_gpu": NO_BATCH,
    "ppo_mini_batch_size": "train.updates",
    "push_to_hub": NO_HUB,
    "recompute_granularity": "train.recompute",
    "report_to": NO_TRACKER,
    "resume_from_checkpoint": "not a key: give --resume on the command line",
    "resume_mode": "not a key: give --resume on the command line",
    "rollout.calculate_log_probs": "not needed: the log-probabilities of the instances are always there",
    "rollout.n": "rollout.group_size",
    "rollout.name": "rollout.engine",
    "rollout.tensor_model_parallel_size": "rollout.tensor",
    "rollout_batch_size": "train.prompts_per_step",
    "rollout_is": "algorithm.mismatch",
    "rollout_is_threshold": "algorithm.mismatch_limit",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "rollout_num_gpus_per_engine": "rollout.tensor",
    "rollout_rs": "algorithm.mismatch_reject",
    "rollout_rs_threshold": "algorithm.mismatch_reject_limit",
    "rollout_temperature": "rollout.temperature",
    "save_freq": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "scale_rewards": "algorithm.advantage",
    "sequence_parallel": "parallel.sequence",
    "steps_per_generation": "train.updates",
    "temperature": "rollout.temperature",
    "tensor_model_parallel_size": "parallel.tensor",
    "test_freq": "evaluate.every",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "total_epochs": "train.steps",
    "total_training_steps": "train.steps",
    "train_batch_size": "train.prompts_per_step",
    "train_files": "data.train",
    "use_distributed_optimizer": "train.distributed_optimizer",
    "use_dynamic_bsz": NO_BATCH,
    "use_kl_in_reward": "not supported: KL in the reward; algorithm.kl_coef has it in the loss",
    "use_kl_loss": "algorithm.kl_coef",
    "use_vllm": "rollout.engine",
    "val_files": "data.heldout",
    "vllm_importance_sampling_correction": "algorithm.mismatch",
    "vllm_importance_sampling_mode": "algorithm.mismatch_level",
    "vllm_max_model_length": "rollout.max_context",
    "vllm_mode": "rollout.engine",
    "vllm_tensor_parallel_size": "rollout.tensor",
    "warmup_steps": "train.warmup_steps",
    "weight_decay": "train.weight_decay",
}
"""Another library's name, from as many of its parts as make it clear → our key, or in words why there is none."""
KEYS = frozenset(keys_in(Tree))
"""Our keys."""


def find_other_name(key: str) -> str:
    """What a dotted key of another library means here: one of `KEYS`, or why there is none, in words; "" if unknown.

    The longest end of the key counts ("actor_rollout_ref.rollout.n" as "rollout.n"), else one of its tables.
    """
    parts = key.split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    for name in [*ends, *parts[:-1]]:
        if found := OTHER_NAMES.get(name) or (name if name in KEYS and name != key else ""):
            return found
    return ""
