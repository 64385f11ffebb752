import json
import threading
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from engine.config.recipe import HOME
from engine.errors import MetronomeError
from engine.tools.quickstart_model.byte_tokenizer import build
from engine.tools.quickstart_model.warmup import MARKER, WarmUp, ensure_quickstart_model, is_complete

TRAIN = HOME / "data" / "addition_train.jsonl"
QUICK = WarmUp(
    hidden=32, layers=1, intermediate=64, batch=8, max_steps=4, report_every=2, measure_from=4, problems=4, enough=0.0
)
"""Four steps of a smaller model, content with any accuracy."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    lines = []
    root = tmp_path_factory.mktemp("cache")
    return ensure_quickstart_model(
        cache_root=root, train_file=TRAIN, seed=0, report=lines.append, settings=QUICK
    ), lines


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_progress_is_reported_in_steps_loss_accuracy_and_seconds(made):
    _, lines = made
    assert len(lines) == 2
    assert "step 4" in lines[1]
    assert all(word in lines[1] for word in ("loss", "accuracy", " s"))


def test_the_folder_loads_as_any_hugging_face_model(made):
    folder, _ = made
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 2048
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    logits = model(**tokenizer("315+849=", return_tensors="pt")).logits
    assert logits.shape == (1, 8, 260)
    assert logits.isfinite().all()


def test_the_second_call_trains_nothing_and_random_numbers_are_left_alone(made):
    folder, _ = made
    lines = []
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert (
        ensure_quickstart_model(cache_root=folder.parent, train_file=TRAIN, seed=0, report=lines.append, settings=QUICK)
        == folder
    )
    assert lines == []
    assert (
        ensure_quickstart_model(cache_root=folder.parent, train_file=TRAIN, seed=1, report=lines.append, settings=QUICK)
        != folder
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_gives_the_same_weights(made, tmp_path):
    folder, _ = made
    again = ensure_quickstart_model(
        cache_root=tmp_path, train_file=TRAIN, seed=0, report=lambda line: None, settings=QUICK
    )
    assert again.name == folder.name
    assert contents(again) == contents(folder)


@pytest.mark.parametrize("damage", ["truncated", "missing", "unmarked"])
def test_a_damaged_folder_is_made_again(made, tmp_path, damage):
    intact = contents(made[0])
    folder = tmp_path / made[0].name
    folder.mkdir()
    for name, data in intact.items():
        (folder / name).write_bytes(data[:-1] if damage == "truncated" and name == "model.safetensors" else data)
    if damage != "truncated":
        (folder / (MARKER if damage == "unmarked" else "tokenizer.json")).unlink()
    assert not is_complete(folder)
    assert (
        ensure_quickstart_model(cache_root=tmp_path, train_file=TRAIN, seed=0, report=lambda line: None, settings=QUICK)
        == folder
    )
    assert contents(folder) == intact
    assert list(tmp_path.iterdir()) == [folder], "nothing may be left beside the model"


def test_two_callers_at_once_end_with_one_complete_folder(made, tmp_path):
    meet = threading.Barrier(2, timeout=60)
    found = []

    def call():
        # Both pass the cache check before either publishes: they meet at the first progress line.
        waited = []
        found.append(
            ensure_quickstart_model(
                cache_root=tmp_path,
                train_file=TRAIN,
                seed=0,
                report=lambda line: waited.append(line) or (len(waited) == 1 and meet.wait()),
                settings=QUICK,
            )
        )

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 2
    assert found[0] == found[1]
    assert is_complete(found[0])
    assert list(tmp_path.iterdir()) == [found[0]]


def test_a_model_that_does_not_learn_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(MetronomeError, match="4 warm-up steps"):
        ensure_quickstart_model(
            cache_root=tmp_path, train_file=TRAIN, seed=0, report=lambda line: None, settings=replace(QUICK, enough=0.9)
        )
    assert list(tmp_path.iterdir()) == []


def test_other_rows_give_another_folder(made, tmp_path):
    rows = TRAIN.read_text().splitlines()
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("\n".join(rows[:100]))
    assert json.loads(rows[0])["problem"].endswith("=")
    assert (
        ensure_quickstart_model(
            cache_root=tmp_path / "cache", train_file=fewer, seed=0, report=lambda line: None, settings=QUICK
        ).name
        != made[0].name
    )


def test_the_default_model_has_between_one_and_three_million_parameters():
    from engine.tools.quickstart_model.warmup import untrained

    parameters = sum(weight.numel() for weight in untrained(build(2048), WarmUp()).parameters())
    assert 1_000_000 <= parameters <= 3_000_000
