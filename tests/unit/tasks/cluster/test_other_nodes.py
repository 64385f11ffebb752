"""Flow runs that a killed process left behind, with Prefect's client replaced by a record of what it is asked."""

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


@pytest.mark.parametrize("left", [0, 2])
def test_those_of_a_killed_attempt_are_cancelled_before_new_ones_start(left, tmp_path, monkeypatch):
    config = Config(run={"name": "mine", "output": str(tmp_path)})
    config.folder.mkdir()
    notes = config.folder / other_nodes.NOTES
    events = []
    new = uuid4()
    before = [uuid4() for _ in range(left)]
    for number in before:
        append_line(notes, {"flow_run_id": str(number), "name": "instances of mine"})
    monkeypatch.setattr(other_nodes, "_cancel", lambda number: events.append(("cancel", number)))
    monkeypatch.setattr(
        other_nodes, "run_deployment", lambda *_, **__: events.append(("start", new)) or SimpleNamespace(id=new)
    )
    with other_nodes.other_nodes(config, pool_instances=1):
        assert events == [*(("cancel", number) for number in before), ("start", new)]
        assert [row["flow_run_id"] for row in read_lines(notes)] == [str(new)]
    assert events[-1] == ("cancel", new)


@pytest.mark.parametrize(("tensor", "node", "instances", "wanted"), [
    (2, 8, 4, [4]), (2, 8, 8, [4, 4]), (2, 8, 16, [4, 4, 4, 4]), (4, 8, 3, [2, 1]), (3, 8, 4, [2, 2]), (1, 16, 5, [5]),
    (16, 8, 2, [1, 1]),  # more than a node has: refused there by name
    (2, 8, 0, []),
])  # fmt: skip
def test_instances_are_shared_among_nodes_by_what_a_node_holds(tensor, node, instances, wanted, tmp_path, monkeypatch):
    config = Config(
        run={"name": "mine", "output": str(tmp_path)},
        rollout={"engine": "vllm", "tensor": tensor},
        platform={"devices_per_node": node},
    )
    config.folder.mkdir()
    asked = []
    monkeypatch.setattr(other_nodes, "_cancel", lambda number: None)
    monkeypatch.setattr(
        other_nodes,
        "run_deployment",
        lambda deployment, parameters, **_: (
            asked.append((deployment, parameters["instances"])) or SimpleNamespace(id=uuid4())
        ),
    )
    with other_nodes.other_nodes(config, pool_instances=instances):
        assert asked == [(other_nodes.INSTANCES, share) for share in wanted]


def test_instances_that_evaluate_load_the_model_and_meet_at_a_place_of_their_own(tmp_path, monkeypatch):
    """An override of the deployment serve-rollouts, such as the recipe's model,
    must not win over what this evaluation says."""
    config = Config(
        run={"name": "mine", "output": str(tmp_path)}, rollout={"instances": 0}, evaluate={"max_context": 4096}
    )
    policy = tmp_path / "mine/policy"
    meeting = tmp_path / "mine/evaluations/here"
    started = []
    ended = []
    new = uuid4()
    monkeypatch.setattr(other_nodes, "_cancel", ended.append)
    monkeypatch.setattr(
        other_nodes,
        "run_deployment",
        lambda deployment, parameters, **_: started.append((deployment, parameters)) or SimpleNamespace(id=new),
    )
    with other_nodes.evaluation_nodes(config, policy, 3, meeting) as (there, place):
        assert (there, place) == (config, meeting)
        [(deployment, given)] = started
        assert ended == []
    assert ended == [new]
    assert deployment == other_nodes.INSTANCES
    assert (given["join"], given["instances"]) == (str(meeting / "rollout.address"), 3)
    assert given.keys() == {"join", "config", "instances"}
    recipe = load_config(given["config"])
    assert (recipe.model.path, recipe.rollout.max_context, recipe.rollout.instances) == (str(policy), 4096, 0)


def test_without_instances_on_the_pool_an_evaluation_has_no_meeting_place(tmp_path):
    with other_nodes.evaluation_nodes(Config(), tmp_path, 0, tmp_path / "nowhere") as (there, place):
        assert (there, place) == (Config(), None)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_a_run_on_ray_without_the_package_says_what_to_install(tmp_path):
    config = Config(run={"name": "mine", "output": str(tmp_path)}, cluster={"engine": "ray"})
    with pytest.raises(BadInput, match=r'cluster.engine = "ray" needs Ray: pip install "metronome\[ray\]"'):
        with other_nodes.other_nodes(config):
            pass


def test_one_that_has_failed_is_named_with_its_reason(monkeypatch, capsys):
    found = SimpleNamespace(state=states.Failed(message="too few devices"), name="instances of mine")
    monkeypatch.setattr(
        other_nodes, "get_client", lambda sync_client: nullcontext(SimpleNamespace(read_flow_run=lambda _: found))
    )
    other_nodes._cancel(uuid4())
    assert "the flow run instances of mine has failed: too few devices" in capsys.readouterr().err


@pytest.mark.parametrize(("state", "asked"), [
    (states.Scheduled(), ["CANCELLED"]), (states.AwaitingRetry(), ["CANCELLED"]), (states.Running(), ["CANCELLING"]),
    (states.Crashed(), ["CANCELLED"]),  # a node that crashed would be resumed when its run is over
    (states.Completed(), []), (states.Failed(), []), (states.Cancelled(), []),
])  # fmt: skip
def test_what_is_under_way_or_may_come_back_is_cancelled(state, asked, monkeypatch):
    sent = []
    client = SimpleNamespace(
        read_flow_run=lambda _: SimpleNamespace(state=state, name="one"),
        set_flow_run_state=lambda _, wanted: sent.append(wanted.type.value),
    )
    monkeypatch.setattr(other_nodes, "get_client", lambda sync_client: nullcontext(client))
    other_nodes._cancel(uuid4())
    assert sent == asked
