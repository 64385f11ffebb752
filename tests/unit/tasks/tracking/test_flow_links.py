"""A flow run and its MLflow run know each other, against a real store; tests/stack has the servers."""

import mlflow
import pytest

from engine.config import Config
from tasks.tracking import flow_links
from tasks.tracking.flow_links import log_flow_evaluation, run_url, tracked_flow


@pytest.fixture
def shown(monkeypatch):
    """The link artifacts that the Prefect server would get."""
    found = []
    monkeypatch.setattr(flow_links, "create_link_artifact", lambda url, **more: found.append((url, more)))
    return found


def test_tags_there_and_a_link_here(tmp_path, monkeypatch, shown):
    config = Config(run={"name": "night", "output": str(tmp_path)})
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "the-training")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__UI_URL", "http://prefect/runs/the-training")
    with tracked_flow(config) as run_id:
        url = run_url(config, run_id)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "the-evaluation")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__UI_URL", "http://prefect/runs/the-evaluation")
    log_flow_evaluation(config)

    run = mlflow.get_run(run_id)
    assert {name: value for name, value in run.data.tags.items() if name.startswith("prefect.")} == {
        "prefect.flow_run_id": "the-training",
        "prefect.flow_run_url": "http://prefect/runs/the-training",
        "prefect.evaluation_flow_run_id": "the-evaluation",
        "prefect.evaluation_flow_run_url": "http://prefect/runs/the-evaluation",
    }
    assert url == f"http://127.0.0.1:5000/#/experiments/{run.info.experiment_id}/runs/{run_id}"
    assert [link for link, _ in shown] == [url, url]
    assert shown[0][1]["key"] == "mlflow"
    assert "mlflow ui --backend-store-uri" in shown[0][1]["description"]  # its store has no server
