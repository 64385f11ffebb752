"""An evaluation whose instances are started elsewhere, as a node of the rollout pool does:
real instances, no Prefect."""

import threading
from contextlib import nullcontext

import pytest

from engine.config.recipe import load_config
from engine.orchestrator.standalone_evaluation import evaluate_model
from engine.run.folder import RunFolder
from engine.wire.address import ADDRESS_FILE
from support.runs import config_of, wait_for
from tasks.cluster import other_nodes, rollout_node


@pytest.mark.nightly
def test_they_load_the_model_that_is_evaluated_and_end_with_it(settings, tmp_path, tiny_model, monkeypatch):
    """The run's own model is not there: an instance that loaded it could not serve."""
    config = config_of(
        settings
        | {
            "model.path": str(tmp_path / "gone"),
            "rollout.instances": 0,
            "rollout.wait_s": 90,
            "rollout.timeout_s": 120,
            "evaluate.problems": 4,
            "evaluate.max_new_tokens": 8,
            "evaluate.max_context": 48,
        }
    )
    folder = RunFolder(config.folder)
    meeting = tmp_path / "meeting"
    asked = []
    failed = []
    folder.create(config, resume=False)
    monkeypatch.setattr(
        other_nodes, "_flow_run_during", lambda parameters, **_: asked.append(parameters) or nullcontext()
    )
    with other_nodes.evaluation_nodes(config, tiny_model, 2, meeting) as (there, place):
        [given] = asked

        def node():
            """What the deployment's flow does with these parameters."""
            try:
                wait_for((meeting / ADDRESS_FILE).exists, "the evaluation")
                recipe = load_config(given["config"], ["rollout.wait_s=15"])
                rollout_node.serve_until_the_run_ends(recipe, given["join"], given["instances"], "127.0.0.1")
            except BaseException as error:
                failed.append(error)
                raise

        pool = threading.Thread(target=node, daemon=True)
        pool.start()
        [row] = evaluate_model(config=there, model=tiny_model, weight_version=5, folder=folder, meeting=place)
    pool.join(60)
    assert not pool.is_alive()
    assert not failed
    assert (row["weight_version"], row["model"], row["problems"]) == (5, str(tiny_model.resolve()), 4)
