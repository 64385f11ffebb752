"""Which test produces each message of docs/troubleshooting.md, and a piece of the message that stands in that file."""

UNIT = "tests/unit/"
MESSAGES = {
    "unknown key …": (UNIT + "config/test_blame.py", "unknown key train.stepz"),
    "is more than the … problems of data.train": (UNIT + "orchestrator/test_checks.py", "problems of data.train"),
    "has no effect: …": (UNIT + "config/test_no_effect.py", "has no effect: "),
    "expected table.key=value, for example --set rollout.group_size=8": (
        UNIT + "config/test_recipe.py",
        "expected table.key=value",
    ),
    "run folder … already exists": (UNIT + "flows/test_cli.py", "already exists"),
    "--resume: … is … but the run has …": (
        UNIT + "trainer/checkpoint/test_checkpoints.py",
        ", but the run has",
    ),
    "--resume: name the run to continue": ("tests/integration/test_resume.py", "name the run to continue"),
    "--resume: the run would continue with other prompts": (
        "tests/integration/test_resume.py",
        "Changed: rollout.max_context",
    ),
    "no config.json there; expected a Hugging Face folder": (UNIT + "flows/test_cli.py", "no config.json there"),
    "no *.safetensors there; other weight formats are not read": (
        UNIT + "model/test_families.py",
        "no *.safetensors there; other weight formats are not read",
    ),
    "architecture … is not supported; supported: …": (UNIT + "model/test_families.py", "is not supported; supported:"),
    "the layout does not fit the model (…": ("tests/integration/test_resume.py", "the layout does not fit the model"),
    "… = … is more than the … positions that …": (
        UNIT + "orchestrator/test_checks.py",
        "is more than the 2,048 positions",
    ),
    "too little memory on a …": (UNIT + "tools/dry_run/test_plan.py", "too little memory on a"),
    "changes log-probabilities of tokens by more than train.ratio_gap_limit": (
        UNIT + "config/test_config.py",
        "changes log-probabilities of tokens by more than train.ratio_gap_limit",
    ),
    "takes its statistics over the whole batch": (
        UNIT + "run/test_user_algorithms.py",
        "takes its statistics over the whole batch",
    ),
    "problem set …: no usable row among …": (UNIT + "data/test_problems.py", "no usable row among"),
    "no prompt is left of …": (UNIT + "data/test_prompts.py", ": no prompt is left of"),
    "the chat template of … fails": (UNIT + "data/test_prompts.py", "the chat template of models/gemma"),
    "the tokenizer has no chat template": (UNIT + "data/test_prompts.py", "no chat template"),
    "…: while loading it, its process …": (
        UNIT + "orchestrator/test_verifier_pool.py",
        "while loading it, its process",
    ),
    "this run has no policy yet": (UNIT + "run/test_served_model.py", "after the last step"),
    "is in use: it has … requests and weight version …": (
        "tests/contract/test_conformance.py",
        "requests and weight version",
    ),
    "that is not a Hugging Face folder on this machine": (
        "tests/contract/test_conformance.py",
        "not a Hugging Face folder on this machine",
    ),
    "needs vLLM in …: run ": ("tests/vllm/test_parts.py", "needs vLLM in"),
    "was built from another infra/vllm/…": (
        "tests/vllm/test_parts.py",
        "than the current one: run `make vllm DEVICE=",
    ),
    "rank … of this machine has no … device": (UNIT + "platform/test_platform.py", "of this machine has no"),
    "was not ready after … s (rollout.timeout_s …": (
        UNIT + "orchestrator/pool/test_processes.py",
        "was not ready after",
    ),
    "instances of rollout.tensor = … need … devices": (
        UNIT + "tasks/cluster/test_rollout_node.py",
        "instances of rollout.tensor =",
    ),
    "the flow run … has failed": (UNIT + "tasks/cluster/test_other_nodes.py", "the flow run"),
    "rollout.devices is empty, so each of the …": (
        UNIT + "orchestrator/test_checks.py",
        "rollout.devices is empty",
    ),
    "rollout.deterministic = true, but … gives different bits for the same request …": (
        "tests/vllm/test_runs.py",
        "rollout.deterministic = true, but",
    ),
    "no rollout instance is left: waited … s for one (…)": (
        UNIT + "orchestrator/pool/test_pool.py",
        "no rollout instance is left: waited",
    ),
    "no rollout instance has joined: waited … s for the first (…)": (
        UNIT + "orchestrator/pool/test_pool.py",
        "no rollout instance has joined: waited",
    ),
    "… failed … times; last error: …": (UNIT + "orchestrator/test_producer.py", "times; last error:"),
    "found no instance that takes it in … s": (
        UNIT + "orchestrator/test_producer.py",
        "found no instance that takes it in",
    ),
    "no answer to … in … s": (UNIT + "orchestrator/pool/test_instance_client.py", ": no answer to"),
    "the orchestrator at … refuses …": (UNIT + "instance/test_join.py", "refuses guest: 503"),
    "no orchestrator answers at …": (UNIT + "tasks/cluster/test_rollout_node.py", "no orchestrator answers at"),
    "… sampled from weight version …, but mode … accepts only …": (UNIT + "test_schedule.py", "accepts only"),
    "trainer and instances … disagree on the same tokens: max|ratio - 1| = …": (
        "tests/integration/test_faults.py",
        "step 1.*disagree",
    ),
    "its log-probabilities of … fixed tokens differ from the trainer's": (
        UNIT + "orchestrator/weight_sync/test_trust.py",
        ": after the update to weight version",
    ),
    "self-test failed: it loaded weights with the output rows of tokens … changed": (
        UNIT + "orchestrator/weight_sync/test_sync.py",
        ": self-test failed",
    ),
    "could not be sent: instances failed in each of … attempts": (
        UNIT + "client/publish/test_publisher.py",
        "could not be sent: instances failed in each of",
    ),
    "the name of this machine, …, resolves to …: instances on other machines can't reach that": (
        UNIT + "wire/weights/test_own_address.py",
        "instances on other machines can't reach that",
    ),
    "the trainer died: …": ("tests/integration/test_faults.py", "the trainer died"),
    "the gradient of this step is not finite": (
        UNIT + "trainer/test_policy.py",
        "the gradient of this step is not finite",
    ),
    "the orchestrator … gave no sign of life for … s": (
        UNIT + "tasks/test_orchestrator_process.py",
        "gave no sign of life for",
    ),
    "… ran out of memory …: …": (UNIT + "trainer/test_memory_watch.py", "ran out of memory in step"),
    "writes it now; this one (attempt …) stops": (UNIT + "run/test_fence.py", "writes it now; this one (attempt"),
    "… has not ended … s after SIGKILL": (UNIT + "run/test_process.py", "s after SIGKILL"),
    "open files: the run needs …": (UNIT + "run/test_limits.py", "open files: the run needs"),
    "no answer from the orchestrator at … to … in … s": (
        UNIT + "wire/test_messages.py",
        "no answer from the orchestrator at",
    ),
    "reward.function…, prompt …: …": (UNIT + "orchestrator/test_reward_results.py", ", prompt 0123456789abcdef: "),
    "--resume: the run has trained … steps already": (
        "tests/integration/test_resume.py",
        "has trained 2 steps already",
    ),
    "--resume: all … steps are trained, so … would have no effect": (
        "tests/integration/test_resume.py",
        "all 2 steps are trained, so train.learning_rate = 0.5 would have no effect",
    ),
    "no checkpoint of this run is intact": (
        UNIT + "run/test_checkpoint_search.py",
        "no checkpoint of this run is intact",
    ),
    "… can't be read, because the file is damaged": (UNIT + "run/test_fence.py", "can't be read"),
    "MiB are free on its disk": (UNIT + "run/test_disk.py", "MiB are free"),
    "publishing the checkpoint to … (checkpoint.path) failed: …": (
        UNIT + "trainer/checkpoint/test_writer.py",
        "publishing the checkpoint to",
    ),
    "changed since the run was trained with it": (
        UNIT + "run/test_run_inputs.py",
        "changed since the run was trained with it",
    ),
    "it is of another model than model.path = …": (
        UNIT + "trainer/checkpoint/test_checkpoints.py",
        "of another model than",
    ),
    "have not written their part of … within … s": (
        UNIT + "trainer/checkpoint/test_writer.py",
        "have not written their part of",
    ),
}
