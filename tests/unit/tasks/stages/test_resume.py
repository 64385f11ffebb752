"""What `--resume` says about the recipe that it does not read again."""

import json
import shutil

import pytest

from engine.config.recipe import HOME, load_config
from engine.data.prepared import prepare_problems
from engine.data.problem_statistics import record_data
from engine.errors import BadInput
from engine.run.folder import RunFolder
from engine.run.run_file import RunStart, update_run
from tasks.stages.resume import find_resumed


@pytest.fixture
def begun(tmp_path):
    """The keys that identify a run, which began with a recipe that was edited since."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[train]\nsteps = 5\n")
    keys = ["run.name=first", f"run.output={tmp_path}"]
    folder = RunFolder(tmp_path / "first")
    folder.path.mkdir()
    update_run(folder.path, start=RunStart(recipe=str(recipe)))
    folder.create(load_config(recipe, keys), resume=False)
    recipe.write_text("[train]\nsteps = 6\n")
    return recipe, keys


def test_a_recipe_that_is_not_read_again_is_told_of_only_if_the_command_names_it(begun):
    recipe, keys = begun
    named = find_resumed(str(recipe), keys)
    assert f"{recipe} is not read again, so these have no effect: train.steps = 6 (the run has 5)" in named.notes[1]
    silent = find_resumed(None, keys)
    assert silent.notes == ("first continues with its own config.toml",)
    assert silent.recipe == named.recipe == str(recipe)


def test_a_command_that_is_repeated_with_resume_has_as_many_instances_on_ray(tmp_path):
    keys = [f"run.output={tmp_path}", "run.name=placed", "cluster.engine=ray", "rollout.instances=2"]
    folder = RunFolder(tmp_path / "placed")
    folder.path.mkdir()
    folder.create(load_config(None, keys), resume=False)
    for given, joining in ((keys, 2), (keys[:2], 2), ([*keys[:2], "rollout.instances=3"], 3)):
        found = find_resumed(None, given)
        assert (found.config.rollout.instances, found.config.dry_run.joining) == (0, joining)
    found = find_resumed(None, [*keys, "dry_run.joining=1"])
    assert found.config.dry_run.joining == 3


@pytest.mark.parametrize(("instances", "joining"), [(0, 2), (1, 3)])
def test_a_repeated_command_keeps_the_instances_that_its_recipe_has_beside_it_on_ray(tmp_path, instances, joining):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[cluster]\nengine = "ray"\nmost_instances = 4\n[dry_run]\njoining = 2\n')
    keys = [f"run.output={tmp_path}", "run.name=placed", f"rollout.instances={instances}"]
    folder = RunFolder(tmp_path / "placed")
    folder.path.mkdir()
    update_run(folder.path, start=RunStart(recipe=str(recipe)))
    folder.create(load_config(recipe, keys), resume=False)
    assert folder.read_config().dry_run.joining == joining
    assert find_resumed(str(recipe), keys).config.dry_run.joining == joining
    assert find_resumed(None, keys[1:], keys[:1] + ["dry_run.joining=2"]).config.dry_run.joining == joining


def moved_run(tmp_path, train):
    """The keys of a run whose files were in the folder `old`, which is now `new`."""
    (tmp_path / "old").mkdir()
    for name in ("addition", "products"):
        shutil.copy(HOME / f"data/{name}_train.jsonl", tmp_path / "old")
    (tmp_path / "old/loss.py").write_text("def own(): ...\n")
    keys = [f"run.output={tmp_path}", "run.name=moved"]
    keys += [f"{key}={value}" for key, value in keys_in(tmp_path / "old", train).items()]
    config = load_config(None, keys)
    folder = RunFolder(tmp_path / "moved")
    folder.path.mkdir()
    folder.create(config, resume=False)
    record_data(config, prepare_problems(config))
    shutil.move(tmp_path / "old", tmp_path / "new")
    return [*keys[:2], *(f"{key}={value}" for key, value in keys_in(tmp_path / "new", train).items())]


def keys_in(folder, train):
    sets = json.dumps(train).replace("DIR", str(folder)).replace('": ', '" = ')
    return {"data.train": sets, "data.decontaminate": "[]", "algorithm.loss": f"{folder}/loss.py:own"}


SETS = {
    "one": "DIR/products_train.jsonl",
    "several": [{"path": f"DIR/{name}_train.jsonl", "weight": 1.0} for name in ("addition", "products")],
}


@pytest.mark.parametrize("train", SETS.values(), ids=SETS)
def test_the_files_of_a_run_may_lie_elsewhere_if_they_hold_the_same(tmp_path, train):
    keys = moved_run(tmp_path, train)
    with pytest.raises(BadInput, match="no such file"):
        prepare_problems(find_resumed(None, keys[:2]).config)
    found = find_resumed(None, keys)
    told = " ".join(found.notes)
    assert f"{tmp_path}/new/products_train.jsonl" in told
    assert f"{tmp_path}/old/products_train.jsonl" in told
    RunFolder(tmp_path / "moved").create(found.config, resume=True)
    assert f"{tmp_path}/old" not in (tmp_path / "moved/config.toml").read_text()
    with (tmp_path / "new/products_train.jsonl").open("a") as file:
        file.write('{"problem": "1*1=", "answer": "1"}\n')
    assert find_resumed(None, keys).config == found.config, "its content is compared with the checkpoint's"
    shutil.copytree(tmp_path / "new", tmp_path / "newer")
    with pytest.raises(BadInput, match=r"data\.train is .*newer.*its content has the SHA-256"):
        find_resumed(None, [one.replace("/new/", "/newer/") for one in keys])
