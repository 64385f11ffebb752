"""Flow runs that a killed process left behind, with Prefect's client replaced by a record of what it is asked."""

from contextlib import nullcontext
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect import states

from engine.config import Config
from engine.run_folder import append_line, read_lines
from tasks import companions


@pytest.mark.parametrize("left", [0, 2])
def test_those_of_a_killed_attempt_are_cancelled_before_new_ones_start(left, tmp_path, monkeypatch):
    config = Config(run={"name": "mine", "output": str(tmp_path)})
    config.folder.mkdir()
    notes, events, new = config.folder / companions.NOTES, [], uuid4()
    before = [uuid4() for _ in range(left)]
    for number in before:
        append_line(notes, {"flow_run_id": str(number), "name": "instances of mine"})
    monkeypatch.setattr(companions, "_cancel", lambda number: events.append(("cancel", number)))
    monkeypatch.setattr(companions, "run_deployment", lambda *_, **__: events.append(("start", new)) or SimpleNamespace(id=new))
    with companions.companions(config, pool_instances=1):
        assert events == [*(("cancel", number) for number in before), ("start", new)]
        assert [row["flow_run_id"] for row in read_lines(notes)] == [str(new)]
    assert events[-1] == ("cancel", new)


@pytest.mark.parametrize(("tensor", "node", "instances", "wanted"), [
    (2, 8, 4, [4]), (2, 8, 8, [4, 4]), (2, 8, 16, [4, 4, 4, 4]), (4, 8, 3, [2, 1]), (3, 8, 4, [2, 2]), (1, 16, 5, [5]),
    (16, 8, 2, [1, 1]),  # more than a node has: refused there by name
    (2, 8, 0, []),
])  # fmt: skip
def test_instances_are_shared_among_nodes_by_what_a_node_holds(tensor, node, instances, wanted, tmp_path, monkeypatch):
    config = Config(run={"name": "mine", "output": str(tmp_path)}, rollout={"engine": "vllm", "tensor": tensor},
                    platform={"devices_per_node": node})  # fmt: skip
    config.folder.mkdir()
    asked = []
    monkeypatch.setattr(companions, "_cancel", lambda number: None)
    monkeypatch.setattr(companions, "run_deployment", lambda deployment, parameters, **_: asked.append(
        (deployment, parameters["instances"])) or SimpleNamespace(id=uuid4()))
    with companions.companions(config, pool_instances=instances):
        assert asked == [(companions.INSTANCES, share) for share in wanted]


@pytest.mark.parametrize(("state", "asked"), [
    (states.Scheduled(), ["CANCELLED"]), (states.AwaitingRetry(), ["CANCELLED"]), (states.Running(), ["CANCELLING"]),
    (states.Crashed(), ["CANCELLED"]),  # a node that crashed would be resumed when its run is over
    (states.Completed(), []), (states.Failed(), []), (states.Cancelled(), []),
])  # fmt: skip
def test_what_is_under_way_or_may_come_back_is_cancelled(state, asked, monkeypatch):
    sent = []
    client = SimpleNamespace(read_flow_run=lambda _: SimpleNamespace(state=state),
                             set_flow_run_state=lambda _, wanted: sent.append(wanted.type.value))  # fmt: skip
    monkeypatch.setattr(companions, "get_client", lambda sync_client: nullcontext(client))
    companions._cancel(uuid4())
    assert sent == asked
