"""The quickstart's problems and base model, which ship as files, against the scripts that made them."""

import hashlib
import json
import math
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.generate_addition import column_sums, worked
from engine.config import Config
from support.runs import ROOT
from tasks.stages.input_checks import with_model_folder

DATA = ROOT / "data"
MODEL = DATA / "quickstart_model"
END, TURN_START, TURN_END, PAD = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
number = st.integers(100, 999)


@pytest.fixture(scope="module")
def script():
    """data/make_quickstart_model.py as a module."""
    sys.path.insert(0, str(DATA))
    try:
        import make_quickstart_model
    finally:
        sys.path.remove(str(DATA))
    return make_quickstart_model


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def load(part, name="addition"):
    return [json.loads(line) for line in (DATA / f"{name}_{part}.jsonl").read_text().splitlines()]


def made_by(name, folder):
    subprocess.run([sys.executable, str(DATA / name), str(folder)], check=True, timeout=1000)


def test_generator_reproduces_the_problems_that_ship(tmp_path):
    made_by("generate_addition.py", tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == [f"{name}_{part}.jsonl" for name in ("addition", "products") for part in ("heldout", "train")]
    for name in made:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "sizes", "solved"),
    [
        ("addition", (4500, 512), lambda problem: str(sum(map(int, problem.split("+"))))),
        ("products", (2000, 256), lambda problem: f"{math.prod(map(int, problem.split('x'))):06}"[-3:]),
    ],
)
def test_every_row_is_right_and_no_problem_is_in_both_sets(name, sizes, solved):
    train, heldout = (load(part, name) for part in ("train", "heldout"))
    assert (len(train), len(heldout)) == sizes
    assert len({row["problem"] for row in train + heldout}) == sum(sizes)
    for row in train + heldout:
        assert row["answer"] == solved(row["problem"].removesuffix("="))


def test_worked_by_hand():
    assert worked(315, 849) == "59041;14160;38011#1164"
    assert worked(120, 305) == "05050;20020;13040#425"
    assert worked(315, 849, slip=(0, 3)) == "59030;14050;38011#1153"


@given(number, number)
def test_columns_and_result_agree_with_python(first, second):
    columns, _, result = worked(first, second).partition("#")
    assert int(result) == first + second
    assert [int(line[3]) + 10 * int(line[4]) for line in columns.split(";")] == column_sums(first, second)


@given(number, number, st.integers(0, 2**32))
def test_a_wrong_solution_has_the_right_form_one_wrong_column_and_a_wrong_result(script, first, second, seed):
    text = script.wrongly_worked(f"{first}+{second}=", random.Random(seed))
    columns, _, result = text.partition("#")
    lines = [[int(digit) for digit in line] for line in columns.split(";")]
    wrong = [line for line in lines if sum(line[:3]) != line[3] + 10 * line[4]]
    assert len(wrong) == 1
    assert [line[4] for line in lines[:-1]] == [line[2] for line in lines[1:]], "carries must be handed on"
    assert int(result) == sum(line[3] * 10**place for place, line in enumerate(lines)) + 1000 * lines[-1][4]
    assert int(result) != first + second


def test_the_model_that_ships_is_the_one_that_the_script_declares(script):
    assert hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest() == script.SHA256
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 5e6


def test_the_rest_of_its_folder_is_what_the_script_writes(script, tmp_path):
    made = script.byte_tokenizer()
    made(["1", "12"], padding=True)  # as the script does; it is in tokenizer.json
    made.save_pretrained(tmp_path)
    script.untrained(made).save_pretrained(tmp_path)
    for file in MODEL.iterdir():
        if file.name != "model.safetensors":
            assert (tmp_path / file.name).read_text() == file.read_text(), file.name


def test_it_is_the_default_model_and_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert with_model_folder(Config()).model.path == str(MODEL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.timeout(1100)
def test_the_script_makes_a_model_that_solves_about_as_many(script, tokenizer, tmp_path):
    """The same bytes only on the same CPU: others round otherwise."""
    made_by("make_quickstart_model.py", tmp_path)
    heldout = load("heldout")
    shares = []
    for folder in (MODEL, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(folder)
        shares.append([script.accuracy(model, tokenizer, heldout, max_tokens=48) for _ in range(3)])
    means = [sum(each) / len(each) for each in shares]
    assert means[0] == pytest.approx(means[1], abs=0.15)
    assert all(0.25 <= mean <= 0.5 for mean in means)


def test_vocabulary_and_special_ids(tokenizer):
    assert len(tokenizer) == 260
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [256, 257, 258, 259]
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
    assert tokenizer.model_max_length == 2048
