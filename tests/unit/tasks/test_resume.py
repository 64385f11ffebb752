"""What `--resume` says about the recipe that it does not read again."""

import pytest

from engine.config.recipe import load_config
from engine.run.folder import RunFolder
from engine.run.run_start import RunStart
from tasks.resume import find_resumed


@pytest.fixture
def begun(tmp_path):
    """The keys that identify a run, which began with a recipe that was edited since."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[train]\nsteps = 5\n")
    keys = ["run.name=first", f"run.output={tmp_path}"]
    folder = RunFolder(tmp_path / "first")
    folder.path.mkdir()
    RunStart(recipe=str(recipe)).write(folder.path)
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
    RunStart(recipe="").write(folder.path)
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
    RunStart(recipe=str(recipe)).write(folder.path)
    folder.create(load_config(recipe, keys), resume=False)
    assert folder.read_config().dry_run.joining == joining
    assert find_resumed(str(recipe), keys).config.dry_run.joining == joining
    assert find_resumed(None, keys[1:], keys[:1] + ["dry_run.joining=2"]).config.dry_run.joining == joining
