import contextlib
import functools
import os
import re
from pathlib import Path

import pytest

from engine.config import Config
from engine.config.keys import flatten_keys, nest_keys
from engine.config.recipe import HOME, TEXT_KEYS, load_config
from engine.config.table import tables_in
from engine.errors import BadInput
from engine.run.folder import dump_config


def test_overrides_are_toml_or_strings():
    config = load_config(
        None, ["rollout.group_size=4", "train.betas=[0.8, 0.9]", "model.path=some/where", 'run.name="x"']
    )
    assert config.rollout.group_size == 4
    assert config.train.betas == (0.8, 0.9)
    assert config.model.path == "some/where"


@pytest.mark.parametrize("text", ["2026-11-25", "1e5", "true", "nan", "007", "0x1f", "3.0", "a-b", "_"])
def test_a_text_key_takes_what_is_written(text):
    assert load_config(None, [f"run.name={text}"]).run.name == text
    assert load_config(None, [f"run.name='{text}'"]).run.name == text
    for key in TEXT_KEYS - {"run.name", "data.prompt_template"}:
        with contextlib.suppress(BadInput):  # some texts are refused by a rule, but none as a number
            taken = functools.reduce(getattr, key.split("."), load_config(None, [f"{key}= {text} "]))
            assert taken == (os.path.abspath(text) if key == "checkpoint.path" else text)


def test_a_text_in_a_file_is_a_text(tmp_path):
    (tmp_path / "recipe.toml").write_text("[run]\nname = 3")
    with pytest.raises(BadInput, match="run.name = 3: must be a string"):
        load_config(tmp_path / "recipe.toml")


def test_no_count_and_no_size_is_larger_than_an_int32():
    counts = [
        f"{name}.{key}"
        for name, table in tables_in(Config)
        for key, field in table.model_fields.items()
        if field.annotation is int and "NAME" not in name
    ]
    assert len(counts) > 35
    for key in sorted(set(counts) - {"run.seed"}):
        with pytest.raises(BadInput, match=f"{key} = {2**31}: must be less than or equal to"):
            load_config(None, [f"{key}={2**31}"])
    assert load_config(None, [f"run.seed={2**62}"]).run.seed == 2**62


def test_a_resolved_config_reads_back_equal(tmp_path):
    config = load_config("infra/recipes/quickstart.toml", ["run.seed=5"])
    assert config.run.name.startswith("quickstart-")
    dump_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config


def test_arguments_of_vllm_are_a_table_of_any_names(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[rollout]\nengine = "vllm"\n[rollout.vllm]\nenforce_eager = true\ngpu_memory_utilization = 0.9\n'
        'compilation_config = { cudagraph_mode = "FULL", cudagraph_capture_sizes = [1, 2] }\n'
    )
    sets = ["rollout.vllm.gpu_memory_utilization=0.8", "rollout.vllm.compilation_config.cudagraph_mode=NONE"]
    config = load_config(recipe, sets)
    assert config.rollout.vllm == {
        "enforce_eager": True,
        "gpu_memory_utilization": 0.8,
        "compilation_config": {"cudagraph_mode": "NONE", "cudagraph_capture_sizes": [1, 2]},
    }
    dump_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config


def test_a_config_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    """As a kill or a full disk between truncation and write would."""
    dump_config(load_config(None, ["run.seed=7"]), tmp_path / "config.toml")

    def full(path, text):
        path.open("w").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        dump_config(load_config(None, ["run.seed=8"]), tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml").run.seed == 7


@pytest.mark.parametrize("recipe", sorted(path.name for path in (HOME / "infra/recipes").glob("*.toml")))
def test_recipes_that_ship_load_from_anywhere(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(f"infra/recipes/{recipe}").run.output == "runs"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.group_siz=4", "did you mean rollout.group_size?"),
        ("rolout.group_size=4", "did you mean rollout?"),
        ("train.steps=0", "train.steps = 0: must be greater than 0"),
        ("train.steps=abc", "train.steps = 'abc': must be an integer"),
        ("train.steps=1.5", "train.steps = 1.5: must be an integer"),
        ("train.learning_rate=fast", "train.learning_rate = 'fast': must be a number"),
        ("train.record=maybe", "train.record = 'maybe': must be true or false"),
        ("run.name=[3]", "run.name = '[3]'"),
        (
            "rollout.max_context=99999999999999999999",
            "max_context = 99999999999999999999: must be less than or equal to",
        ),
        ("train.prompts_per_step=1000000", "prompts_per_step = 1000000: must be less than or equal to 100000"),
        ("algorithm.loss=ppo", "'m2po' or 'bapo', or: expected a function of your own"),
        ("train.mode=async", "'sync', 'periodic', 'one_step_off' or 'bounded'"),
        ("nonsense", "expected table.key=value"),
        ("algorithm.bapo.shar=0.4", "unknown key algorithm.bapo.shar; did you mean algorithm.bapo.share?"),
        ("algorithm.bapo=3", "algorithm.bapo = 3"),
        ("rollout.group_size.x=4", "rollout.group_size = {'x': 4}"),
        ("algorithm..share=4", "expected table.key=value"),
        ("rollout.temperature=nan", "rollout.temperature"),
        ("rollout.temperature=0.001", "rollout.temperature"),
        ("train.betas=[0.9, 1.5]", "train.betas"),
        ("train.learning_rate=inf", "train.learning_rate"),
        ("run.name=..", "run.name"),
    ],
)
def test_each_mistake_has_one_message(override, said):
    with pytest.raises(BadInput) as error:
        load_config(None, [override])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_files(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        load_config(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\nsteps = 3")
    with pytest.raises(BadInput, match=r"broken\.toml: not valid TOML.*line 1"):
        load_config(broken)


def test_a_variant_has_its_bases_values_but_for_its_own(tmp_path):
    (tmp_path / "wide.toml").write_text("[train]\nsteps = 3\n[parallel]\ntensor = 2\ndata = 2\n")
    (tmp_path / "narrow.toml").write_text('base = "wide.toml"\n[parallel]\ntensor = 1\n')
    config = load_config(tmp_path / "narrow.toml", ["parallel.data=4"])
    assert (config.train.steps, config.parallel.tensor, config.parallel.data) == (3, 1, 4)
    assert config.run.name.startswith("narrow-")


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ('"none.toml"', "recipe .*none.toml: no such file"),
        ('"variant.toml"', "its base .*variant.toml is itself a variant; give a recipe without a base"),
        ('"../other.toml"', r"base = '\.\./other\.toml': must be a string, the file name of a recipe"),
        ("3", "base = 3: must be a string, the file name of a recipe in the same folder"),
    ],
)
def test_a_base_is_a_recipe_of_its_own(tmp_path, base, said):
    (tmp_path / "variant.toml").write_text(f"base = {base}\n")
    with pytest.raises(BadInput, match=said):
        load_config(tmp_path / "variant.toml")


def test_the_config_of_a_run_names_the_users_files_from_every_folder(tmp_path, monkeypatch):
    (tmp_path / "here/math").mkdir(parents=True)
    (tmp_path / "here/gsm8k").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("train.jsonl", "held.jsonl", "my.py"):
        Path(name).touch()
    given = {
        "model.path": "owner/name",
        "data.train": '[{path = "train.jsonl"}, "openai/gsm8k:train", "data/addition_train.jsonl"]',
        "data.heldout": "held.jsonl",
        "evaluate.benchmark": "gsm8k, held.jsonl",
        "reward.function": "my.py:reward",
        "algorithm.loss": "my.py:loss",
        "checkpoint.path": "not/there/yet",
    }
    config = load_config(None, [f"{key}={value}" for key, value in given.items()])
    here = tmp_path / "here"
    sets = [one.path for one in config.data.sets]
    assert sets == [f"{here}/train.jsonl", "openai/gsm8k:train", "data/addition_train.jsonl"]
    assert (config.data.heldout, config.evaluate.benchmark) == (f"{here}/held.jsonl", f"gsm8k,{here}/held.jsonl")
    assert (config.reward.function, config.algorithm.loss) == (f"{here}/my.py:reward", f"{here}/my.py:loss")
    assert config.model.path == "owner/name"
    assert config.checkpoint.path == f"{here}/not/there/yet"
    for place in ("s3://bucket/folder", "~/kept", ""):
        assert load_config(None, [f"checkpoint.path={place}"]).checkpoint.path == place
    dump_config(config, tmp_path / "config.toml")
    monkeypatch.chdir(tmp_path)
    assert load_config(tmp_path / "config.toml") == config
    assert load_config(None, ["reward.function=math"]).reward.function == "math"
    monkeypatch.chdir(here)  # it has a folder `math`, as a module that is a package has
    assert load_config(None, ["reward.function=math:reward"]).reward.function == "math:reward"
    assert load_config(None, [f"data.train={'d' * 5000}"]).data.train == "d" * 5000  # no system takes such a name


# mistakes and where they were made


@pytest.fixture
def refusal(tmp_path):
    """The message of a recipe and overrides that are refused, and the recipe's path."""

    def said(text, *overrides):
        (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(BadInput) as error:
            load_config(tmp_path / "mine.toml", overrides)
        return str(error.value)

    return said


RECIPE = "[rollout]\nmax_context = 64\nmax_new_tokens = 16\n"


@pytest.mark.parametrize(
    ("text", "overrides", "begins"),
    [
        (RECIPE, ["train.steps=-1"], "--set: train.steps = -1: "),
        (RECIPE, ["train.stepz=1"], "--set: unknown key train.stepz; did you mean train.steps?"),
        (RECIPE, ["rollout.max_context=8"], "--set: rollout.max_new_tokens (16) must be below rollout.max_context (8)"),
        (RECIPE, ["rollout.max_context.x=8"], "--set: rollout.max_context.x = 8: rollout.max_context = 64 is not a"),
        (RECIPE, ["run.name=a/b"], "--set: run.name = 'a/b': expected letters, digits, dots"),
        (RECIPE + "[train]\nsteps = -1\n", ["rollout.group_size=4"], "{file}: train.steps = -1: "),
        (RECIPE + "[train]\nsteps = -1\n", [], "{file}: train.steps = -1: "),
        ("[rollout]\nmax_context = 8\nmax_new_tokens = 16\n", ["train.steps=1"], "{file}: rollout.max_new_tokens (16)"),
        ("[rollout]\nmax_context = 8\nmax_new_tokens = 16\n", ["train.steps=-1"], "--set: train.steps = -1: "),
    ],
)
def test_a_mistake_of_set_is_blamed_on_set_and_one_of_the_file_on_the_file(refusal, tmp_path, text, overrides, begins):
    assert refusal(text, *overrides).startswith(begins.format(file=tmp_path / "mine.toml"))


@pytest.mark.parametrize("name", ["a b", ".hidden", "a/b", "é"])
def test_a_name_that_can_not_be_is_refused_in_words(name):
    with pytest.raises(BadInput) as error:
        load_config(None, [f"run.name={name}"])
    assert "expected letters, digits, dots, hyphens and underscores" in str(error.value)
    assert not re.search(r"[\[^$*]|pattern", str(error.value))


# dotted names


def test_keys_and_trees_are_each_others_reverse():
    tree = {"run": {"seed": 0}, "algorithm": {"loss": "bapo", "bapo": {"low": [0.5, 0.6]}}, "empty": {}}
    flat = {"run.seed": 0, "algorithm.loss": "bapo", "algorithm.bapo.low": [0.5, 0.6], "empty": {}}
    assert flatten_keys(tree) == flat
    assert nest_keys(flat, "") == tree
    with pytest.raises(BadInput, match=r"my\.toml: algorithm\.bapo\.share = 0\.4: algorithm\.bapo = 3 is not a table"):
        nest_keys({"algorithm.bapo": 3, "algorithm.bapo.share": 0.4}, "my.toml")


def test_an_empty_table_takes_keys_and_stays_as_it_was():
    flat = {"stages": {}, "stages.judge.gives": ["quality"]}
    assert nest_keys(flat, "") == {"stages": {"judge": {"gives": ["quality"]}}}
    assert flat["stages"] == {}


# several reward functions

REWARDS = """
[reward]
timeout_s = 5

[[reward.functions]]
function = "math"

[[reward.functions]]
function = "mine.py:form"
weight = 0.2
name = "format"
"""


def test_functions_have_weights_and_names_and_take_the_place_of_the_default(tmp_path):
    (tmp_path / "recipe.toml").write_text(REWARDS)
    reward = load_config(tmp_path / "recipe.toml").reward
    assert [(one.function, one.weight, one.name) for one in reward.named] == [
        ("math", 1.0, "math"),
        ("mine.py:form", 0.2, "format"),
    ]
    assert (reward.function, reward.label, reward.uses_math) == ("", "1 * math + 0.2 * mine.py:form", True)


def test_a_run_folders_config_reads_the_same(tmp_path):
    (tmp_path / "recipe.toml").write_text(REWARDS)
    config = load_config(tmp_path / "recipe.toml", ["run.name=x"])
    dump_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config
