"""The inputs of a run besides settings and prompts: base weights, tokenizer, and the user's own code."""

import shutil
import sys
from contextlib import nullcontext
from importlib.util import spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import BadInput
from engine.run.run_file import read_run
from engine.run.run_inputs import check_model, record_inputs
from engine.run.user_code import find_code
from support.run_folders import a_checkpoint
from support.runs import config_of

REWARD = "def reward(prompt, responses): return [1.0]\n"
FLIPPED = 100
"""A byte of the weights that is changed."""


@pytest.fixture
def world(settings, tmp_path, tiny_model):
    """(config of a run with a reward and a gradient control of its own and kl_coef = 0, its folder)"""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    code = tmp_path / "code"
    code.mkdir()
    (code / "my.py").write_text(REWARD)
    (code / "control.py").write_text("def control(step): return 1.0\n")
    keys = {
        "reward.function": f"{code / 'my.py'}:reward",
        "algorithm.gradient_control": f"{code / 'control.py'}:control",
    }
    config = config_of(settings | {"model.path": str(model), "algorithm.kl_coef": 0} | keys)
    a_checkpoint(config.folder / "checkpoints", 1)
    return config, config.folder


def accepting(config, *parts):
    return config.model_copy(update={"run": config.run.model_copy(update={"accept": parts})})


def change(folder: Path, part: str) -> None:
    if part == "weights":
        (file,) = (folder / "model").glob("*.safetensors")
        found = bytearray(file.read_bytes())
        found[-FLIPPED] ^= 1
        file.write_bytes(found)
    elif part == "tokenizer":
        (folder / "model/chat_template.jinja").write_text("another")
    else:
        file = folder / {"reward": "code/my.py", "algorithms": "code/control.py"}[part]
        file.write_text(file.read_text() + "# changed\n")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("weights", r"the weights or the config\.json of the base model \(model\.path\) changed"),
        (
            "tokenizer",
            "the tokenizer of model.path, .*or its end-of-sequence tokens changed since the run was trained with it",
        ),
        (
            "reward",
            r"the code of the reward or of the program changed since .*\(a copy is in .*/code/reward-[0-9a-f]{12}\)",
        ),
        ("algorithms", "the code of the advantage, the loss or the gradient control changed"),
    ],
)
def test_what_makes_the_numbers_may_not_change_unnoticed(world, tmp_path, part, said):
    config, folder = world
    record_inputs(config)
    before = read_run(folder).inputs
    record_inputs(config)
    change(tmp_path, part)
    with pytest.raises(BadInput, match=rf"{said}.*run\.accept=\[.{part}.\]"):
        record_inputs(config)
    with pytest.raises(BadInput, match=said) if part in ("weights", "tokenizer") else nullcontext():
        check_model(folder, config, Path(config.model.path))  # the run's processes have loaded the copies of its code
    other = "reward" if part != "reward" else "tokenizer"
    with pytest.raises(BadInput, match=said):
        record_inputs(accepting(config, other))
    assert read_run(folder).inputs == before
    check_model(folder, accepting(config, part), Path(config.model.path))
    record_inputs(accepting(config, part))
    after = read_run(folder).inputs
    assert {one for one in before if before[one] != after[one]} == {part}
    record_inputs(config)  # from now on it is the run's


def test_code_that_lies_elsewhere_is_the_runs_if_its_content_is(world, tmp_path):
    config, folder = world
    record_inputs(config)
    before = read_run(folder).inputs
    shutil.move(tmp_path / "code", tmp_path / "elsewhere")
    own = {"reward": f"{tmp_path}/elsewhere/my.py:reward", "algorithm": f"{tmp_path}/elsewhere/control.py:control"}
    moved = config.model_copy(
        update={
            "reward": config.reward.model_copy(update={"function": own["reward"]}),
            "algorithm": config.algorithm.model_copy(update={"gradient_control": own["algorithm"]}),
        }
    )
    record_inputs(moved)
    assert read_run(folder).inputs == before
    (tmp_path / "elsewhere/my.py").write_text(REWARD + "# changed\n")
    with pytest.raises(BadInput, match="the code of the reward or of the program changed"):
        record_inputs(moved)


def test_an_evaluation_compares_what_its_figures_depend_on(world, tmp_path):
    config, folder = world
    model = Path(config.model.path)
    record_inputs(config)
    for policy in (folder / "policy", folder / "exported/step-000002"):
        shutil.copytree(model, policy)
        check_model(folder, config, policy)
        (policy / "tokenizer.json").write_text("{}")
        with pytest.raises(BadInput, match="the tokenizer"):
            check_model(folder, config, policy)
    check_model(folder, config, tmp_path)  # another model is compared with nothing
    change(tmp_path, "weights")
    with pytest.raises(BadInput, match="the weights"):
        check_model(folder, config, model)
    check_model(tmp_path / "elsewhere", config, model)  # no run has recorded anything


def test_the_run_folder_keeps_the_code_and_a_setting_that_names_other_code_is_no_change(world):
    config, folder = world
    record_inputs(config)
    (reward,) = folder.glob("code/reward-*")
    assert [(file.name, file.read_text()) for file in reward.rglob("*.py")] == [("my.py", REWARD)]
    exact = config.model_copy(update={"reward": config.reward.model_copy(update={"function": "exact"})})
    record_inputs(exact)
    assert read_run(folder).inputs["reward"]["hash"] == ""


def test_the_code_of_a_module_is_found_without_running_its_package(tmp_path, monkeypatch):
    (tmp_path / "mine/deep").mkdir(parents=True)
    for name in ("mine/__init__.py", "mine/deep/__init__.py", "mine/deep/reward.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    above = [tmp_path / "mine/deep/__init__.py", tmp_path / "mine/__init__.py"]
    assert find_code("mine.deep.reward:reward") == [tmp_path / "mine/deep/reward.py", *above]
    assert find_code("mine.deep:reward") == above
    assert find_code("nowhere.to.be.found:reward") == find_code(f"{tmp_path}/none.py:reward") == []
    (tmp_path / "mine/__init__.py").unlink()
    assert find_code("mine.deep.reward:reward") == [tmp_path / "mine/deep/reward.py", above[0]]
    assert [file.name for file in find_code("json:loads")] == ["__init__.py"]


def test_the_code_of_a_package_that_is_installed_to_be_edited_is_found(tmp_path, monkeypatch):
    """setuptools makes it known by a finder of its own, not by a folder in sys.path."""
    place = tmp_path / "src/edited"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise RuntimeError('imported')")
    (place / "reward.py").write_text("")

    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, place / "__init__.py") if name == "edited" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, SimpleNamespace(find_spec=find_spec)])
    assert find_code("edited.reward:reward") == [place / "reward.py", place / "__init__.py"]
