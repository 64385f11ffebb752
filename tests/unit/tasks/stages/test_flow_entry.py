"""How a flow run enters its run folder again. Prefect's runtime is told its flow run by the environment."""

import threading
import time

import pytest

from engine.config.recipe import load_config
from engine.errors import BadInput
from engine.run.files import append_line
from engine.run.folder import RunFolder
from engine.run.run_file import RunStart, read_run
from engine.run.run_status import why_ended
from tasks.stages.flow_entry import begun_by_this_flow, enter_flow, read_settled_config
from tasks.tracking.store import TrackingAway


@pytest.fixture
def flow_run(monkeypatch):
    """Makes this process that of a flow run."""
    return lambda number: monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ROOT_FLOW_RUN_ID", number)


@pytest.fixture
def recipe(tmp_path):
    """Writes the recipe with a learning rate and reads it, as a start of the flow does."""

    def written(rate, *overrides):
        (tmp_path / "my.toml").write_text(f'[run]\noutput = "{tmp_path}/runs"\n[train]\nlearning_rate = {rate}\n')
        return load_config(tmp_path / "my.toml", overrides)

    return written


def killed(*arguments, **more):
    raise KeyboardInterrupt


def test_a_flow_run_that_enters_again_goes_on_with_the_config_that_it_began_with(flow_run, recipe, monkeypatch):
    flow_run("night")
    config = read_settled_config(recipe(1e-6))
    begun = RunStart(start="nightly", continued_from="models:/nights/6")
    with enter_flow(config, begun, resume=False):
        number = read_run(config.folder).id
    assert read_run(config.folder).start == begun
    again = read_settled_config(recipe(1e-3, "run.name=edited"))
    assert again == config
    with enter_flow(again, begun, resume=False) as entry:
        assert entry.resumed
    assert read_run(config.folder).start == begun
    assert read_run(config.folder).id == number != ""

    flow_run("a person's, the next morning")
    name = f"run.name={config.run.name}"
    with (
        pytest.raises(BadInput, match="already exists"),
        enter_flow(read_settled_config(recipe(1e-3, name)), RunStart(), resume=False),
    ):
        pass
    with monkeypatch.context() as patch:  # killed before it has written its config
        patch.setattr(RunFolder, "create", killed)
        with (
            pytest.raises(KeyboardInterrupt),
            enter_flow(read_settled_config(recipe(1e-3, name)), RunStart(), resume=True),
        ):
            pass
    assert not begun_by_this_flow(RunFolder(config.folder))
    with enter_flow(read_settled_config(recipe(1e-3, name)), RunStart(), resume=True):
        assert load_config(RunFolder(config.folder).config).train.learning_rate == 1e-3


def test_a_second_process_of_a_flow_run_waits_while_the_first_one_trains(flow_run, recipe, monkeypatch):
    """Prefect may start a flow run again that it took for dead, and that trains on."""
    monkeypatch.setattr("tasks.stages.flow_entry.TAKEOVER_S", 2.0)
    flow_run("night")
    config = read_settled_config(recipe(1e-6))
    holds = threading.Event()
    through = threading.Event()

    def train():
        with enter_flow(config, RunStart(), resume=False):
            holds.set()
            for step in range(16):
                time.sleep(0.25)
                append_line(RunFolder(config.folder).steps, {"step": step})
            through.set()

    first = threading.Thread(target=train)
    first.start()
    assert holds.wait(30)
    with enter_flow(config, RunStart(), resume=False) as entry:
        assert through.is_set()
        assert entry.resumed
    first.join()


def test_a_deployed_flow_run_that_mlflow_is_away_from_ends_as_crashed(flow_run, recipe, monkeypatch):
    flow_run("night")
    config = read_settled_config(recipe(1e-6))
    with pytest.raises(TrackingAway), enter_flow(config, RunStart(), resume=False):
        raise TrackingAway("MLflow did not answer")
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "nightly")
    with pytest.raises(SystemExit, match="MLflow did not answer"), enter_flow(config, RunStart(), resume=False):
        raise TrackingAway("MLflow did not answer")
    assert why_ended(RunFolder(config.folder))[1] == "MLflow did not answer"
