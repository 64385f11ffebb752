"""Names of TRL, verl and slime in an unknown key lead to ours, as docs/coming_from.md maps them."""

import re

import pytest

from engine.config import Config
from engine.config.other_names import OTHER_NAMES, find_other_name
from engine.config.recipe import HOME, load_config
from engine.config.table import keys_in
from engine.errors import BadInput

KEYS = set(keys_in(Config))
NAME = re.compile(r"[a-z][A-Za-z0-9_.]*")


def names_in(cell):
    """The plain identifiers of a cell: neither values (after "=" or in brackets) nor arguments of a function."""
    code = re.findall(r"`([^`]+)`", re.sub(r"\(.*?\)", "", cell))
    return [one for one in (text.partition(" = ")[0] for text in code) if NAME.fullmatch(one)]


def rows_of_the_page():
    page = (HOME / "docs/coming_from.md").read_text().partition("## Side by side")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [(name, ours) for _, verl, trl, ours in rows for name in names_in(verl) + names_in(trl)]


def test_every_name_means_a_key_or_says_why_there_is_none():
    for name, ours in OTHER_NAMES.items():
        assert ours in KEYS or " " in ours, name


def test_the_page_and_the_table_agree():
    rows = rows_of_the_page()
    assert len(rows) > 60
    for name in {name for name, _ in rows}:
        found = find_other_name(name)
        cells = [ours for other, ours in rows if other == name]
        assert found, f"{name} is on the page, not in the table"
        last = found.rpartition(".")[2]
        assert any(last in cell for cell in cells) or " " in found, f"{name}: {found}, but the page has {cells}"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("train.lr=1e-6", "unknown key train.lr; did you mean train.learning_rate?"),
        ("rollout.n=8", "unknown key rollout.n; did you mean rollout.group_size?"),
        ("actor_rollout_ref.rollout.n=8", "unknown key actor_rollout_ref.rollout.n; did you mean rollout.group_size?"),
        ("actor_rollout_ref.rollout.top_p=1", "top_p; did you mean rollout.top_p?"),
        ("algorithm.beta=0", "unknown key algorithm.beta; did you mean algorithm.kl_coef?"),
        ("num_generations=8", "unknown key num_generations; did you mean rollout.group_size?"),
        ("per_device_train_batch_size=4", "unknown key per_device_train_batch_size: not needed: "),
        ("hub.push=true", "unknown key hub.push: not supported: "),
        ("lora.rank=8", "unknown key lora.rank: not supported: LoRA"),
        ("train.lora_rank=8", "unknown key train.lora_rank: not supported: LoRA"),
        ("train.learning_rat=1", "unknown key train.learning_rat; did you mean train.learning_rate?"),
        ("lorry.rank=1", "unknown key lorry; did you mean "),
        ("steps=4", "--set steps=4: expected table.key=value"),
    ],
)
def test_an_unknown_key_leads_to_ours(given, told):
    with pytest.raises(BadInput) as refused:
        load_config(None, [given])
    assert told in str(refused.value)


def test_a_recipe_with_a_name_of_trl_at_its_top(tmp_path):
    (tmp_path / "mine.toml").write_text("num_generations = 8\n")
    with pytest.raises(BadInput, match=r"unknown key num_generations; did you mean rollout\.group_size\?"):
        load_config(tmp_path / "mine.toml")
