"""Evaluations and an MLflow that is away. The evaluation itself runs in tests/stack/test_tracking_outage.py."""

import pytest

from engine.config import Config
from tasks import evaluate
from tasks.entry import crashed_without_tracking
from tasks.patience import TrackingAway


def test_a_flow_run_that_is_started_again_does_not_evaluate_again(tmp_path, monkeypatch):
    config = Config(run={"name": "night", "output": str(tmp_path)})
    (config.folder / "evaluations").mkdir(parents=True)
    done = []
    monkeypatch.setattr(evaluate, "evaluate", lambda config, model, version, pool: done.append(model) or {"avg_at_k": 0.5})
    for number, expected in (("first", ["m"]), ("first", ["m"]), ("second", ["m", "m"])):
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ROOT_FLOW_RUN_ID", number)
        assert evaluate.evaluate_once(config, "m", 3) == {"avg_at_k": 0.5}
        assert done == expected


def test_a_deployed_flow_run_ends_as_crashed_without_mlflow(monkeypatch):
    with pytest.raises(TrackingAway), crashed_without_tracking():
        raise TrackingAway("MLflow did not answer")
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "nightly-evaluation")
    with pytest.raises(SystemExit, match="MLflow did not answer"), crashed_without_tracking():
        raise TrackingAway("MLflow did not answer")
