"""`metronome init`: what it writes is a recipe that the dry run accepts."""

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from engine.config.recipe import load_config
from engine.config.reference import MAIN_KEYS
from engine.config.schema import SCHEMA
from flows.cli import app

PROBLEMS = "data/addition_train.jsonl"


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
    (tmp_path / "own.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n' * 20)
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


def test_the_help_of_run_shows_the_keys_that_most_recipes_set():
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    assert len(MAIN_KEYS) == 12
    assert [key for key in MAIN_KEYS if f"{key}: " not in shown] == []
    assert 'When a step trains its groups: "sync", "periodic", "one_step_off", "bounded".' in shown
