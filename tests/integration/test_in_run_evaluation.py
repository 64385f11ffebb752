"""Evaluation inside a run, on real processes: it changes no weight, and it is of exactly the step's weights."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.run.files import read_lines
from engine.run.served_model import served_config, weight_version
from engine.run.trace import read_spans
from support.whole_runs import run, same, weights
from tasks.commands.export import find_checkpoint, policy_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 4


@pytest.fixture
def exact(settings):
    return settings | {
        "train.steps": STEPS,
        "rollout.deterministic": True,
        "train.consume": "prompt_order",
        "evaluate.problems": 6,
        "evaluate.samples": 2,
        "evaluate.max_new_tokens": 8,
    }


def test_an_evaluated_run_trains_the_same_weights(exact, tmp_path):
    run(exact | {"run.name": "plain"}, tmp_path)
    keep = {"checkpoint.every": 1, "checkpoint.keep_last": 1, "checkpoint.keep_best": 1}
    run(exact | keep | {"run.name": "evaluated", "evaluate.every": 1}, tmp_path)
    folder = tmp_path / "evaluated"
    assert same(weights(tmp_path, "plain"), weights(tmp_path, "evaluated"))
    _best_and_last_are_there_and_exported(folder)

    rows = list(read_lines(folder / "evaluations.jsonl"))
    assert [row["weight_version"] for row in rows] == [0, 1, 2]  # not the last step's, which nothing waits for
    for row in rows:
        assert row["in_run"]
        assert (row["problems"], row["samples"]) == (6, 2)
        assert 0 <= row["exposed_s"] <= row["seconds"]
        table = read_lines(folder / row["table"])
        versions = {tuple(map(tuple, one["versions"])) for problem in table for one in problem["responses"]}
        assert versions == {((0, row["weight_version"]),)}
    assert len({row["avg_at_k"] for row in rows}) > 1, "the weights moved, so did the figure"
    assert rows[2]["against"]["weight_version"] == 0
    _never_beside_a_step(read_spans(folder / "trace"))


def _best_and_last_are_there_and_exported(folder):
    rows = [row for row in read_lines(folder / "evaluations.jsonl") if row["weight_version"]]
    best = max(rows, key=lambda row: (row["avg_at_k"], row["weight_version"]))["weight_version"]
    last = folder / f"checkpoints/step-{STEPS:06d}"
    chosen = find_checkpoint(str(folder / "checkpoints/best"))
    assert chosen.name == f"step-{best:06d}"
    assert {chosen, last} <= set(folder.glob("checkpoints/step-*"))

    made = folder / "exported" / last.name
    assert policy_folder(str(last)) == str(made)
    policy = folder / "policy"
    names = {path.name for path in policy.iterdir()}
    assert {path.name for path in made.iterdir()} == names | {"checkpoint.json"}
    assert all((made / name).read_bytes() == (policy / name).read_bytes() for name in names)
    config, text = served_config(policy_folder(str(chosen)), "", [])
    assert (config.rollout.max_context, text) == (64, f"evaluated-{chosen.name}")
    assert weight_version(Path(config.model.path)) == best
    prompt = AutoTokenizer.from_pretrained(config.model.path)("1+1=", return_tensors="pt")
    assert AutoModelForCausalLM.from_pretrained(config.model.path).generate(**prompt, max_new_tokens=1).numel() == 5


def _never_beside_a_step(spans):
    """No response of a step was sampled while one of an evaluation was,
    and all of them between the step's last and the sync."""
    for version in range(3):
        own = [span for span in spans if span["name"] == "evaluate" and span["step"] == version]
        last = max(span["end"] for span in spans if span["name"] == "rollout" and span["step"] == version)
        following = min(span["start"] for span in spans if span["name"] == "rollout" and span["step"] == version + 1)
        assert len(own) == 12
        assert last <= min(span["start"] for span in own)
        assert max(span["end"] for span in own) <= following


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mode",
    [
        {"train.mode": "one_step_off"},
        {"train.mode": "bounded", "train.max_staleness": 2, "train.exact_lag": True, "weights.staged": True},
    ],
    ids=["one step off", "staged"],
)
def test_in_the_modes_ahead_it_shares_the_instances_and_changes_no_weight(exact, tmp_path, mode):
    exact = exact | mode | {"algorithm.old_policy": "rollout", "algorithm.kl_coef": 0}
    run(exact | {"run.name": "plain"}, tmp_path)
    run(exact | {"run.name": "evaluated", "evaluate.every": 1}, tmp_path)
    folder = tmp_path / "evaluated"
    assert same(weights(tmp_path, "plain"), weights(tmp_path, "evaluated"))
    rows = list(read_lines(folder / "evaluations.jsonl"))
    assert [row["weight_version"] for row in rows] == [0, 1, 2]
    for row in rows:
        table = read_lines(folder / row["table"])
        versions = {tuple(map(tuple, one["versions"])) for problem in table for one in problem["responses"]}
        assert versions == {((0, row["weight_version"]),)}
        assert 0 <= row["exposed_s"] <= row["seconds"]
    spans = read_spans(folder / "trace")
    for version in range(3):  # the next version is served only when the evaluation's last response is in
        last = max(span["end"] for span in spans if span["name"] == "evaluate" and span["step"] == version)
        following = [span for span in spans if span["name"] == "sync" and span["lane"] == "instances"]
        assert last <= min(span["end"] for span in following if span["step"] == version + 1)


@pytest.mark.nightly
def test_in_bounded_an_evaluation_is_of_one_version_whenever_instances_swap(exact, tmp_path):
    in_turn = {"train.mode": "bounded", "train.max_staleness": 2, "weights.staged": True, "rollout.instances": 2}
    free = {"rollout.deterministic": False, "train.consume": "arrival", "algorithm.old_policy": "rollout"}
    run(exact | in_turn | free | {"algorithm.kl_coef": 0, "evaluate.every": 1}, tmp_path)
    folder = tmp_path / "run"
    rows = list(read_lines(folder / "evaluations.jsonl"))
    assert [row["weight_version"] for row in rows] == [0, 1, 2]
    assert not (folder / "evaluations/dropped.jsonl").exists()
