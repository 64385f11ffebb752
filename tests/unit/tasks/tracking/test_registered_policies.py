"""Where a nightly run starts, against a real MLflow store."""

import re
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlflow
import pytest
from mlflow.types import DataType
from transformers import pipeline

from engine.config.recipe import find_file, load_config
from engine.data.loader import PromptLoader, sampling_seed
from engine.errors import BadInput
from engine.run.folder import dump_config
from engine.run.run_file import RunStart, update_run
from engine.run.served_model import REGISTERED
from engine.types import Prompt
from support.runs import config_of
from tasks.stages.input_checks import local_model
from tasks.tracking import tracked_run
from tasks.tracking.registered_policies import START_TAG, model_folder, registered_name, started_from

RECIPE = "infra/recipes/nightly.toml"


@pytest.fixture
def config(settings, tmp_path, monkeypatch):
    """That of the recipe, which lies below the current folder."""
    file = tmp_path / RECIPE
    file.parent.mkdir(parents=True)
    file.write_text(f'[data]\ntrain = "{settings["data.train"]}"\n')
    monkeypatch.chdir(tmp_path)
    return config_of(settings)


def register(config, name="metronome-nightly", alias=None, start="base"):
    """What a finished run leaves in the registry: a version of the model with the policy's folder,
    and how the run began."""
    (config.folder / tracked_run.RUN_ID).unlink(missing_ok=True)  # each is a night's run of its own
    with tracked_run.track_run(config):
        version = tracked_run.register_version(name, Path(config.model.path))
    client = mlflow.MlflowClient(tracked_run.tracking_uri(config))
    client.set_model_version_tag(name, version, START_TAG, start)
    if alias:
        client.set_registered_model_alias(name, alias, version)


def keep(config, start):
    """What the flow leaves in the run folder."""
    update_run(config.folder, start=start)
    dump_config(config, config.folder / "config.toml")


def first_batch(config):
    """Of forty prompts the first eight, each with the seed of its first response."""
    batch = PromptLoader([Prompt(str(n), "", "", (1,)) for n in range(40)], config.run.seed, 8).batch(0)
    return {(prompt.id, sampling_seed(config.run.seed, 0, prompt.id, 0)) for prompt in batch}


def test_nights_in_a_row(config, capsys):
    output = Path(config.run.output)
    own = {"recipe": RECIPE, "registered": "metronome-nightly"}
    assert started_from(config, RECIPE, "base") == (config, RunStart(**own))
    assert started_from(config, RECIPE, "latest")[0].model.path == config.model.path
    assert "no run has registered a policy of metronome-nightly yet" in capsys.readouterr().out
    with pytest.raises(BadInput, match="no run has registered a policy of metronome-nightly"):
        model_folder(config, RECIPE, "latest")
    assert model_folder(config, RECIPE, "").model.path == config.model.path

    register(config)
    with pytest.raises(BadInput, match="no version of metronome-nightly has the alias champion"):
        started_from(config, RECIPE, "champion")
    begun, start = started_from(config, RECIPE, "latest")
    assert Path(begun.model.path).name == "metronome-nightly-1"
    assert start == RunStart(start="latest", continued_from="models:/metronome-nightly/1", **own)
    for file in Path(config.model.path).iterdir():
        assert (Path(begun.model.path) / file.name).read_bytes() == file.read_bytes()

    register(config, alias="champion")
    register(config, "metronome-other")
    register(config)
    latest, champion = (Path(started_from(config, RECIPE, word)[0].model.path) for word in ("latest", "champion"))
    assert [path.name for path in (latest, champion)] == ["metronome-nightly-3", "metronome-nightly-2"]
    assert model_folder(config, RECIPE, "latest").model.path == str(latest)

    keep(begun, start)  # a run that began two nights ago, resumed now
    assert started_from(begun, RECIPE, "latest") == (begun, start)
    assert started_from(begun, "another.toml", "base") == (begun, start)  # by a command that says otherwise
    assert (
        registered_name(str(config.folder / "config.toml"), config) == "metronome-nightly"
    )  # as the recipe of another run

    (config.folder / "config.toml").unlink()
    shutil.rmtree(output / "mlartifacts")
    shutil.rmtree(output / "models")
    with pytest.raises(BadInput, match="the policy of metronome-nightly version 3 is registered at .* files are gone"):
        started_from(config, RECIPE, "latest")
    assert not (output / "models/metronome-nightly-3").exists()  # not half of it either


def test_two_flows_that_fetch_the_same_policy_at_once_get_it_whole(config, monkeypatch):
    register(config)
    download = mlflow.artifacts.download_artifacts
    both = threading.Barrier(2, timeout=60)

    def at_once(*arguments, **more):
        got = download(*arguments, **more)
        both.wait()
        return got

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", at_once)
    with ThreadPoolExecutor(2) as flows:
        found = list(flows.map(lambda _: Path(model_folder(config, RECIPE, "latest").model.path), range(2)))
    assert found[0] == found[1]
    policy = Path(config.model.path)
    assert {path.name for path in found[0].iterdir()} == {REGISTERED, *(path.name for path in policy.iterdir())}
    assert (found[0] / REGISTERED).read_text() == "models:/metronome-nightly/1\n"
    kept = [Path(config.run.output) / name for name in ("mlartifacts", "mlflow.db")]
    assert [path.stat().st_mode & 0o077 for path in kept] == [0, 0]  # as run folders
    assert [path.name for path in found[0].parent.iterdir()] == [found[0].name]


def test_runs_on_other_data_than_the_recipes_have_a_registered_model_of_their_own(config, tmp_path):
    recipe = "infra/recipes/quickstart.toml"

    def named(data):
        return registered_name(
            recipe, config.model_copy(update={"data": config.data.model_copy(update={"train": data})})
        )

    assert named(load_config(recipe).data.train) == "metronome-quickstart"
    assert named(str(find_file(load_config(recipe).data.train).resolve())) == "metronome-quickstart"
    assert named("my data/my-train.jsonl") == "metronome-quickstart-my-train"
    assert named("my data/my train.jsonl") == "metronome-quickstart-my-train-990062"  # another set than that
    assert named("s3://bucket/sums.parquet") == "metronome-quickstart-sums"
    assert named("agentica/DeepScaleR:train") == "metronome-quickstart-DeepScaleR"


def test_each_night_draws_other_prompts_and_goes_on_from_the_night_before(config, tmp_path):
    """Not from what a colleague has tried between them, from whatever policy."""
    base = Path(config.model.path)

    def night():
        """One that trains and registers: (version it went on from, its config)."""
        begun, start = started_from(config, RECIPE, "nightly")
        keep(begun, start)
        assert started_from(begun, RECIPE, "nightly") == (begun, start)  # resumed
        (config.folder / "config.toml").unlink()
        register(config, start=start.start)
        return start.continued_from.removeprefix("models:/metronome-nightly/"), begun

    (tmp_path / "run").mkdir(exist_ok=True)
    from_first, first = night()
    from_second, second = night()
    register(config)  # the trials of a day: versions 3 and 4
    register(config, start="latest")
    from_third, third = night()
    from_fourth, fourth = night()
    assert [from_first, from_second, from_third, from_fourth] == ["", "1", "2", "5"]
    assert Path(first.model.path) == base
    assert Path(fourth.model.path).name == "metronome-nightly-5"
    assert [one.run.seed for one in (first, second, third, fourth)] == [0, 1, 4, 5]
    drawn = [first_batch(one) for one in (first, second, third, fourth)]
    assert not any(one & other for index, one in enumerate(drawn) for other in drawn[:index])
    prompts = [{prompt for prompt, _ in one} for one in drawn]
    assert all(one != other for index, one in enumerate(prompts) for other in prompts[:index])

    again, start = started_from(second, RECIPE, "base")  # a night's config.toml as the recipe of a trial: no night
    assert start.start == "base"
    assert Path(again.model.path).name == "metronome-nightly-1"


@pytest.mark.parametrize(
    ("stem", "shown"),
    [
        ("o'brien ü%", "o'brien ü%"),
        ('the "best"', "the -best-"),
        ("gsm8k:v2", "gsm8k-v2"),
        ("a'b\"c\\", "a'b-c-"),
        ("x" * 250, "x" * 90),
    ],
)
def test_a_recipe_of_any_name_is_registered_and_found(config, tmp_path, stem, shown):
    """What MLflow refuses in a name, or can't search for, is replaced; the hash keeps such names apart."""
    recipe = str(tmp_path / f"{stem}.toml")
    shutil.copy(RECIPE, recipe)
    name = registered_name(recipe, config)
    assert re.fullmatch(re.escape(f"metronome-{shown}") + ("" if stem == shown else "-[0-9a-f]{6}"), name)
    register(config, name, alias="champion")
    register(config, name)
    for word, version in (("champion", 1), ("latest", 2)):
        assert started_from(config, recipe, word)[1].continued_from == f"models:/{name}/{version}"


@pytest.mark.parametrize(("experiment", "wrong"), [("x" * 501, "at most 500 characters"), ("", "at least 1 character")])
def test_an_experiment_that_mlflow_refuses_is_a_mistake_of_the_recipe(experiment, wrong):
    with pytest.raises(BadInput, match=f"tracking.experiment.*{wrong}"):
        load_config(None, [f"tracking.experiment={experiment}"])


def check_mlflow_loads_it(config):
    """By MLflow's own means, as its model serving does; the answer is transformers' own of these weights."""
    address = "models:/metronome-nightly@champion"
    signature = mlflow.models.get_model_info(address).signature
    assert [column.type for column in (*signature.inputs, *signature.outputs)] == [DataType.string] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = mlflow.pyfunc.load_model(address)
        ours = mlflow.transformers.load_model(address)
        theirs = pipeline("text-generation", config.model.path)
    greedy = {"do_sample": False, "max_new_tokens": 4, "return_full_text": False}
    assert ours("1 + 1 =", **greedy) == theirs("1 + 1 =", **greedy)
    assert [type(one) for one in loaded.predict(["1 + 1 ="])] == [str]


def test_a_registered_model_is_a_model_path(config):
    """By alias or version, downloaded once; what is not there is refused with the registry's address."""
    output = config.run.output
    with pytest.raises(BadInput, match=r"no MLflow registry: .*set MLFLOW_TRACKING_URI"):
        local_model("models:/metronome-nightly@champion", output)
    register(config, alias="champion")
    for path in ("models:/metronome-nightly@champion", "models:/metronome-nightly/1"):
        found = Path(local_model(path, output))
        assert found == Path(output).resolve() / "models/metronome-nightly-1"
    check_mlflow_loads_it(config)
    weights = next(Path(config.model.path).glob("*.safetensors"))
    assert (found / weights.name).read_bytes() == weights.read_bytes()
    for path, said in (
        ("models:/metronome-nightly@nobody", "no such version or alias"),
        ("models:/metronome-nightly/9", "no such version or alias"),
        ("models:/none@champion", "no such version or alias"),
        ("models:/metronome-nightly", "expected models:/NAME@ALIAS"),
    ):
        with pytest.raises(BadInput, match=said):
            local_model(path, output)
