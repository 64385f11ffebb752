"""What each shipped recipe trains and evaluates on, from rows in the published schema to a reward."""

import pytest

from engine.config.recipe import load_config
from engine.data.prepared import prepare_problems
from engine.data.prompts import encode_problems
from engine.data.tokenizer import Tokenizer
from engine.evaluation.benchmarks import read_benchmarks
from engine.reward.verifiers import exact, math
from engine.types import Response
from support.recipe_data import RECIPES, SHIPPED, with_data
from support.runs import ROOT, overrides

TOKENIZER = Tokenizer(ROOT / "data/quickstart_model")
REWARDS = {"math": math, "exact": exact}
PAPERS = [path for path in SHIPPED if path.parent.name == "papers"]


def answered(text):
    return Response(
        token_ids=(1,),
        logprobs=(-1.0,),
        versions=((0, 0),),
        loss_mask=(True,),
        finish_reason="stop",
        text=text,
        seed=None,
        instance="one",
    )


def right_and_wrong(config, prompt):
    """Rewards of the answer and of another, in the form that the prompt asks for."""
    if config.reward.function == "exact":
        form = "#{}"
    else:
        form = "So it is $\\boxed{{{}}}$." if "\\boxed{" in prompt.text else "We add.\nAnswer: {}"
    reward = REWARDS[config.reward.function]
    return [reward(prompt, answered(form.format(answer))).value for answer in (prompt.answer, "-17")]


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)
def test_the_rows_of_a_recipe_become_prompts_whose_answers_are_told_apart(recipe, tmp_path):
    config = load_config(recipe, overrides(with_data(recipe, tmp_path)))
    found = prepare_problems(config)
    assert not found.train.skipped
    assert found.heldout.rows
    sets = [found.train, *(one.problems for one in read_benchmarks(config))]
    for problems in sets:
        prompts = encode_problems(problems, TOKENIZER, config.data, config.rollout.max_context).prompts
        assert len(prompts) == len(problems.rows)
        assert right_and_wrong(config, prompts[0]) == [1, 0]
        if config.data.prompt_template == "chat":
            assert prompts[0].text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("recipe", PAPERS, ids=lambda path: path.stem)
def test_every_problem_of_a_paper_asks_for_an_answer_that_the_reward_finds(recipe, tmp_path):
    config = load_config(recipe, overrides(with_data(recipe, tmp_path)))
    for problems in (prepare_problems(config).train, *(one.problems for one in read_benchmarks(config))):
        (prompt, *_) = encode_problems(problems, TOKENIZER, config.data, 4096).prompts
        assert ("\\boxed{}" in prompt.text) + ('"Answer:"' in prompt.text) == 1


def test_an_evaluation_asks_as_the_training_does():
    """aime24.toml and the trainings of Periodic Asynchrony."""
    there = load_config(RECIPES / "aime24.toml")
    assert there.data.instruction == load_config(RECIPES / "papers/periodic-qwen3-8b-16npu.toml").data.instruction


@pytest.mark.parametrize("recipe", PAPERS, ids=lambda path: path.stem)
def test_instances_of_other_nodes_have_time_to_start(recipe):
    rollout = load_config(recipe).rollout
    if rollout.instances == 0:
        assert min(rollout.patience(met)[0] for met in (False, True)) >= 600
