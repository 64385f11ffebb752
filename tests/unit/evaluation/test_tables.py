"""Which evaluations are compared, and what their rows say of the responses."""

import asyncio
from dataclasses import replace

import pytest

from engine.config import Config
from engine.config.table import keys_in
from engine.errors import RewardError, StaleRolloutError
from engine.evaluation.benchmarks import EncodedBenchmark
from engine.evaluation.results import Subject, check_versions, record_evaluation
from engine.evaluation.tables import (
    NOT_IN_PROTOCOL,
    evaluation_protocol,
    protocol_differences,
    rows_of,
    scores_by_version,
)
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.types import Prompt, Score
from support.groups import numbered_group
from support.run_folders import EVALUATION, add_line


def prompts(*names):
    return tuple(Prompt(name, "", "", tuple(name.encode())) for name in names)


def differing(one, config, others):
    return [key.split()[0] for key in protocol_differences(one, evaluation_protocol(config, "mine", others))]


def test_the_same_problems_are_comparable_in_any_order_and_others_are_not():
    one = evaluation_protocol(Config(), "mine", prompts("a", "b", "c"))
    assert differing(one, Config(), prompts("c", "a", "b")) == []
    for others in (prompts("a", "b"), prompts("a", "b", "d"), prompts("a", "b", "c", "c")):
        assert differing(one, Config(), others) == ["problems", "prompts"]
    with_column = replace(prompts("c")[0], columns={"level": 2})
    assert differing(one, Config(), (*prompts("a", "b"), with_column)) == ["problems"]
    of_another_day = replace(prompts("c")[0], token_ids=(1, 2))  # or template, or tokenizer
    assert differing(one, Config(), (*prompts("a", "b"), of_another_day)) == ["prompts"]


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("data.system", "/docs/a/rules.py:main", "/docs/b/rules.py:main"),
        ("data.instruction", "as a/rules.py:main", "as b/rules.py:main"),
        ("data.prompt_template", "Think. As tests/a.py:\n{problem}", "Be brief. As tests/a.py:\n{problem}"),
        ("rollout.stop", ["/a/x.py:f"], ["/b/x.py:f"]),
        ("data.chat_template_kwargs", {"how": "/a/x.py:f"}, {"how": "/b/x.py:f"}),
    ],
)
def test_a_text_that_looks_like_code_is_in_the_protocol_as_it_is(key, one, other):
    table, name = key.split(".")
    tree = {"prompt_template": "chat"} if table == "data" and name != "prompt_template" else {}
    configs = [Config(**{table: {**tree, name: value}}) for value in (one, other)]
    assert differing(evaluation_protocol(configs[0], "mine", prompts("a")), configs[1], prompts("a")) == [key]


def test_a_reward_of_ones_own_is_the_same_in_another_folder_but_not_with_other_code(tmp_path):
    made = []
    for number, code in enumerate(("one", "one", "two")):
        file = tmp_path / str(number) / "my.py"
        file.parent.mkdir()
        file.write_text(code)
        config = Config(reward={"functions": [{"function": "math"}, {"function": f"{file}:reward", "weight": 0.5}]})
        made.append(evaluation_protocol(config, "mine", prompts("a")))
    assert [one["function"] for one in made[0]["reward.functions"]] == ["math", "my.py:reward"]
    assert protocol_differences(made[0], made[1]) == []
    assert [key.split()[0] for key in protocol_differences(made[0], made[2])] == ["reward"]
    programs = [Config(rollout={"program": f"{tmp_path}/0/my.py:{name}"}) for name in ("one", "two")]
    made = [evaluation_protocol(config, "mine", prompts("a")) for config in programs]
    assert [key.split()[0] for key in protocol_differences(*made)] == ["rollout.program"]


def test_every_key_is_in_the_protocol_or_has_a_reason_why_not():
    keys = set(keys_in(Config))
    inside = set(evaluation_protocol(Config(), "mine", prompts("a")))
    names = " ".join(NOT_IN_PROTOCOL.values()).split()
    left_out = {key for key in keys if any(f"{key}.".startswith(f"{one}.") for one in names)}
    assert keys - left_out == inside - {"benchmark", "problems_hash", "prompts_hash", "reward_hash"}
    assert [name for name in names if not any(f"{key}.".startswith(f"{name}.") for key in keys)] == []
    assert {key for key in inside if key.startswith("rollout.")} == {
        *("rollout.engine", "rollout.max_context", "rollout.stop", "rollout.vllm"),
        *("rollout.program", "rollout.program_timeout_s", "rollout.max_turns"),
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("rollout.max_turns", 4),
            ("rollout.program_timeout_s", 1.0),
            ("rollout.engine", "vllm"),
            ("model.dtype", "bfloat16"),
        ),
        *(
            ("reward.timeout_s", 1.0),
            ("reward.on_timeout", "exclude"),
            ("reward.on_error", "zero"),
            ("reward.memory_gb", 1.0),
        ),
        *(
            ("evaluate.samples", 4),
            ("evaluate.temperature", 0.5),
            ("data.instruction", "Add."),
            ("rollout.stop", ["#"]),
        ),
        *(("data.chat_template_kwargs", {"tools": []}), ("model.head_dtype", "float32"), ("rollout.max_context", 4096)),
    ],
)
def test_what_reaches_a_response_or_a_score_makes_another_protocol(key, value):
    table, name = key.split(".")
    one = evaluation_protocol(Config(), "mine", prompts("a"))
    changed = Config()
    changed = changed.model_copy(update={table: getattr(changed, table).model_copy(update={name: value})})
    (difference,) = protocol_differences(one, evaluation_protocol(changed, "mine", prompts("a")))
    assert difference.split()[0] == key


def test_two_seeds_are_comparable_and_are_told_apart():
    one, other = (evaluation_protocol(Config(run={"seed": seed}), "mine", prompts("a")) for seed in (1, 2))
    assert one != other
    assert protocol_differences(one, other) == []


@pytest.fixture
def recorded(tmp_path):
    """A function that records an evaluation of a version: of a response for each (number of tokens, finish_reason), or
    for each score."""
    made = Config(run={"name": "run", "output": str(tmp_path)}, evaluate={"max_new_tokens": 4})
    folder = RunFolder(made.folder)
    folder.create(made, resume=False)

    def of(version, lengths=((1, "stop"),), scores=(), sampled=0, name="mine", model="m", others=(), **given):
        whole = numbered_group(0)
        given = {"evaluate": {"samples": len(scores or lengths)}} | given
        config = made.model_copy(update={key: getattr(made, key).model_copy(update=new) for key, new in given.items()})
        responses = tuple(
            replace(whole.responses[0], token_ids=(5,) * count, finish_reason=reason)
            for count, reason in (lengths * len(scores) or lengths)
        )
        group = replace(whole, responses=responses, scores=scores or whole.scores * len(responses))
        groups = [group, *(replace(group, scores=one) for one in others)]
        benchmark = EncodedBenchmark(name, tuple(group.prompt for group in groups), {})
        row = record_evaluation(
            config=config,
            folder=folder,
            subject=Subject(model, version),
            benchmark=benchmark,
            groups=groups,
            verifier=None,
            sampled=sampled,
            more={},
        )
        return asyncio.run(row), folder

    return of


def test_the_scores_of_versions_are_of_evaluations_made_as_the_newest_of_the_run(tmp_path):
    """checkpoint.keep_best compares these: not those of another benchmark, another protocol or another model."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    base = EVALUATION["model"]
    own = str(folder.policy)
    for version, value, model, how, in_run in (
        (0, 0.5, base, {}, True),
        (1, 0.9, own, {"benchmark": "other"}, False),
        (2, 0.8, own, {"temperature": 0.1}, False),
        (3, 0.7, own, {}, False),
        (4, 0.6, "another", {}, False),
        (5, 0.4, base, {}, True),
    ):
        row = {"weight_version": version, "avg_at_k": value, "model": model, "in_run": in_run}
        add_line(folder.evaluations, **EVALUATION | row | {"protocol": EVALUATION["protocol"] | how})
    assert scores_by_version(folder) == {0: 0.5, 3: 0.7, 5: 0.4}


def test_a_response_that_max_new_tokens_cut_is_not_one_that_the_context_cut(recorded):
    row, _ = recorded(0, [(4, "length"), (4, "stop"), (3, "length"), (1, "stop")])
    assert (row["response_length_mean"], row["truncated"], row["context_cut"]) == (3.0, 2, 1)


def test_pass_at_k_counts_whole_scores_and_the_metrics_of_the_scores_have_means(recorded):
    whole = Score(0.7 + 0.2 + 0.1, metrics={"form": 0.25})
    row, folder = recorded(0, scores=(whole, Score(0.5), Score(0.5, correct=False), Score(0.0, metrics={"form": 0.75})))
    assert (row["avg_at_k"], row["pass_curve"]["1"], row["pass_at_k"]) == (0.5, 0.25, 1.0)
    assert row["reward/form"] == 0.5
    (problem,) = read_lines(folder.path / row["table"])
    assert problem["right"] == 1
    assert [one.get("reward/form") for one in problem["responses"]] == [0.25, None, None, 0.75]


def test_where_a_program_scores_there_is_no_vote(recorded, tmp_path):
    (tmp_path / "own.py").write_text("")
    rows = [recorded(0)[0], recorded(0, rollout={"program": f"{tmp_path}/own.py:program"})[0]]
    assert ["maj_at_k" in row for row in rows] == ["maj_at_k_bootstrap" in row for row in rows] == [True, False]


def test_a_metric_of_an_excluded_response_is_in_no_mean(recorded):
    scores = (Score(1.0, metrics={"form": 0.5}), Score(0.0, excluded=True, metrics={"form": 9.0}))
    assert recorded(0, scores=scores)[0]["reward/form"] == 0.5


def test_an_evaluation_is_compared_with_the_first_one_whose_table_is_there(recorded):
    first, folder = recorded(0)
    assert "against" not in first
    assert "against" not in recorded(0)[0]  # nor with its own policy
    assert recorded(1)[0]["against"]["weight_version"] == 0
    assert recorded(2)[0]["against"]["weight_version"] == 0
    (folder.path / first["table"]).unlink()
    assert recorded(3)[0]["against"]["weight_version"] == 1


def test_no_evaluation_overwrites_the_table_of_another(recorded):
    """Of another protocol, or of the same one with other weights in the same folder."""
    first, folder = recorded(0, scores=(Score(1.0),))
    other, _ = recorded(0, scores=(Score(0.0),), rollout={"max_turns": 1})
    again, _ = recorded(0, scores=(Score(0.5),))
    assert "against" not in other
    for row, mean in ((first, 1.0), (other, 0.0), (again, 0.5)):
        assert [problem["mean"] for problem in read_lines(folder.path / row["table"])] == [mean] == [row["avg_at_k"]]


@pytest.mark.parametrize(
    "other", [{"evaluate": {"samples": 1, "temperature": 0.5}}, {"model": "n"}, {"name": "x" * 50 + "-test"}]
)
def test_evaluations_with_equal_responses_have_tables_of_their_own(recorded, other):
    one = {"name": "x" * 50 + "-dev"}
    assert recorded(0, **one)[0]["table"] != recorded(0, **one | other)[0]["table"]


EXCLUDED = Score(0.0, status="error", detail="judge", excluded=True)


def test_what_has_no_score_is_counted_and_in_no_figure(recorded):
    scores = (Score(-1.0), EXCLUDED, Score(-1.0), EXCLUDED, Score(0.0, status="timeout"), Score(0.0, status="error"))
    row, folder = recorded(0, scores=scores)
    assert row["avg_at_k"] == -0.5
    assert (row["reward_excluded"], row["reward_errors"], row["reward_timeouts"]) == (2, 3, 1)
    assert row["pass_curve"] == {}
    assert not {"pass_at_k", "best_at_k_bootstrap"} & row.keys()
    (problem,) = read_lines(folder.path / row["table"])
    assert (problem["mean"], problem["samples"]) == (-0.5, 6)
    assert [one["score"] for one in problem["responses"]] == [-1.0, None, -1.0, None, 0.0, 0.0]
    with pytest.raises(
        RewardError, match="evaluation on mine: none of 2 responses has a score; the first: error: judge"
    ):
        recorded(0, scores=(EXCLUDED, EXCLUDED))
    assert len(rows_of(folder)) == 1


@pytest.mark.parametrize(
    ("others", "problems", "unscored", "incomplete", "avg", "curve"),
    [
        ([], 1, 0, 0, 0.25, {"1": 0.25, "2": 0.5, "4": 1.0}),
        ([(EXCLUDED,) * 4], 1, 1, 0, 0.25, {"1": 0.25, "2": 0.5, "4": 1.0}),
        ([(EXCLUDED, Score(0.0), Score(1.0), Score(1.0))], 2, 0, 1, 11 / 24, {"1": 0.25, "2": 0.5, "4": 1.0}),
        ([(Score(0.0),) * 4, (EXCLUDED,) * 3 + (Score(1.0),)], 3, 0, 1, 5 / 12, {"1": 0.125, "2": 0.25, "4": 0.5}),
    ],
)
def test_figures_say_over_which_problems_they_are(recorded, others, problems, unscored, incomplete, avg, curve):
    """pass@k, its curve and best@k are over the problems with k scores, avg@k over those with any."""
    row, _ = recorded(0, scores=(Score(0.0), Score(0.0), Score(0.0), Score(1.0)), others=others)
    assert (row["problems"], row["unscored_problems"], row["incomplete_problems"]) == (problems, unscored, incomplete)
    assert (row["avg_at_k"], row["pass_curve"]) == (pytest.approx(avg), pytest.approx(curve))
    assert row["pass_at_k"] == pytest.approx(curve["4"])


def test_no_evaluation_has_responses_of_other_weights(recorded):
    with pytest.raises(StaleRolloutError, match="evaluation of weight version 3, .*: sampled from version 0"):
        recorded(3, sampled=3)


@pytest.mark.parametrize("versions", [((0, 4),), ((0, 3), (5, 4)), ((0, 2), (1, 3))])
def test_every_token_of_an_evaluation_is_of_its_version(versions):
    whole = numbered_group(0)
    of_3, other = (replace(whole.responses[0], versions=spans) for spans in (((0, 3),), versions))
    check_versions([replace(whole, responses=(of_3, of_3))], 3)
    with pytest.raises(StaleRolloutError, match="weight version 3, prompt .*, response 1 of .*: sampled from version"):
        check_versions([replace(whole, responses=(of_3, other))], 3)


def test_an_excluded_response_has_no_vote(recorded):
    """The group's responses all have one text, so that the excluded ones would win."""
    row, folder = recorded(0, scores=(Score(1.0), EXCLUDED, EXCLUDED))
    (problem,) = read_lines(folder.path / row["table"])
    assert (problem["majority_votes"], row["maj_at_k"], row["maj_at_k_bootstrap"]) == (1, 1.0, 1.0)
