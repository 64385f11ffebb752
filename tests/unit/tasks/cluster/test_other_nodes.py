"""Flow runs on other nodes: which are started, and which are cancelled. Prefect's client only records what it is
asked; tests/stack has the server."""

from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect import states

from engine.config import Config
from engine.config.recipe import load_config
from engine.errors import BadInput
from engine.run.files import append_line, read_lines
from tasks.cluster import other_nodes
from tasks.cluster.other_nodes import INSTANCES, NOTES, evaluation_nodes, share_instances


class Prefect:
    """Its flow runs by number, of which each change is noted."""

    def __init__(self, monkeypatch):
        self.events = []
        self.runs = {}
        self.given = []
        monkeypatch.setattr(other_nodes, "get_client", lambda sync_client: nullcontext(self))
        monkeypatch.setattr(other_nodes, "run_deployment", self.start)

    def start(self, deployment, parameters, **_):
        number = self.add(states.Running())
        self.given.append((deployment, parameters))
        self.events.append(("start", number))
        return SimpleNamespace(id=number)

    def add(self, state):
        number = uuid4()
        self.runs[number] = SimpleNamespace(state=state, name="instances of mine")
        return number

    def read_flow_run(self, number):
        return self.runs[number]

    def set_flow_run_state(self, number, state):
        self.events.append((state.type.value, number))
        self.runs[number].state = state


@pytest.fixture
def prefect(monkeypatch):
    return Prefect(monkeypatch)


@pytest.mark.parametrize(("state", "asked"), [
    (states.Scheduled(), "CANCELLED"), (states.AwaitingRetry(), "CANCELLED"), (states.Running(), "CANCELLING"),
    (states.Crashed(), "CANCELLED"),  # a node that crashed would be resumed when its run is over
    (states.Completed(), ""), (states.Failed(message="too few devices"), ""), (states.Cancelled(), ""),
])  # fmt: skip
def test_those_of_a_killed_attempt_are_cancelled_before_new_ones_start(state, asked, prefect, tmp_path, capsys):
    config = Config(run={"name": "mine", "output": str(tmp_path)})
    config.folder.mkdir()
    old = prefect.add(state)
    append_line(config.folder / NOTES, {"flow_run_id": str(old), "name": "instances of mine"})
    with other_nodes.other_nodes(config, pool_instances=1):
        new = prefect.events[-1][1]
        assert prefect.events == [*([(asked, old)] if asked else []), ("start", new)]
        assert [row["flow_run_id"] for row in read_lines(config.folder / NOTES)] == [str(new)]
    assert prefect.events[-1] == ("CANCELLING", new)
    said = "the flow run instances of mine has failed: too few devices"
    assert (said in capsys.readouterr().err) == state.is_failed()


@pytest.mark.parametrize(("tensor", "node", "instances", "wanted"), [
    (2, 8, 4, [4]), (2, 8, 8, [4, 4]), (2, 8, 16, [4, 4, 4, 4]), (4, 8, 3, [2, 1]), (3, 8, 4, [2, 2]), (1, 16, 5, [5]),
    (16, 8, 2, [1, 1]),  # more than a node has: refused there by name
    (2, 8, 0, []),
])  # fmt: skip
def test_instances_are_shared_among_nodes_by_what_a_node_holds(tensor, node, instances, wanted):
    config = Config(rollout={"engine": "vllm", "tensor": tensor}, platform={"devices_per_node": node})
    assert share_instances(config, instances) == wanted


def test_instances_that_evaluate_load_the_model_and_meet_at_a_place_of_their_own(prefect, tmp_path):
    """An override of the deployment serve-rollouts, such as the recipe's model, must not win over what this evaluation
    says."""
    mine = {"name": "mine", "output": str(tmp_path)}
    config = Config(run=mine, rollout={"instances": 0}, evaluate={"max_context": 4096})
    meeting = tmp_path / "mine/evaluations/here"
    with evaluation_nodes(config, tmp_path / "mine/policy", 3, meeting) as (there, place):
        assert (there, place) == (config, meeting)
    [(deployment, given)] = prefect.given
    assert deployment == INSTANCES
    assert (given["join"], given["instances"]) == (str(meeting / "rollout.address"), 3)
    assert given.keys() == {"join", "config", "instances"}
    recipe = load_config(given["config"])
    wanted = (str(tmp_path / "mine/policy"), 4096, 0)
    assert (recipe.model.path, recipe.rollout.max_context, recipe.rollout.instances) == wanted


def test_without_instances_on_the_pool_an_evaluation_has_no_meeting_place(tmp_path):
    with evaluation_nodes(Config(), tmp_path, 0, tmp_path / "nowhere") as (there, place):
        assert (there, place) == (Config(), None)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_a_run_on_ray_without_the_package_says_what_to_install(tmp_path):
    config = Config(run={"name": "mine", "output": str(tmp_path)}, cluster={"engine": "ray"})
    with pytest.raises(BadInput, match=r'cluster.engine = "ray" needs Ray: pip install "metronome\[ray\]"'):
        with other_nodes.other_nodes(config):
            pass
