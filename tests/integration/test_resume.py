"""A resumed run stays what it was, and a resume that is refused changes nothing: not a byte of the run's folder, and
neither state nor tags of MLflow's run, nor the registry."""

import hashlib
import json
import re
import shutil
import socket
import subprocess
import sys

import pytest
from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as RegistryStore
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as TrackingStore

from engine.run.files import read_lines, seal
from engine.run.folder import RunFolder
from engine.run.lock import hold_lock
from engine.run.run_file import read_run
from support.commands import metronome, sets, state_of, with_cut_weights, without_tokenizer
from support.runs import ROOT, base_settings
from tasks.tracking.registered_policies import registered_name

STORES = (TrackingStore, RegistryStore)


@pytest.fixture(scope="module")
def trained(tiny_model, problems, tmp_path_factory):
    """The output folder of a finished run of `metronome train`, begun with a recipe of its own."""
    folder = tmp_path_factory.mktemp("resume")
    model = shutil.copytree(tiny_model, folder / "model")
    data = shutil.copy(problems, folder / "problems.jsonl")
    keys = base_settings(model, data, folder / "runs") | {
        "run.name": "first",
        "train.steps": 2,
        "train.record": True,
        "checkpoint.every": 1,
    }
    tables = {}
    for key, value in keys.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")
    text = "".join(f"[{table}]\n" + "\n".join(lines) + "\n" for table, lines in tables.items())
    (folder / "mine.toml").write_text(text)
    code, told = metronome("train", folder / "mine.toml")
    assert code == 0, told
    return folder


@pytest.fixture
def again(trained):
    """Runs `metronome train --resume`; the run is afterwards put back as it was."""
    output = trained / "runs"
    kept = shutil.copytree(output, trained / "kept")

    def command(*keys, recipe=None, command="train"):
        place = sets(f"run.output={output}", "run.name=first")
        return metronome(command, *([recipe] if recipe else []), "--resume", *place, *sets(*keys))

    yield command
    shutil.rmtree(output)
    kept.rename(output)
    for store in STORES:  # MLflow's connections in this process still have the file that is gone
        for engine in store._engine_map.values():
            engine.dispose()


def damaged(name, text="x"):
    return lambda trained: (trained / "runs/first" / name).write_text(text)


def gone(name):
    return lambda trained: (trained / "runs/first" / name).unlink()


def harmed(harm):
    return lambda trained: harm(trained / "model")


def nothing(trained):
    pass


def other_data(trained):
    rows = list(read_lines(trained / "problems.jsonl"))
    (trained / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))


def other_content(trained):
    import torch
    from safetensors.torch import load_file, save_file

    file = next((trained / "model").glob("*.safetensors"))
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def other_tokenizer(trained):
    file = trained / "model/tokenizer.json"
    whole = json.loads(file.read_text())
    ids = whole["model"]["vocab"]
    ids["0"], ids["1"] = ids["1"], ids["0"]
    file.write_text(json.dumps(whole))


def other_positions(trained):
    """What a replay's checkpoints say under dynamic sampling."""
    for file in (trained / "runs/first/checkpoints").glob("*/state.json"):
        text = json.dumps(json.loads(file.read_text()) | {"prompt_position": None})
        file.write_text(text.replace('"dynamic_sampling": false', '"dynamic_sampling": true'))
        marker = json.loads((file.parent / "_SUCCESS.json").read_text())
        marker["files"]["state.json"] = file.stat().st_size
        marker["sha256"]["state.json"] = hashlib.sha256(file.read_bytes()).hexdigest()
        (file.parent / "_SUCCESS.json").write_text(json.dumps(seal(marker)))
    config = trained / "runs/first/config.toml"
    config.write_text(config.read_text().replace("dynamic_sampling = false", "dynamic_sampling = true"))


REFUSED = {
    "a fixed key": (nothing, ["rollout.group_size=8"], "rollout.group_size is 8, but the run has 4"),
    "fewer steps": (nothing, ["train.steps=1"], "has trained 2 steps already, train.steps is 1; give train.steps = 2"),
    "a setting of steps that are trained": (
        nothing,
        ["train.record=false", "train.learning_rate=0.5"],
        "all 2 steps are trained, so train.learning_rate = 0.5 would have no effect; also give train.steps",
    ),
    "an unknown key": (nothing, ["train.stepz=4"], "unknown key train.stepz"),
    "a wrong value": (nothing, ["train.learning_rate=-1"], "train.learning_rate"),
    "keys that do not fit": (nothing, ["rollout.partial=true"], "rollout.partial"),
    "another address": (nothing, ["rollout.listen=here"], "expected host:port"),
    "another device": (nothing, ["platform.device=cuda"], 'platform.device = "cuda"'),
    "another layout": (nothing, ["parallel.tensor=3"], "the layout does not fit the model"),
    "a model that is gone": (nothing, ["model.path=gone"], "no config.json there"),
    "a reward that is gone": (nothing, ["reward.function=gone.py:reward"], "gone.py"),
    "other prompts by a key": (
        nothing,
        ["rollout.max_new_tokens=4", "rollout.max_context=6", "train.steps=3"],
        "Leave out those that decide about prompts",
    ),
    "another record": (nothing, ["train.micro_batch_tokens=512", "train.steps=3"], "but the record was taken with"),
    "another store of MLflow": (nothing, ["tracking.uri=sqlite:///gone.db"], "there is no such store"),
    "a store that is none": (nothing, ["tracking.uri=gone://here"], "is not in this store"),
    "another experiment": (nothing, ["tracking.experiment=other"], "is in 'metronome' and stays there"),
    "a store that is none, of a run that MLflow does not know": (
        gone("mlflow_run_id"),
        ["tracking.uri=gone://here"],
        "MLflow cannot use it",
    ),
    "a stop of several tokens": (nothing, ['rollout.stop=["ab"]'], "is 2 tokens of this tokenizer"),
    "an evaluation without a prompt": (nothing, ["evaluate.max_context=2"], "no prompt is left of"),
    "more than the machine's limits": (nothing, ["rollout.concurrency=10000000"], "open files: the run needs"),
    "a model without a tokenizer": (harmed(without_tokenizer), [], "AutoTokenizer can't load a tokenizer"),
    "a model with damaged weights": (harmed(with_cut_weights), [], "damaged safetensors file"),
    "other problems": (other_data, [], "the content of data.train"),
    "another tokenizer": (other_tokenizer, [], "the tokenizer of model.path, its chat template"),
    "another base model": (other_content, [], "the weights or the config.json of the base model (model.path) changed"),
    "a damaged config": (damaged("config.toml"), [], "its end is missing"),
    "a damaged run.json": (damaged("run.json"), [], "what is known of the run can't be read"),
    "damaged steps": (damaged("steps.jsonl", "x\n"), [], "steps.jsonl, line 1"),
    "a position that is not known": (other_positions, [], "does not say how many prompts were used"),
    "a damaged record": (
        damaged("record.msgpack"),
        [],
        "record.msgpack is damaged and has only 0 of 6 groups of step 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_resume_changes_nothing(trained, again, case):
    prepare, keys, message = REFUSED[case]
    before = {
        file: file.read_bytes() for folder in ("model", ".") for file in (trained / folder).glob("*") if file.is_file()
    }
    prepare(trained)
    try:
        there = state_of(trained / "runs")
        code, told = again(*keys)
        assert (code, told.count("error: ")) == (2, 1), told
        assert message in told
        assert state_of(trained / "runs") == there
    finally:
        for file, content in before.items():
            file.write_bytes(content)


def test_a_run_that_another_process_holds_or_whose_address_is_taken_is_refused_as_it_is(trained, again, monkeypatch):
    monkeypatch.setattr("engine.orchestrator.server.FREE_S", 0.5)
    with hold_lock(trained / "runs/first/lock", "it", 0.0):
        there = state_of(trained / "runs")
        code, told = again()
        assert (code, "is in use by" in told, state_of(trained / "runs")) == (2, True, there)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        there = state_of(trained / "runs")
        code, told = again(f"rollout.listen=127.0.0.1:{taken.getsockname()[1]}")
    assert (code, told.splitlines()[-1].endswith("': Address already in use")) == (2, True)
    assert state_of(trained / "runs") == there


@pytest.mark.nightly
def test_the_pipeline_refuses_as_training_does(trained, again):
    """Inside its flow, since a deployment's form resumes runs, too."""
    before = (trained / "problems.jsonl").read_bytes()
    other_data(trained)
    files, tables = state_of(trained / "runs")
    command = [sys.executable, "-m", "flows.cli", "run", "--resume"]
    place = sets(f"run.output={trained / 'runs'}", "run.name=first")
    done = subprocess.run([*command, *place], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    (trained / "problems.jsonl").write_bytes(before)
    assert done.returncode == 2, done.stderr
    assert "the content of data.train" in done.stderr
    now, tables_now = state_of(trained / "runs")
    assert set(now) - set(files) <= {"prefect", "prefect.log", ".flow-runs"}  # of the flow run and its server
    assert (files, tables) == ({name: now[name] for name in files}, tables_now)


def test_which_run_is_meant(trained):
    for keys, said in (
        ([f"run.output={trained / 'runs'}"], r"name the run to continue by --set run.name=NAME; the newest in.*first"),
        ([f"run.output={trained / 'none'}"], "has no run"),
        ([f"run.output={trained / 'none'}", "run.name=first"], "is not a run folder"),
    ):
        code, told = metronome("train", "--resume", *sets(*keys))
        assert code == 2
        assert re.search(said, told), told
    assert not (trained / "none").exists()


def test_a_resumed_run_is_the_run_with_the_keys_of_the_command(trained, again):
    own = RunFolder(trained / "runs/first").read_config()
    begun = read_run(trained / "runs/first").start
    assert (begun.recipe, begun.registered) == (str(trained / "mine.toml"), "metronome-mine")
    edited = (trained / "mine.toml").read_text().replace("learning_rate = 0.001", "learning_rate = 0.5")
    (trained / "edited.toml").write_text(edited)
    code, told = again("train.steps=3", "train.mode=periodic", recipe=trained / "edited.toml")
    assert code == 0, told
    assert "first continues with its own config.toml; changed by this command: train.steps = 3 (was 2)\n" in told
    assert (
        "edited.toml is not read again, so these have no effect: train.learning_rate = 0.5 (the run has 0.001);" in told
    )
    now = RunFolder(trained / "runs/first").read_config()
    assert now == own.model_copy(update={"train": own.train.model_copy(update={"steps": 3})})
    assert read_run(trained / "runs/first").start == begun
    assert [row["step"] for row in read_lines(trained / "runs/first/steps.jsonl")] == [0, 1, 2]
    assert registered_name(str(trained / "runs/first/config.toml"), now) == "metronome-mine"


def test_a_lost_folder_goes_on_only_with_what_its_checkpoints_were_trained_with(trained, again, tmp_path):
    """Of the run's recipe, since nothing else says what it was."""
    place = f"checkpoint.path={tmp_path / 'published'}"
    run = trained / "runs/first"
    shutil.copytree(run / "checkpoints", tmp_path / "published/first")
    shutil.rmtree(run)
    code, told = again(place)
    assert (code, "name its recipe" in told) == (2, True)
    for keys, message in ((["rollout.group_size=8"], "but the run has 4"), (["train.steps=1"], "has trained 2 steps")):
        there = state_of(trained / "runs")
        code, told = again(place, *keys, recipe=trained / "mine.toml")
        assert (code, message in told) == (2, True), told
        assert state_of(trained / "runs") == there
        assert not run.exists()
