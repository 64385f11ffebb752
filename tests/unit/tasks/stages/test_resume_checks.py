"""A resume trains the tokens that the run would have trained: its templates are told when the run began."""

import json
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.data.prepared import training_problems
from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput
from engine.evaluation.benchmarks import encode_benchmarks, read_benchmarks
from engine.orchestrator.opening import prompt_loader
from engine.run.folder import RunFolder
from engine.run.identity import claim_run
from engine.run.run_file import read_run
from support.run_folders import a_checkpoint
from support.runs import config_of
from tasks.stages.prepare import encode_data
from tasks.stages.resume_checks import _check_prompts, check_resume

LAST_YEAR = datetime(2025, 12, 31, tzinfo=UTC)
TEMPLATE = "Today Date: {{ strftime_now('%d %b %Y') }}\n{{ messages[0]['content'] }}<think>"


@pytest.fixture
def model(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


@pytest.fixture
def config(settings, model, monkeypatch):
    """Of a run that began last year."""
    config = config_of(
        settings
        | {"model.path": str(model), "data.prompt_template": "chat", "rollout.max_context": 128}
        | {"checkpoint.path": str(model.parent / "place")}
    )
    with monkeypatch.context() as then:
        then.setattr(time, "time", LAST_YEAR.timestamp)
        claim_run(config, resume=False)
    return config


def loader(config):
    return prompt_loader(config, training_problems(config), Tokenizer(Path(config.model.path)))


def state(config):
    return {"step": 1, "prompts": loader(config).fingerprint, "config": config.model_dump(mode="json")}


def test_a_resume_on_another_day_trains_the_same_tokens(config):
    (prompt, *_) = loader(config).batch(0)
    text = f"Today Date: 31 Dec 2025\n{prompt.problem}<think>"
    assert (prompt.text, bytes(prompt.token_ids).decode()) == (text, text)
    before = state(config)
    claim_run(config, resume=True)
    assert loader(config).batch(0) == [prompt, *_]
    _check_prompts(config, before)


def test_a_run_whose_folder_is_lost_has_its_day_from_its_checkpoint(config, model):
    before = state(config)
    run = read_run(config.folder)
    a_checkpoint(model.parent / "place" / config.run.name, 1, run.id, began=run.began)
    shutil.rmtree(config.folder)
    _check_prompts(config, before)
    claim_run(config, resume=True)
    assert loader(config).fingerprint == before["prompts"]


def test_evaluations_of_a_run_have_its_day_wherever_their_figures_go(config, settings, model):
    RunFolder(config.folder).create(config, resume=False)
    shutil.copytree(model, RunFolder(config.folder).policy)
    other = config_of(settings | {"run.name": "other", "data.prompt_template": "chat", "rollout.max_context": 128})

    def of(config, model):
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
        [benchmark] = encode_benchmarks(config, read_benchmarks(config), Tokenizer(model))
        return {prompt.text[:23] for prompt in benchmark.prompts}

    began = {"Today Date: 31 Dec 2025"}
    assert of(config, model) == of(config, RunFolder(config.folder).policy) == began
    assert of(other, RunFolder(config.folder).policy) == began
    assert of(other, model) != began  # no run: the present


def test_figures_of_the_prompts_are_of_the_runs_day(config, model, monkeypatch):
    asked = []
    monkeypatch.setattr("tasks.stages.prepare.encode_prompts", lambda **given: asked.append(given["clock"]) or {})
    monkeypatch.setattr("tasks.stages.prepare.create_table_artifact", lambda *_, **__: None)
    encode_data(config, model)
    plain = config.data.model_copy(update={"prompt_template": "{problem}"})
    encode_data(config.model_copy(update={"data": plain}), model)
    assert asked == [LAST_YEAR, None]  # without a chat template the day is no part of the cache's key


def test_a_resume_is_compared_with_the_runs_own_checkpoint_where_others_publish_too(config, model, capsys):
    for step, run in ((2, read_run(config.folder).id), (9, "of-another-run")):
        a_checkpoint(model.parent / "place" / config.run.name, step, run, config=config)
    with pytest.raises(BadInput, match="--resume: "):
        check_resume(config)
    assert "with those of the checkpoint after 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["template", "tokenizer", "column"])
def test_a_resume_that_would_train_other_prompts_is_refused_by_name(config, model, tmp_path, change):
    data = tmp_path / "own.jsonl"
    rows = [json.loads(line) for line in Path(config.data.train).read_text().splitlines()]
    data.write_text("".join(json.dumps({**row, "tests": "1"}) + "\n" for row in rows))
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"train": str(data), "decontaminate": []})}
    )
    before = state(config)
    if change == "template":
        (model / "chat_template.jinja").write_text(TEMPLATE.replace("Today", "today"))
    elif change == "column":
        data.write_text(data.read_text().replace('"tests": "1"', '"tests": "2"'))
    else:
        file = model / "tokenizer.json"
        vocabulary = json.loads(file.read_text())
        ids = vocabulary["model"]["vocab"]
        ids["0"], ids["1"] = ids["1"], ids["0"]
        file.write_text(json.dumps(vocabulary))
    with pytest.raises(BadInput, match=r"other tokens or other columns.*tokenizer of model\.path or its chat template"):
        _check_prompts(config, before)
    accepting = config.run.model_copy(update={"accept": ("prompts",)})
    _check_prompts(config.model_copy(update={"run": accepting}), before)
