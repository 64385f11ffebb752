"""What follows from the news of a process that Ray placed. Ray itself is in tests/integration/test_ray_cluster.py."""

import sys
from types import SimpleNamespace

import pytest

from engine.errors import BadInput, DeadlineError
from engine.run.instance_process import REFILL_S
from engine.run.placed_process import News
from tasks.cluster import ray_cluster


@pytest.fixture
def ray(monkeypatch):
    """The names of Ray that are used here."""
    error = type("RayError", (Exception,), {})
    found = SimpleNamespace(
        kill=lambda actor: None,
        exceptions=SimpleNamespace(RayError=error, GetTimeoutError=type("GetTimeoutError", (error, TimeoutError), {})),
    )
    monkeypatch.setitem(sys.modules, "ray", found)
    return found


def test_an_hour_without_a_fault_resets_the_count_of_restarts(ray, monkeypatch, tmp_path):
    now = 0.0
    monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: now)
    part = ray_cluster._Part("instance-0", 0, {"CPU": 1.0}, files={"config.toml": ""})
    again = []
    for ran_s in (1.0, 1.0, REFILL_S + 1.0, 1.0, 1.0):
        part.began = now
        part.again = 0.0
        now += ran_s
        assert ray_cluster._has_ended(part, News(1, b"log"), restarts=2, logs=tmp_path)
        again.append(part.again > 0)
    assert again == [True, True, True, True, False]
    assert (tmp_path / "instance-0.log").read_bytes() == b"log" * 5


def test_the_first_trainer_node_is_not_waited_for_without_end(ray, monkeypatch):
    errors = {ray.exceptions.GetTimeoutError: DeadlineError, ray.exceptions.RayError: BadInput}
    for raised, shown in errors.items():

        def get(answer, timeout=None, raised=raised):
            assert timeout == 5.0
            raise raised("no module named tasks")

        ray.get = get
        actor = SimpleNamespace(place=SimpleNamespace(remote=lambda: "asked"))
        monkeypatch.setattr(ray_cluster, "_actor", lambda part, actor=actor: actor)
        part = ray_cluster._Part("trainer node 0", 0, {"GPU": 1.0})
        with pytest.raises(shown, match="start(ed)? trainer node 0"), ray_cluster._devices([part], 5.0):
            pass
