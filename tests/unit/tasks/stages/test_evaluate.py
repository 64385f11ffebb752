"""Evaluations and an MLflow that is away. The evaluation itself runs in tests/stack/test_tracking_outage.py."""

import asyncio
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import Config
from engine.data.tokenizer import Tokenizer
from engine.evaluation.benchmarks import encode_benchmarks, read_benchmarks, with_evaluation_context
from engine.evaluation.results import Subject, done_before, record_evaluation
from engine.orchestrator import standalone_evaluation as evaluation
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from support.groups import group
from support.runs import config_of
from tasks.stages import evaluate


def test_a_flow_run_that_is_started_again_does_not_evaluate_again(tmp_path, monkeypatch):
    config = Config(run={"name": "night", "output": str(tmp_path)})
    (config.folder / "evaluations").mkdir(parents=True)
    done = []
    monkeypatch.setattr(
        evaluate, "evaluate", lambda config, model, version, pool: done.append(model.name) or {"avg_at_k": 0.5}
    )
    held = []
    monkeypatch.setattr(evaluate, "hold_devices", lambda *devices: held.append(devices) or nullcontext())
    for number, expected in (("first", ["m"]), ("first", ["m"]), ("second", ["m", "m"])):
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ROOT_FLOW_RUN_ID", number)
        assert evaluate.evaluate_once(config, Path("m"), 3) == {"avg_at_k": 0.5}
        assert done == expected
    assert held == [(1, "cpu-slots")] * 2  # only what samples holds a slot


def evaluated(config, model, version, seconds=1.0):
    """As an evaluation leaves it in the run folder, with one wrong response to each problem."""
    folder = RunFolder(config.folder)
    config = with_evaluation_context(config)
    [benchmark] = encode_benchmarks(config, read_benchmarks(config), Tokenizer(model))
    made = group(0, version, rewards=(0.0,))
    groups = [replace(made, index=index, prompt=prompt) for index, prompt in enumerate(benchmark.prompts)]
    return asyncio.run(
        record_evaluation(
            config=config,
            folder=folder,
            subject=Subject(str(model.resolve()), version),
            benchmark=benchmark,
            groups=groups,
            verifier=None,
            sampled=version,
            more={"seconds": seconds},
        )
    )


def test_what_a_run_has_evaluated_is_not_sampled_again(settings, tiny_model, monkeypatch, capsys):
    config = config_of(settings | {"evaluate.problems": 4, "evaluate.max_context": 80})
    folder = RunFolder(config.folder)
    folder.create(config, resume=False)
    shutil.copytree(tiny_model, folder.policy)
    assert done_before(config, folder.policy, 3, folder) is None
    row = evaluated(config, folder.policy, 3)
    evaluated(config, tiny_model, 0)

    def changed(**values):
        return config_of(
            settings
            | {"evaluate.problems": 4, "evaluate.max_context": 80}
            | {key.replace("_", ".", 1): value for key, value in values.items()}
        )

    [found] = done_before(config, folder.policy, 3, folder)
    assert found == next(read_lines(folder.evaluations)) == json.loads(json.dumps(row))
    assert done_before(config, folder.policy, 2, folder) is None  # a run that went on, or was cut back
    assert done_before(config, tiny_model, 0, folder) is None  # any folder: it may hold other weights by now
    for values in ({"run_seed": 1}, {"evaluate_samples": 2}, {"evaluate_problems": 5}, {"evaluate_max_context": 81}):
        assert done_before(changed(**values), folder.policy, 3, folder) is None, values
    assert done_before(changed(train_learning_rate=0.5), folder.policy, 3, folder) == [found]

    again = evaluated(config, folder.policy, 3, seconds=2.0)
    [found] = done_before(config, folder.policy, 3, folder)
    assert found["seconds"] == again["seconds"] == 2.0  # the newest

    monkeypatch.setattr(evaluation, "evaluate_model", lambda *_, **__: pytest.fail("sampled"))
    assert evaluate.evaluate_once(config, folder.policy, 3) == found
    assert "already has this evaluation of its version 3" in capsys.readouterr().out
