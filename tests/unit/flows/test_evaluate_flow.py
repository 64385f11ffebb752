"""What a flow says of its run to Prefect and to the flows after it."""

from contextlib import nullcontext

import pytest

from engine.config.recipe import load_config
from engine.errors import BadInput
from flows import evaluate, pipeline
from flows.settings import Settings


def test_what_is_announced_has_the_seed_of_the_run(settings, tmp_path, monkeypatch):
    """`started_from` adds a number to the recipe's, and an evaluation with another seed would be another one."""
    for name in ("check_store", "name_flow_run"):
        monkeypatch.setattr(pipeline, name, lambda *given, **more: None)
    monkeypatch.setattr(pipeline, "tracked_flow", lambda config: nullcontext("0"))
    start = pipeline.started_from

    def of_the_third_version(config, recipe, continue_from):
        config, begun = start(config, recipe, continue_from)
        return config.model_copy(update={"run": config.run.model_copy(update={"seed": config.run.seed + 3})}), begun

    monkeypatch.setattr(pipeline, "started_from", of_the_third_version)
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[run]\nseed = 40\n")
    given = [f"{key}={value}" for key, value in settings.items()]
    with pipeline.opened(str(recipe), given, Settings(), "base", resume=False) as run:
        assert run.config.run.seed == 43
        assert load_config(run.recipe, run.overrides).run.seed == 43


def test_an_evaluation_labels_its_flow_run_once_the_store_is_accepted(settings, tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr(evaluate, "name_flow_run", lambda name, folder: named.append(folder))
    monkeypatch.setattr(evaluate, "evaluate_once", lambda *_: pytest.fail("nothing is sampled"))
    given = [f"{key}={value}" for key, value in settings.items()]
    with pytest.raises(BadInput, match="MLflow cannot use it"):
        evaluate.evaluate.fn("infra/recipes/quickstart.toml", [*given, "tracking.uri=gone://here"])
    assert named == []
    with pytest.raises(pytest.fail.Exception):
        evaluate.evaluate.fn("infra/recipes/quickstart.toml", [*given, f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"])
    assert named == [load_config(None, given).folder]
