import datetime

import pytest

from engine.config import BATCH_SCOPE_LOSSES, Config

BOUNDED = {"mode": "bounded", "max_staleness": 2}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"parallel": {"data": 2, "nodes": 2, "rendezvous": "auto"}},
            'parallel.rendezvous = "auto" needs cluster.engine = "ray"',
        ),
        ({"parallel": {"sequence": True}}, "needs parallel.tensor above 1"),
        ({"parallel": {"expert": 2, "tensor": 2, "data": 2}}, "needs parallel.sequence = true"),
        ({"parallel": {"expert": 3, "context": 2, "data": 3}}, "one must divide the other"),
        ({"parallel": {"expert": 4, "data": 2}}, "must divide parallel.tensor x context x data"),
        (
            {"train": {"dtype": "bfloat16"}},
            r"set train\.ratio_gap_limit = 0 \(the gap is only reported\) or at least 0\.2",
        ),
        (
            {"train": {"dtype": "bfloat16"}},
            "changes log-probabilities of tokens by more than train.ratio_gap_limit",
        ),
        (
            {"model": {"dtype": "bfloat16"}, "rollout": {"engine": "vllm"}},
            r"set train\.ratio_gap_limit = 0 \(the gap is only reported\) or at least 0\.2",
        ),
        ({"rollout": {"tensor": 2}}, 'rollout.tensor = 2 needs rollout.engine = "vllm"'),
        ({"algorithm": {"routing_replay": True}}, 'algorithm.routing_replay = True needs rollout.engine = "vllm"'),
        ({"train": {"router_dtype": "bfloat16"}}, 'needs train.dtype = "bfloat16"'),
        ({"weights": {"transport": "nccl"}}, "the embedded engine takes 'file' or 'gloo'"),
        (
            {"rollout": {"vllm": {"enforce_eager": True}}},
            "rollout.vllm = {'enforce_eager': True} needs rollout.engine = \"vllm\"",
        ),
        *(
            ({"rollout": {"engine": "vllm", "vllm": {name: value}}}, f"rollout.vllm.{name}{said}")
            for name, value, said in (
                ("max_model_len", 4096, ": Metronome sets this argument of vLLM; set rollout.max_context"),
                ("tensor_parallel_size", 2, ": Metronome sets this argument of vLLM; set rollout.tensor"),
                ("logprobs_mode", "raw_logits", " can't be set: the trainer needs log-probabilities"),
                ("quantization", "fp8", " can't be set: .* not sample from the policy's own weights"),
                ("no_skip_tokenizer_init", True, " can't be set: instances take token ids"),
                ("data_parallel_size_local", 2, " can't be set: an instance is one engine"),
                ("nnodes", 2, " can't be set: an instance is one engine"),
                (
                    "allowed_media_domains",
                    ["x", "--trust-remote-code"],
                    ".* begins with - would be read as another argument",
                ),
                ("hf_overrides", '{"a": 1}', ".*: must be a table"),
                ("ssl_keyfile", "key.pem", " can't be set: runs talk to their instances over plain HTTP"),
                ("enforce-eager", True, ": expected vLLM's name of an argument, with underscores"),
                ("seed", 3, " can't be set: each instance gets a different one"),
                ("revision", datetime.date(2026, 11, 26), r" = datetime.* must be a string, a number, true, false"),
                ("gpu_memory_utilization", float("nan"), " = nan: must be a string, a number, true, false"),
            )
        ),
        (
            {"rollout": {"engine": "vllm", "deterministic": True}, "weights": {"transport": "nccl"}},
            "batch-invariant vLLM sets NCCL variables",
        ),
        (
            {"rollout": {"engine": "vllm", "tensor": 2}, "weights": {"transport": "hccl", "staged": True}},
            "'hccl' needs rollout.tensor = 1, but it is 2",
        ),
        ({"rollout": {"instances": 0, "devices": [0]}}, "0 instances can't share"),
        ({"rollout": {"partial": True}}, 'train.mode = "periodic" forbids'),
        ({"rollout": {"partial": True}, "train": {"mode": "sync"}}, 'needs "one_step_off" or "bounded"'),
        ({"rollout": {"partial": True, "program": "a.py:f"}}, "all turns of a response come from the same weights"),
        ({"rollout": {"partial": True}, "train": {"mode": "bounded", "exact_lag": True}}, "so none is ever cut"),
        (
            {
                "algorithm": {"dynamic_sampling": True, "advantage": "reinforce_plus_plus"},
                "train": {"mode": "sync"},
                "rollout": {"group_size": 1},
            },
            "the scores of a group of one are all equal",
        ),
        ({"algorithm": {"dual_clip": 1.0}}, r"algorithm.dual_clip = 1 must be above 1 \(verl's default is 3\)"),
        ({"algorithm": {"dual_clip": -3.0}}, "algorithm.dual_clip = -3 must be above 1"),
        (
            {"algorithm": {"dual_clip": 3.0, "loss": "gspo"}},
            'not read by algorithm.loss = "gspo": .* one of grpo, dapo, dr_grpo',
        ),
        ({"algorithm": {"mismatch": "truncate", "old_policy": "rollout"}}, "the same correction would count twice"),
        (
            {"algorithm": {"mismatch_reject": "token", "old_policy": "previous"}, "train": BOUNDED},
            "mismatch_reject = .* a staleness of at most one update",
        ),
        (
            {
                "algorithm": {"mismatch": "truncate", "old_policy": "previous"},
                "train": {"mode": "bounded", "max_staleness": 2},
            },
            "a staleness of at most one update",
        ),
        (
            {"algorithm": {"gradient_control": "gac", "gac_low": "auto"}, "train": {"mode": "one_step_off"}},
            'on-policy steps, and train.mode = "one_step_off" has none',
        ),
        (
            {"train": {"warmup_steps": 61}},
            r'warmup_steps \(61\) must be at most train.steps x train.updates \(60\): .* "constant" would never reach',
        ),
        (
            {"train": {"warmup_steps": 120, "updates": 2, "schedule": "linear"}},
            r'\(120\) must be below train.steps x train.updates \(120\): .* "linear" would never fall',
        ),
        ({"train": {"warmup_steps": 60, "schedule": "cosine"}}, r'\(60\) must be below .*\(60\): .* "cosine"'),
        (
            {"train": {"min_learning_rate": 1e-3}},
            r"min_learning_rate \(0.001\) must be at most train.learning_rate \(1e-06\)",
        ),
        ({"algorithm": {"gac_low": 0.3, "gac_high": 0.3}}, r"gac_low \(0.3\) must be below algorithm.gac_high \(0.3\)"),
        (
            {"queue": {"store": "transferqueue"}},
            "no passwords: every user of the orchestrator's machine can .* set queue.un",
        ),
        (
            {"queue": {"store": "transferqueue", "address": "auto"}},
            "no passwords: anyone who can reach the Ray cluster's nodes can .* set queue.un",
        ),
        *(
            (
                {"train": {"steps": 6, "profile": steps}},
                r"profile = \[.*\]: expected the first and the last .* of 0 to 5",
            )
            for steps in ([1], [3, 2], [5, 6])
        ),
        ({"train": {"profile": [-1, 2]}}, "greater than or equal to 0"),
    ],
)
def test_a_combination_that_can_not_be_is_refused_with_its_rule(settings, said):
    with pytest.raises(ValueError, match=said):
        Config(**settings)


def test_a_warm_up_may_end_with_the_last_update():
    assert Config(train={"warmup_steps": 60}).train.warmup_steps == 60
    assert Config(train={"warmup_steps": 59, "schedule": "linear"}).train.warmup_steps == 59


@pytest.mark.parametrize(
    ("sizes", "ranks", "lockstep", "replica_groups"),
    [
        ({}, 1, 1, 1),
        ({"tensor": 2, "pipeline": 3, "context": 2, "data": 4}, 48, 1, 4),
        ({"data": 4, "expert": 2}, 4, 2, 2),
        ({"tensor": 2, "sequence": True, "data": 2, "expert": 2}, 4, 1, 2),
        ({"tensor": 2, "sequence": True, "data": 2, "expert": 4}, 4, 2, 1),
        ({"context": 2, "data": 2, "expert": 2}, 4, 1, 2),
    ],
)
def test_units_are_the_replicas_that_share_no_expert(sizes, ranks, lockstep, replica_groups):
    parallel = Config(parallel=sizes).parallel
    assert (parallel.ranks, parallel.lockstep, parallel.replica_groups) == (ranks, lockstep, replica_groups)


def test_all_sends_a_batch_at_once_evenly_to_the_instances():
    def slots(concurrency, **sizes):
        given = {"rollout": {"concurrency": concurrency, "group_size": 8, "instances": sizes.pop("instances", 1)}}
        config = Config(train={"prompts_per_step": 30}, dry_run=sizes, **given)
        return config.slots

    found = [slots(4), slots("all"), slots("all", instances=4), slots("all", instances=0), slots("all", joining=2)]
    assert found == [32, 240, 64, 240, 80]


def test_a_windows_budget_grows_with_the_pipeline_and_the_replicas_in_lockstep():
    def window(**parallel):
        return Config(parallel=parallel, train={"micro_batch_tokens": 100}).window_tokens

    assert [window(), window(pipeline=2), window(data=2, expert=2), window(data=4)] == [100, 800, 200, 100]

    def bubble(**parallel):
        return Config(parallel=parallel, train={"micro_batch_tokens": 100}).bubble_tokens

    assert [bubble(data=4), bubble(pipeline=2), bubble(pipeline=4), bubble(data=2, expert=2, pipeline=2)] == [
        0,
        100,
        300,
        200,
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {
            "train": {"mode": "sync"},
            "algorithm": {"mismatch": "truncate", "gradient_control": "gac", "gac_high": "auto"},
        },
        {"algorithm": {"mismatch": "mask", "old_policy": "previous"}},
        {"train": {"mode": "one_step_off"}, "algorithm": {"mismatch": "mask", "old_policy": "previous"}},
        {"train": {"mode": "bounded"}, "algorithm": {"mismatch": "mask", "old_policy": "previous"}},
        {"train": {"mode": "one_step_off"}, "algorithm": {"mismatch": "truncate"}},
        {"train": BOUNDED, "algorithm": {"mismatch": "mask", "mismatch_level": "sequence"}},
    ],
)
def test_a_mismatch_is_corrected_where_the_weights_that_sampled_are_known(settings):
    assert Config(**settings).algorithm.mismatch == settings["algorithm"]["mismatch"]
    with pytest.raises(ValueError, match="the same correction would count twice"):
        Config(**settings | {"algorithm": settings["algorithm"] | {"old_policy": "rollout"}})


def test_a_rejection_counts_nothing_twice_and_goes_with_every_old_policy():
    for old_policy in ("behavior", "rollout"):
        config = Config(algorithm={"mismatch_reject": "geometric", "old_policy": old_policy}, train=BOUNDED)
        assert config.algorithm.mismatch_reject == "geometric"


@pytest.mark.parametrize("loss", BATCH_SCOPE_LOSSES)
def test_a_loss_that_acts_on_ratios_is_refused_where_they_are_1_or_of_other_weights(loss):
    """At ratio 1 m2po and bapo are dapo, at the price of one more forward pass. The weights before the last update
    sampled nothing that is two updates old."""

    def config(old_policy, train):
        return Config(algorithm={"loss": loss, "old_policy": old_policy}, train=train)

    for train in ({"mode": "sync"}, {"mode": "one_step_off"}, BOUNDED):
        with pytest.raises(ValueError, match=f'"{loss}" acts on ratios other than 1.*old_policy = "rollout"'):
            config("behavior", train)
        assert config("rollout", train).algorithm.loss == loss
    for train in ({"mode": "sync"}, {"mode": "one_step_off"}, {"mode": "bounded"}):
        assert config("previous", train).algorithm.loss == loss
    with pytest.raises(ValueError, match='up to 2 updates algorithm.old_policy = "previous" is not that.*"rollout"'):
        config("previous", BOUNDED)


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            {"train": {"dtype": "bfloat16"}},
            'or at least 0.2; also set model.dtype = "bfloat16", so that both sides round alike',
        ),
        (
            {"model": {"dtype": "bfloat16"}},
            'or at least 0.2; also set train.dtype = "bfloat16", so that both sides round alike',
        ),
        (
            {"model": {"dtype": "bfloat16"}, "train": {"dtype": "bfloat16"}},
            "set train.ratio_gap_limit = 0 (the gap is only reported) or at least 0.2",
        ),
    ],
)
def test_the_refusal_of_bf16_names_all_keys_to_set(tables, told):
    with pytest.raises(ValueError, match="changes log-probabilities") as refused:
        Config.model_validate(tables)
    assert refused.value.errors()[0]["msg"].endswith(told)


@pytest.mark.parametrize(
    ("trainer", "instances", "expected"),
    [("float32", "float32", "float32"), ("bfloat16", "float32", "bfloat16"), ("float32", "bfloat16", "bfloat16")],
)
def test_trainer_and_instances_are_compared_as_finely_as_the_coarser_one_computes(trainer, instances, expected):
    config = Config.model_validate(
        {
            "train": {"dtype": trainer, "ratio_gap_limit": 0},
            "model": {"dtype": instances},
            "rollout": {"engine": "vllm"},
        }
    )
    assert config.compared_dtype == expected
