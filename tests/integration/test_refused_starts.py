"""A new run that is refused leaves nothing behind: no run folder, nothing in MLflow's store or the registry."""

import json
import shutil
import socket

import pytest

from engine.run.files import seal
from support.commands import metronome, sets, state_of, with_cut_weights, without_tokenizer
from support.runs import base_settings, config_of, overrides
from tasks.tracking.tracked_run import check_store


def nothing(folder):
    return []


def checkpoints_of_another(folder):
    there = folder / "published/new/step-000001"
    there.mkdir(parents=True)
    (there / "state.json").write_text("{}")
    marker = {"step": 1, "run": "0" * 32, "files": {"state.json": 2}}
    (there / "_SUCCESS.json").write_text(json.dumps(seal(marker)))
    return [f"checkpoint.path={folder / 'published'}"]


def a_model(change):
    """A copy of the model, changed."""

    def prepare(folder):
        change(shutil.copytree(folder / "model", folder / "changed"))
        return [f"model.path={folder / 'changed'}"]

    return prepare


def without_chat_template(model):
    (model / "chat_template.jinja").unlink()


def with_another_vocabulary(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 40, "eos_token_id": 7}))
    (model / "generation_config.json").unlink()


REFUSED = {
    "checkpoints of another run": (checkpoints_of_another, [], "has checkpoints of another run: step-000001"),
    "a stop of several tokens": (nothing, ['rollout.stop=["ab"]'], "is 2 tokens of this tokenizer"),
    "no prompt": (nothing, ["rollout.max_new_tokens=1", "rollout.max_context=2"], "no prompt is left of"),
    "an evaluation without a prompt": (nothing, ["evaluate.max_context=2"], "no prompt is left of"),
    "no chat template": (
        a_model(without_chat_template),
        ["data.prompt_template=chat"],
        "has no chat template",
    ),
    "a model without a tokenizer": (a_model(without_tokenizer), [], "AutoTokenizer can't load a tokenizer there"),
    "a model with damaged weights": (a_model(with_cut_weights), [], "damaged safetensors file"),
    "another model's tokenizer": (a_model(with_another_vocabulary), [], "but the model's vocab_size is 40"),
    "another device": (nothing, ["platform.device=cuda"], 'platform.device = "cuda"'),
    "more than the machine's limits": (nothing, ["rollout.concurrency=10000000"], "open files: the run needs"),
    "more than the machine's memory": (
        nothing,
        ["train.micro_batch_tokens=100000000"],
        "memory of this machine: the run",
    ),
    "a store of MLflow that is none": (nothing, ["tracking.uri=gone://here"], "MLflow cannot use it"),
}


@pytest.fixture(scope="module")
def store(tiny_model, problems, tmp_path_factory):
    """An MLflow store without runs. MLflow takes seconds to make one."""
    folder = tmp_path_factory.mktemp("store")
    check_store(config_of(base_settings(tiny_model, problems, folder)), trains=True)
    return folder / "mlflow.db"


@pytest.fixture
def start(tiny_model, problems, store, tmp_path):
    """Starts the run "new" by `metronome train`, beside the store: exit code, output, and whether all is as before."""
    settings = base_settings(tiny_model, problems, tmp_path / "runs") | {"run.name": "new"}
    (tmp_path / "model").symlink_to(tiny_model)

    def command(*keys, flags=()):
        before = state_of(tmp_path / "runs")
        code, told = metronome("train", "infra/recipes/quickstart.toml", *flags, *sets(*overrides(settings), *keys))
        return code, told, state_of(tmp_path / "runs") == before

    (tmp_path / "runs").mkdir()
    shutil.copy(store, tmp_path / "runs/mlflow.db")
    return command


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_start_leaves_nothing(tmp_path, start, case):
    prepare, keys, message = REFUSED[case]
    code, told, same = start(*prepare(tmp_path), *keys)
    assert (code, told.count("error: ")) == (2, 1), told
    assert message in told
    assert same


def test_so_does_one_whose_address_is_taken(start, monkeypatch):
    monkeypatch.setattr("engine.orchestrator.server.FREE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, told, same = start(f"rollout.listen={address}")
    assert code == 2
    assert told.splitlines()[-1] == f"error: rollout.listen = '{address}': Address already in use"
    assert same


def test_so_do_a_replay_of_what_is_no_record_and_a_run_over_an_existing_one(tmp_path, start):
    (tmp_path / "record.msgpack").write_text("x")
    code, told, same = start(flags=["--replay", tmp_path / "record.msgpack"])
    assert (code, "not a record of train.record" in told, same) == (2, True, True), told
    (tmp_path / "runs/first").mkdir()
    (tmp_path / "runs/first/config.toml").write_text("")
    code, told, same = start("run.name=first")
    assert (code, "first already exists" in told, same) == (2, True, True), told
