from pathlib import Path

import pytest

from engine.errors import BadInput
from engine.reward import per_response
from engine.types import Prompt
from engine.verifier.reward_function import load_reward
from support.verifier_calls import response


def test_built_ins_are_per_response():
    assert load_reward("math").per_response
    assert load_reward("exact").per_response


def test_file_is_loaded_by_its_path_and_may_import_its_neighbours(tmp_path):
    (tmp_path / "reward_neighbour.py").write_text("VALUE = 0.25")
    file = tmp_path / "my-reward.py"  # no identifier, so no module could be imported by that name
    file.write_text("import reward_neighbour\ndef score(prompt, responses):\n    return [reward_neighbour.VALUE]\n")
    reward = load_reward(f"{file}:score")
    assert reward.call(None, []) == [0.25]
    assert not reward.per_response
    assert reward.file == str(file)


def test_module_is_imported():
    assert load_reward("engine.reward.verifiers:exact").per_response
    assert load_reward("operator:eq").call(1, 1) is True


def test_per_response_decorator_keeps_the_function():
    @per_response
    def score(prompt, response):
        return 1.0

    assert score(None, None) == 1.0
    assert score.per_response


@pytest.mark.parametrize(
    ("prompt", "text", "value"),
    [
        ("1+1=", "<think>easy</think><answer>2</answer>", 1.0),
        ("1+1=<think>\n", "easy\n</think>\n<answer>2</answer>", 1.0),  # the template has begun the thought
        ("1+1=", "easy</think><answer>2</answer>", 0.0),
        ("1+1=<think>\n", "easy", 0.0),
    ],
)
def test_the_documented_reward_for_a_format_knows_what_the_prompt_has_begun(tmp_path, prompt, text, value):
    page = (Path(__file__).resolve().parents[3] / "docs/data.md").read_text()
    file = tmp_path / "my_format.py"
    file.write_text(page[page.index("# my_format.py") :].partition("```")[0])
    reward = load_reward(f"{file}:reward")
    assert reward.per_response
    assert reward.call(Prompt("id", "1+1=", "2", (), text=prompt), response(text)) == value


@pytest.mark.parametrize("spec", ["maths", "", ":f", "file.py:", "file.py", "module:not a name"])
def test_bad_spec(spec):
    with pytest.raises(BadInput, match='reward.function = ".*": expected "math", "exact"'):
        load_reward(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"reward\.py defines no score"),
        ("score = 3", r"score in .*reward\.py is int, expected a function"),
        ("import absent_module", r"can't be loaded: ModuleNotFoundError: .* 'absent_module' \(.*reward\.py, line 1\)"),
        ("\n\nraise OSError('no disk')", r"can't be loaded: OSError: no disk \(.*reward\.py, line 3\)"),
        ("def score(:", r"can't be loaded: SyntaxError: .*\(reward\.py, line 1\)"),
    ],
)
def test_broken_file(tmp_path, text, message):
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(BadInput, match=message) as raised:
        load_reward(f"{tmp_path}/reward.py:score")
    assert f'reward.function = "{tmp_path}/reward.py:score"' in str(raised.value)


def test_missing_file_and_module(tmp_path):
    with pytest.raises(BadInput, match=r"no such file: .*absent\.py"):
        load_reward(f"{tmp_path}/absent.py:score")
    with pytest.raises(BadInput, match="module absent.module can't be imported: .*No module named 'absent'$"):
        load_reward("absent.module:score")
    with pytest.raises(BadInput, match="defines no absent"):
        load_reward("engine.reward.verifiers:absent")
