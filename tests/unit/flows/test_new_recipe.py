"""`metronome init`: what it writes is a recipe that the dry run accepts."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from engine.config.keys import flatten_keys
from engine.config.recipe import load_config
from engine.config.reference import MAIN_KEYS
from engine.config.schema import SCHEMA
from flows.cli import app
from support.runs import ROOT

PROBLEMS = "data/addition_train.jsonl"
SMOLLM2 = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "layer_types": ["full_attention"] * 30,
}


def init(*flags, answers=None):
    return CliRunner().invoke(app, ["init", *map(str, flags)], input=answers)


def checked(path):
    """The config of a recipe that the schema and the dry run accept."""
    jsonschema.validate(tomllib.loads(path.read_text()), json.loads(SCHEMA.read_text()))
    done = CliRunner().invoke(app, ["run", str(path), "--set", "run.dry=true"])
    assert done.exit_code == 0, done.output
    assert "Nothing was started" in done.output
    return load_config(path)


def test_a_recipe_for_this_machine_from_flags(tmp_path):
    path = tmp_path / "own.toml"
    flags = ("--model", "data/quickstart_model", "--data", PROBLEMS, "--reward", "exact", "--device", "cpu")
    done = init(path, *flags)
    assert (done.exit_code, done.output.splitlines()[0]) == (
        0,
        f"{path} is written, and the dry run accepts it. Next:",
    )
    assert re.search(r"\nOn this machine: about \S+ \w+ a step", done.output)
    config = checked(path)
    assert (config.model.path, config.data.train, config.reward.function) == (
        "data/quickstart_model",
        PROBLEMS,
        "exact",
    )
    lines = path.read_text().splitlines()
    assert lines[0] == f"#:schema {SCHEMA.as_uri()}"
    assert "docs/" not in path.read_text(), "a wheel has no such folder"
    above = [line for line, key in zip(lines, lines[1:], strict=False) if " = " in key and not key.startswith("#")]
    assert len(above) > 12
    assert all(line.startswith("# ") for line in above), "each key has its meaning above it"
    again = init(path, *flags)
    assert (again.exit_code, again.stderr) == (
        2,
        f"error: {path}: it is there already; give another file, or delete it\n",
    )


def test_a_recipe_for_npus_from_answers(tmp_path):
    path = tmp_path / "own.toml"
    done = init(path, answers=f"Qwen/Qwen3-1.7B\n{PROBLEMS}\n\nnpu\n8\n")
    assert done.exit_code == 0, done.output
    config = checked(path)
    assert (config.rollout.engine, config.platform.device) == ("vllm", "npu")
    assert config.parallel.ranks + config.rollout.instances * config.rollout.tensor == 8
    assert config.rollout.devices == [4, 5, 6, 7]


@pytest.mark.parametrize(("model", "devices"), [("Qwen/Qwen3-1.7B", 1), ("Qwen/Qwen3-8B", 16)])
def test_one_device_is_shared_and_a_large_model_is_split(tmp_path, model, devices):
    path = tmp_path / "own.toml"
    given = {"--model": model, "--data": PROBLEMS, "--reward": "math", "--devices": devices}
    given["--device"] = "cuda" if devices == 1 else "npu"
    done = init(path, *[part for pair in given.items() for part in pair])
    assert done.exit_code == 0, done.output
    config = checked(path)
    assert config.rollout.share_devices == (devices == 1)
    assert config.parallel.tensor == (1 if devices == 1 else 4)


@pytest.mark.parametrize(("reward", "told"), [("math", "boxed"), ("exact", "#"), ("own.py:reward", "")])
def test_the_model_is_told_where_a_built_in_reward_looks(tmp_path, monkeypatch, reward, told):
    model = Path("data/quickstart_model").resolve()  # a small one, for which any disk has room
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def reward(prompt, responses): return [1.0 for _ in responses]")
    (tmp_path / "own.jsonl").write_text(
        "".join(f'{{"problem": "1 + {one}", "answer": "{one + 1}"}}\n' for one in range(20))
    )
    flags = ("--model", model, "--data", "own.jsonl", "--reward", reward, "--device", "cpu")
    done = init("own.toml", *flags)
    assert done.exit_code == 0, done.output
    instruction = load_config("own.toml").data.instruction
    assert told in instruction
    assert bool(instruction) == bool(told)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"--model": ""}, "metronome init: --model is missing, and nobody answers the question"),
        ({"--devices": 3}, "--devices 3: expected an even number up to 16"),
        ({"--devices": 1}, "--devices 1: expected an even number up to 16 of one node, or one GPU"),
        ({"--model": "Qwen/Qwen2.5-32B", "--devices": 2}, "too little memory on a trainer rank"),
    ],
)
def test_what_it_cannot_write_is_one_error(tmp_path, changed, told):
    path = tmp_path / "own.toml"
    given = {"--model": "Qwen/Qwen3-1.7B", "--data": PROBLEMS, "--reward": "math", "--device": "npu", "--devices": 8}
    done = init(path, *[part for pair in (given | changed).items() for part in pair])
    assert done.exit_code == 2, done.output
    assert told in done.stderr
    assert not path.exists()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The current folder is one with the files that README's recipe names, and a model with SmolLM2's sizes."""
    monkeypatch.chdir(tmp_path)
    code, recipe = re.findall(r"```(?:python|toml)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    Path("my_reward.py").write_text(code)
    Path("my.toml").write_text(recipe)
    for number, name in enumerate(("train", "heldout")):
        rows = [{"problem": f"{one}+{number}=?", "answer": str(one + number)} for one in range(number, 40, 2)]
        Path(f"my_{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = Path(load_config("my.toml").model.path)
    shutil.copytree(ROOT / "data/quickstart_model", model)
    sizes = json.loads((model / "config.json").read_text()) | SMOLLM2
    (model / "config.json").write_text(json.dumps(sizes))
    return model


def test_the_readmes_recipe_is_what_init_writes_and_its_commands_work(own):
    flags = ("--model", own, "--data", "my_train.jsonl", "--heldout", "my_heldout.jsonl")
    done = init("written.toml", *flags, "--reward", "my_reward.py:reward")  # no terminal: the device is the default
    assert done.exit_code == 0, done.output
    written, readme = (flatten_keys(load_config(file).model_dump()) for file in ("written.toml", "my.toml"))
    named = flatten_keys(tomllib.loads(Path("my.toml").read_text())).keys() - {"data.system"}
    assert {key: written[key] for key in named} == {key: readme[key] for key in named}
    tried = CliRunner().invoke(app, ["try-reward", "my.toml"])
    assert (tried.exit_code, "0.99" in tried.output) == (0, True), tried.output
    checked(Path("my.toml"))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"--data": "missing.jsonl"}, "missing.jsonl: no such file"),
        ({"--heldout": "missing.jsonl"}, "missing.jsonl: no such file"),
        ({"--reward": "missing.py:reward"}, "no such file: missing.py"),
        ({"--reward": "my_reward.py:other"}, "other"),
        ({"--model": "no_tokenizer"}, "no_tokenizer"),
    ],
)
def test_init_reads_the_files_that_it_names(own, changed, told):
    shutil.copytree(own, "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    given = {
        "--model": own,
        "--data": "my_train.jsonl",
        "--heldout": "my_heldout.jsonl",
        "--reward": "my_reward.py:reward",
    }
    done = init("new.toml", *[part for pair in (given | changed).items() for part in pair])
    assert (done.exit_code, told in done.stderr) == (2, True), done.output
    assert not Path("new.toml").exists()


def test_the_help_of_run_shows_the_keys_that_most_recipes_set():
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    assert len(MAIN_KEYS) == 12
    assert [key for key in MAIN_KEYS if f"{key}: " not in shown] == []
    assert 'When a step trains its groups: "sync", "periodic", "one_step_off", "bounded".' in shown
