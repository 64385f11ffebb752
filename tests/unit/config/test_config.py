import pytest

from engine.config import Config


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
