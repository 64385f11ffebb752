"""`metronome try-reward`: what it scores, what it shows, and its exit codes."""

import json
from contextlib import nullcontext

import pytest
from typer.testing import CliRunner

from engine.config.recipe import load_config
from engine.data.prompts import prompt_id
from engine.errors import BadInput
from flows.cli import app
from support.commands import sets
from tasks.stages.input_checks import check_inputs

REWARD = """
import sys, time
from engine.reward import per_response

@per_response
def form(prompt, response):
    return {"score": prompt.answer in response.text, "chars": len(response.text), "tokens": len(response.token_ids)}

@per_response
def strict(prompt, response):
    return float(response.text == f"Total: {prompt.answer}")

def fails(completions, level, **columns):
    if columns["prompts"][0] == "2+2=":
        time.sleep(60)
    return [float("nan"), 1.0]
"""


@pytest.fixture
def tried(tmp_path, tiny_model):
    """Runs `metronome try-reward` on three problems; returns exit code, message, and the cells of the table's lines."""
    (tmp_path / "mine.py").write_text(REWARD)
    rows = [{"problem": f"{n}+{n}=", "answer": str(2 * n), "level": n} for n in (1, 2, 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(function, arguments=()):
        keys = [f"data.{name}={tmp_path}/rows.jsonl" for name in ("train", "heldout")]
        keys += [f"model.path={tiny_model}", "data.decontaminate=[]", "reward.timeout_s=1"]
        keys += [f"reward.function={tmp_path}/mine.py:{function}"]
        done = CliRunner().invoke(
            app, ["try-reward", "infra/recipes/quickstart.toml", *sets(*keys), *map(str, arguments)]
        )
        _, _, table = done.stdout.partition("\n\nthe first prompt as the model gets it:\n")[2].partition("\n\n")
        lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table.splitlines()]
        return done.exit_code, done.stderr or done.stdout, lines

    return run


def test_each_problem_is_tried_with_its_answer_and_a_wrong_one(tried):
    code, told, lines = tried("form", ["--rows", 2])
    assert code == 0
    assert told.startswith(
        "3 problems of 4 characters (4-4), 3 held out\n\nthe first prompt as the model gets it:\n1+1=\n"
    )
    assert lines.pop() == ["scores differ: 0, 1"]
    assert lines[0] == ["problem", "response", "score", "seconds", "metrics"]
    assert [line[:3] for line in lines[1:]] == [
        ["1+1=", "2", "1"],
        ["1+1=", "I do not know.", "0"],
        ["2+2=", "4", "1"],
        ["2+2=", "I do not know.", "0"],
    ]
    assert lines[1][4] == "chars 1; tokens 1"


def test_the_responses_of_a_run_go_to_their_own_problems(tried, tmp_path):
    rows = [{"prompt_id": prompt_id("3+3=", "6"), "response": "it is 6"}, {"response": "it is 2"}]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, lines = tried("form", ["--rows", 1, "--responses", tmp_path / "some.jsonl"])
    assert code == 0
    assert sorted(line[:3] for line in lines[1:-1]) == [
        ["1+1=", "it is 2", "1"],
        ["3+3=", "it is 2", "0"],
        ["3+3=", "it is 6", "1"],
    ]


def test_a_reward_that_fails_or_hangs_is_shown_and_ends_with_code_1(tried):
    code, _, lines = tried("fails", ["--rows", 2])
    assert code == 1
    assert [line[2] for line in lines[1:5]] == ["error", "error", "timeout", "timeout"]
    (failed,), (late,) = lines[5:]
    assert failed.startswith("error: 2 of 4 responses: ")
    assert "returned nan for response 0" in failed
    assert late == "error: 2 of 4 responses: no score within 1 s"


@pytest.mark.parametrize("arguments", [(), ("--response", "It is 2.", "--response", "It is 3.")])
def test_equal_scores_say_what_they_mean_and_what_to_give(tried, arguments):
    code, _, lines = tried("strict", ["--rows", 1, *arguments])
    assert code == 0
    (said,) = lines[-1]
    assert said.startswith("all scores are equal (0), and a group of equal scores teaches nothing.")
    assert "give --response TEXT as the model should write it" in said


def test_a_program_is_refused_and_rows_without_an_answer_are_said_with_their_columns(tried, tmp_path):
    code, told, _ = tried("form", ["--set", "rollout.program=mine.py:program"])
    assert (code, "rollout.program = 'mine.py:program': a program makes each response in turns" in told) == (2, True)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    _, told, lines = tried("form", ["--rows", 1])
    assert "rows.jsonl, 1 row: no answer is found in its columns prompt, completion, so prompt.answer is empty" in told
    assert "its column completion, is not read" in told


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("absent", (), "mine.py defines no absent"),
        ("form", ("--response", "2", "--responses", "FILE"), "--response gives texts, --responses a file"),
        ("form", ("--responses", "absent.jsonl"), "--responses absent.jsonl: can't be read"),
        ("form", ("--responses", "FILE"), 'given.jsonl, line 2: expected an object with a text "response"'),
        ("form", ("--responses", "UNKNOWN"), "rows.jsonl has the prompt_id ffff"),
    ],
)
def test_bad_input_is_one_message_and_code_2(tried, tmp_path, function, arguments, message):
    (tmp_path / "given.jsonl").write_text('{"response": "2"}\n{"text": "2"}\n')
    (tmp_path / "unknown.jsonl").write_text('{"response": "2", "prompt_id": "ffff"}\n')
    given = {"FILE": f"{tmp_path}/given.jsonl", "UNKNOWN": f"{tmp_path}/unknown.jsonl"}
    code, error, lines = tried(function, [given.get(one, one) for one in arguments])
    assert (code, lines) == (2, [])
    assert message in error
    assert error.count("\n") == 1


BEFORE = """
import time
from engine.types import Score

def ends(prompt, responses):
    return [float(one.text.split()[-1] == prompt.answer) for one in responses]

def careful(prompt, responses):
    assert len(responses) == 4  # the group's size
    return [float(one.text == prompt.answer) for one in responses]

def hangs(prompt, responses):
    time.sleep(60)

def leaves_out(prompt, responses):
    return [Score(0.0, excluded=True) for one in responses]
"""


@pytest.mark.parametrize(
    ("function", "refusal", "line"),
    [
        (
            "ends",
            "raised IndexError: .*line 6.*before the start, .*ends was called with '1.1=', its answer and an em",
            "",
        ),
        ("careful", "", "careful was called with '1+1=', its answer and an empty response: scores 1 and 0\n"),
        ("hangs", "", "no score within 1 s\n"),
        ("leaves_out", "", "scores excluded and excluded; equal, see metronome try-reward\n"),
    ],
)
def test_a_run_calls_its_reward_on_a_problem_before_anything_starts(
    tmp_path, tiny_model, capsys, function, refusal, line
):
    (tmp_path / "mine.py").write_text(BEFORE)
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n')
    keys = [f"data.{name}={tmp_path}/rows.jsonl" for name in ("train", "heldout")]
    keys += [f"model.path={tiny_model}", "data.decontaminate=[]", "reward.timeout_s=1", "rollout.group_size=4"]
    keys += [f"run.output={tmp_path}", f"reward.function={tmp_path}/mine.py:{function}", "rollout.max_context=64"]
    config = load_config(None, [*keys, "rollout.max_new_tokens=16"])
    for _ in range(2):
        with pytest.raises(BadInput, match=refusal) if refusal else nullcontext():
            check_inputs(config)
    assert capsys.readouterr().out.endswith(line)
