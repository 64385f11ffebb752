"""The names that keys had a release ago: each gives the same config as its new name, and one warning."""

import pytest
import tomli_w

from engine.config import Config
from engine.config.keys import RENAMED, STATE, _warn, current_names, flatten, nest
from engine.config.recipe import load
from engine.errors import BadInput
from engine.run.folder import dump

VALUES = {
    "algorithm.m2_threshold": 0.07,
    "algorithm.bapo_share": 0.4,
    "algorithm.bapo_low": [0.5, 0.8],
    "algorithm.bapo_high": [1.3, 2.5],
    "rollout.joining": 6,
}


@pytest.fixture(autouse=True)
def _fresh_process():
    _warn.cache_clear()


def warnings(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe with these keys."""

    def written(keys, name="my.toml"):
        (tmp_path / name).write_text(tomli_w.dumps(nest({"run.name": "x"} | keys, "")))
        return tmp_path / name

    return written


def test_there_is_a_value_to_try_for_each_old_key():
    assert VALUES.keys() == RENAMED.keys()
    assert not RENAMED.keys() & flatten(Config().model_dump()).keys()
    assert set(RENAMED.values()) <= flatten(Config().model_dump()).keys()


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_gives_the_config_of_the_new_one_and_one_warning(old, recipe, capsys):
    new = RENAMED[old]
    given = load(recipe({new: VALUES[old]}))
    assert given != load(None, ["run.name=x"])
    assert load(None, ["run.name=x", f"{new}={VALUES[old]}"]) == given
    assert warnings(capsys) == []

    file = recipe({old: VALUES[old]}, "old.toml")
    assert load(file) == given
    (said,) = warnings(capsys)
    assert all(word in said for word in (str(file), "old keys, which the next release refuses: ", old, new))
    assert load(file) == given  # the same process reads it again
    assert warnings(capsys) == []

    assert load(None, ["run.name=x", f"{old}={VALUES[old]}"]) == given
    (said,) = warnings(capsys)
    assert all(word in said for word in ("--set", old, new))


@pytest.mark.parametrize("old", RENAMED)
def test_a_key_by_both_names_is_refused(old, recipe):
    keys = {old: VALUES[old], RENAMED[old]: VALUES[old]}
    file = recipe(keys)
    with pytest.raises(BadInput) as error:
        load(file)
    assert all(word in str(error.value) for word in (str(file), old, RENAMED[old]))
    assert "are the old and the new name of one key" in str(error.value)
    with pytest.raises(BadInput) as error:
        load(None, [f"{key}={value}" for key, value in keys.items()])
    assert all(word in str(error.value) for word in ("--set", old, RENAMED[old]))


@pytest.mark.parametrize("old", RENAMED)
def test_set_overrides_a_recipe_by_whichever_name(old, recipe):
    new = RENAMED[old]
    wanted = load(recipe({new: VALUES[old]}, "new.toml"))
    default = flatten(Config().model_dump(mode="json"))[new]
    for there, here in ((old, new), (new, old), (old, old)):
        assert load(recipe({there: default}), [f"{here}={VALUES[old]}"]) == wanted


@pytest.mark.parametrize("key", STATE)
def test_state_is_no_setting_any_more(key, recipe, capsys):
    file = recipe({key: "nightly"})
    assert load(file) == load(None, ["run.name=x"])
    (said,) = warnings(capsys)
    assert all(word in said for word in (str(file), key, repr(STATE[key]), "start.json"))
    load(None, [f"{key}=nightly"])
    assert len(warnings(capsys)) == 1


def test_a_config_that_the_last_release_wrote_is_read_with_one_warning_and_written_by_the_new_names(recipe, capsys):
    file = recipe(VALUES | dict.fromkeys(STATE, ""))
    config = load(file)
    (said,) = warnings(capsys)
    assert all(word in said for word in (*VALUES, *RENAMED.values(), *STATE))
    dump(config, file)
    assert load(file) == config
    assert warnings(capsys) == []


def test_a_mistake_under_an_old_name_is_one_of_the_new_key(recipe):
    with pytest.raises(BadInput, match=r"old\.toml: algorithm\.bapo\.share = 2: .*less than 1"):
        load(recipe({"algorithm.bapo_share": 2}, "old.toml"))
    with pytest.raises(BadInput, match=r"algorithm\.bapo\.low = \[0\.9, 0\.6\]: expected where the bound starts"):
        load(None, ["algorithm.bapo_low=[0.9, 0.6]"])


def test_keys_and_trees_are_each_others_reverse():
    tree = {"run": {"seed": 0}, "algorithm": {"loss": "bapo", "bapo": {"low": [0.5, 0.6]}}, "empty": {}}
    flat = {"run.seed": 0, "algorithm.loss": "bapo", "algorithm.bapo.low": [0.5, 0.6], "empty": {}}
    assert flatten(tree) == flat
    assert nest(flat, "") == tree
    with pytest.raises(BadInput, match=r"my\.toml: algorithm\.bapo\.share = 0\.4: algorithm\.bapo = 3 is not a table"):
        nest({"algorithm.bapo": 3, "algorithm.bapo.share": 0.4}, "my.toml")


def test_of_what_was_kept_under_both_names_the_new_one_counts():
    assert current_names({"algorithm.m2po.threshold": "2", "algorithm.m2_threshold": "1", "model.start": "base"}) == {
        "algorithm.m2po.threshold": "2"
    }
