"""What follows from the news of a process that Ray placed, on a double of Ray itself. tests/integration/
test_ray_cluster.py has the real one: nodes and heads that die or return, room that is lacking or grows."""

import re
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.run.instance_process import REFILL_S
from engine.run.placed_process import ActorPlace, News
from support.runs import config_of, wait_for
from tasks.cluster.ray import following as ray_following
from tasks.cluster.ray import parts as ray_parts
from tasks.cluster.ray import placement as ray_cluster
from tasks.cluster.ray.parts import RANKS, PlacedPart
from tasks.terminal import interruption

HERE = ActorPlace("node", "10.0.0.1", {}, 0)


class RayError(Exception):
    """Of an actor that is gone, or with the `cause` that its code has raised."""

    def __init__(self, text="its node is gone", cause=None):
        super().__init__(text)
        self.cause = cause


class GetTimeoutError(RayError, TimeoutError):
    pass


@dataclass(eq=False)
class Look:
    """An actor's answer to a look, which comes with the news of its process."""

    name: str


class Ray:
    """Ray, as far as it is used: room for `free` bundles, and actors that answer what a test says."""

    def __init__(self, free=100):
        self.free = free
        self.groups = []
        self.begun = []
        """The names of the processes that were started."""
        self.starts = {}
        """What a start answers by name; a place by default."""
        self.news = {}
        """What the next look tells by name."""
        self.unkillable = False
        self.remove = self.forget
        self.exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)

    def forget(self, group):
        self.groups.remove(group)
        self.free += group.wants * group.granted

    def placement_group(self, bundles, strategy, name, bundle_label_selector):
        self.groups.append(SimpleNamespace(id=name.encode(), name=name, wants=len(bundles), granted=False))
        return self.groups[-1]

    def placement_group_table(self, asked=None):
        for group in self.groups:
            if not group.granted and group.wants <= self.free:
                self.free -= group.wants
                group.granted = True
        states = {True: "CREATED", False: "PENDING"}
        if asked is not None:
            return {"state": states[asked.granted]}
        ours = {one.id.hex(): {"name": one.name, "state": states[one.granted]} for one in self.groups}
        others = [("another/1", "CREATED"), ("gone/1", "REMOVED"), ("waits/1", "PENDING"), ("", "CREATED")]
        return ours | {f"ff{place}": {"name": name, "state": state} for place, (name, state) in enumerate(others)}

    def available_resources(self):
        return {"CPU": self.free}

    def remote(self, kind):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self.actor()))

    def actor(self, name="", place=HERE):
        """An actor of the process `name`, which says its place."""

        def start(module, arguments, files, environment):
            name = re.sub(r"(instance-\d+)-\d+$", r"\1", arguments[-1])
            self.begun.append(name)
            made.name = name
            return self.starts.get(name, HERE)

        def answers(act):
            return SimpleNamespace(remote=lambda *given: act(*given))

        made = SimpleNamespace(name=name, start=answers(start), place=answers(lambda: place))
        made.look = answers(lambda: Look(made.name))
        made.stop = answers(lambda grace_s: b"bye\n")
        return made

    def wait(self, answers, num_returns=1, timeout=None):
        ready = [one for one in answers if not isinstance(one, Look) or one.name in self.news]
        return ready, [one for one in answers if one not in ready]

    def get(self, answer, timeout=None):
        found = self.news.pop(answer.name) if isinstance(answer, Look) else answer
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, actor):
        if self.unkillable:
            raise ValueError("no such actor")


@pytest.fixture
def ray(monkeypatch):
    found = Ray()
    groups = SimpleNamespace(
        placement_group=found.placement_group,
        placement_group_table=found.placement_group_table,
        remove_placement_group=lambda group: found.remove(group),
    )
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *given: given)
    monkeypatch.setitem(sys.modules, "ray", found)
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", groups)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    for module, names in ((ray_following, ("LOOK_S", "BACKOFF_S")), (ray_parts, ("POLL_S", "BACK_S"))):
        for name in names:
            monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr(ray_parts, "HOLD_S", 0.2)
    return found


def instance(number, **more):
    return PlacedPart(f"instance-{number}", {"CPU": 1.0}, "flows.cli", files={"a": ""}, **more)


def further(number):
    return instance(number, extra=True)


def growth(instances=0, most=0):
    return ray_parts.Growth(instances, most, further, run="run")


def followed(parts, logs, room=None, **keys):
    logs.mkdir(exist_ok=True)
    config = config_of({"cluster.engine": "ray"} | keys)
    watch = SimpleNamespace(waits=False)
    return ray_following.Followed(
        parts=parts, config=config, logs=logs, here=HERE, growth=room or growth(len(parts)), watch=watch
    )


def begun(*parts):
    for part in parts:
        ray_parts.begin(part)
    return list(parts)


# one process ---------------------------------------------------------------------------------------


def test_an_hour_without_a_fault_resets_the_count_of_restarts(ray, monkeypatch, tmp_path):
    now = 0.0
    monkeypatch.setattr(ray_following.time, "monotonic", lambda: now)
    part = instance(0)
    follower = followed([part], tmp_path, **{"rollout.restarts": 2})
    again = []
    for ran_s in (1.0, 1.0, REFILL_S + 1.0, 1.0, 1.0):
        part.began = now
        part.again = 0.0
        now += ran_s
        part.actor = ray.actor()
        assert follower.has_ended(part, News(1, b"log"))
        again.append(part.again > 0)
    assert again == [True, True, True, True, False]
    assert (tmp_path / "instance-0.log").read_bytes() == b"logbye\n" * 4 + b"log"


def test_what_processes_print_reaches_their_logs_and_one_without_a_log_goes_on_and_ends_too(ray, tmp_path, capsys):
    parts = [*begun(instance(0), instance(1)), PlacedPart("trainer node 1", {}, RANKS, actor=ray.actor())]
    follower = followed(parts, tmp_path)
    (tmp_path / "instance-0.log").mkdir()
    assert [follower.has_ended(parts[0], News(None, b"log")) for _ in range(2)] == [False, False]
    assert capsys.readouterr().err.count("instance-0.log can't be written") == 1
    ray_parts.end(parts, tmp_path)
    assert [part.actor for part in parts] == [None] * 3
    for name in ("instance-1.log", "trainer-node-1.log"):
        assert (tmp_path / name).read_bytes() == b"bye\n"
    assert "instance-0.log can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RayError("the actor died"), "is lost with its node: the actor died; it starts again where there is room"),
        (RayError("ray::_Held.start()\n ...", OSError("no space")), "fails on its node: OSError: no space; it starts"),
        (KeyError("what"), "can't be followed: KeyError: 'what'; it starts again"),
    ],
)
def test_a_process_that_fails_is_said_and_starts_again_and_the_others_go_on(ray, tmp_path, capsys, error, said):
    ray.starts["instance-0"] = error
    ray.unkillable = True
    with followed(begun(instance(0), instance(1)), tmp_path):
        wait_for(lambda: ray.begun.count("instance-0") > 2, "two restarts", 10)
        ray.news["instance-1"] = News(None, b"on\n")
        wait_for(lambda: (tmp_path / "instance-1.log").exists(), "the other's log", 10)
    printed = capsys.readouterr()
    assert f"instance-0 {said}" in printed.out
    assert "Ray can't end instance-0: ValueError: no such actor" in printed.err


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (GetTimeoutError(), DeadlineError, r"Ray has not started instance-0 within 5 s \(cluster.wait_s\)"),
        (RayError("the actor died"), BadInput, "Ray can't start instance-0: the actor died"),
        (RayError("ray::", OSError("no space")), BadInput, "Ray can't start instance-0: no space$"),
        (RayError("ray::", DeadlineError("nothing was sent")), DeadlineError, "instance-0: nothing was sent$"),
    ],
)
def test_a_first_start_that_fails_is_an_error_of_the_run(ray, error, kind, said):
    with pytest.raises(kind, match=said):
        ray_parts.first_place(instance(0, answer=error), 5.0)


def test_a_refused_instance_is_given_up_and_without_any_other_the_run_ends(ray, tmp_path, capsys):
    ray.starts["instance-0"] = RayError("ray::", BadInput("m has changed"))
    parts = begun(instance(0), instance(1))
    follower = followed(parts, tmp_path)
    follower.follow_once()
    said = "instance-0 can't start on its node and is not started again: m has changed"
    assert said in capsys.readouterr().out
    assert (parts[0].actor, parts[0].answer, parts[0].again) == (None, None, 0.0)
    assert follower.await_nodes().cluster.engine == "ray"  # there is another one
    assert follower.has_ended(parts[1], News(2, b"bad input"))
    with pytest.raises(MetronomeError, match=f"of the instances that Ray starts is left, .*: {said}"):
        follower.await_nodes()


# trainer nodes -------------------------------------------------------------------------------------

TWO = {"parallel.nodes": 2, "parallel.data": 2, "parallel.rendezvous": "auto:29500"}


def test_own_addresses_are_those_by_which_ray_knows_this_machine(monkeypatch):
    """Not that of the default route, which other nodes of the cluster may not reach."""
    monkeypatch.setattr("engine.wire.address.ELSEWHERE", "127.0.0.1")
    config = ray_cluster.with_addresses(config_of({**TWO, "rollout.listen": "auto:7000"}), "127.0.0.9", training=True)
    assert re.fullmatch(r"127\.0\.0\.9:2\d{4}", config.rollout.listen)  # a loopback is none of a cluster's
    assert re.fullmatch(r"127\.0\.0\.9:2\d{4}", config.parallel.rendezvous)


@pytest.mark.parametrize("least", [0, 1])
def test_a_trainer_node_that_is_not_started_again_is_waited_for_by_nobody(ray, tmp_path, capsys, least):
    part = PlacedPart("trainer node 1", {}, RANKS, place=HERE, actor=ray.actor())
    follower = followed([part], tmp_path, **TWO, **{"cluster.least_nodes": least, "run.resumes": 0})
    assert follower.has_ended(part, News(1, b"no rendezvous"))
    said = r"trainer node 1 ended with 1 and is not started again; its log: .*trainer-node-1\.log"
    if least:
        assert follower.await_nodes().parallel.nodes == 1
        assert re.search(f"{said}; the run goes on with parallel.nodes = 1", capsys.readouterr().out)
    else:
        with pytest.raises(MetronomeError, match=said):
            follower.await_nodes()


def test_a_run_goes_on_with_fewer_trainer_nodes_and_asks_for_all_again(ray, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ray_following, "SPARE_S", 0.2)
    keys = {"parallel.nodes": 4, "parallel.data": 4, "parallel.rendezvous": "auto:29500", "cluster.least_nodes": 2}
    nodes = [PlacedPart(f"trainer node {one}", {}, RANKS, place=HERE, actor=ray.actor()) for one in (1, 2, 3)]
    follower = followed(list(nodes), tmp_path, **keys)
    assert follower.await_nodes().parallel.nodes == 4
    nodes[1].actor = ray.actor(place=RayError())
    left = follower.await_nodes()
    assert (left.parallel.nodes, left.parallel.data, left.parallel.rendezvous) == (3, 3, "auto:29500")
    assert "goes on with parallel.nodes = 3 and parallel.data = 3" in capsys.readouterr().out
    nodes[0].place = nodes[1].place = None  # another one is lost, and the first one comes back

    def come_back(seconds):
        assert nodes[1].again != float("inf")
        nodes[0].place = nodes[1].place = HERE

    monkeypatch.setattr(ray_following.time, "sleep", come_back)
    assert follower.await_nodes().parallel.nodes == 4


def test_a_run_that_may_not_shrink_waits_and_names_the_node(ray, tmp_path):
    part = PlacedPart("trainer node 1", {}, RANKS)
    with pytest.raises(DeadlineError, match=r"not started trainer node 1 again within 0\.1 s \(cluster\.wait_s\)"):
        followed([part], tmp_path, **TWO, **{"cluster.wait_s": 0.1}).await_nodes()


# room ----------------------------------------------------------------------------------------------


def test_a_run_keeps_no_part_of_its_room_from_others_and_takes_all_once_it_is_there(ray):
    ray.free = 3
    nodes = [PlacedPart("trainer node 0", {"CPU": 1.0}), PlacedPart("trainer node 1", {"CPU": 1.0}, RANKS)]
    instances = [instance(0), instance(1)]
    seen = set()

    def others(group):
        ray.forget(group)
        if not ray.groups:
            seen.add(ray.free)
            ray.free += 1  # another run ends

    ray.remove = others
    ray_parts.take_room(nodes, instances, 10.0, HERE, run="run")
    assert seen == {3}  # it gave back the nodes' room while it waited for the instances'
    assert ray.free == 0
    assert all(part.group.granted for part in [*nodes, *instances])


def test_a_head_that_stands_still_is_not_waited_for_without_end(ray, monkeypatch):
    monkeypatch.setattr(ray_parts, "HEAD_S", 0.1)
    ray.remove = lambda group: threading.Event().wait(60.0)
    ray_parts.ask_for_room([part := instance(0)], "SPREAD", "run")
    with pytest.raises(DeadlineError, match=r"Ray's head has not answered within 0\.1 s"):
        ray_parts.give_back([part])


def test_instances_grow_with_the_cluster_up_to_their_most_and_one_that_is_lost_is_replaced(ray, tmp_path):
    ray.free = 1
    with followed([], tmp_path, growth(1, 3)):
        wait_for(lambda: ray.begun == ["instance-1"], "the first", 10)
        ray.free += 5
        wait_for(lambda: len(ray.begun) == 2, "the second", 10)
        wait_for(lambda: ray.free == 4, "no further one", 10)
        ray.news["instance-1"] = RayError()
        wait_for(lambda: len(ray.begun) == 3, "another in its place", 10)
    assert ray.begun == ["instance-1", "instance-2", "instance-3"]
    assert len(ray.groups) == 2


@pytest.mark.parametrize("ends", ["refused", "ended"])
def test_a_further_instance_that_has_ended_for_good_leaves_its_room_to_others(ray, tmp_path, ends):
    ray.free = 2
    if ends == "refused":
        ray.starts["instance-1"] = RayError("ray::", BadInput("m has changed"))
    else:
        ray.news["instance-1"] = News(2, b"bad input")
    follower = followed(parts := [], tmp_path, growth(1, 2))
    for _ in range(4):
        follower.follow_once()
    assert (ray.free, parts, ray.begun) == (2, [], ["instance-1"])


def test_a_node_that_cant_start_further_instances_is_asked_ever_less_often(ray, monkeypatch, tmp_path):
    monkeypatch.setattr(ray_following, "BACKOFF_S", 1.0)
    now = 0.0
    monkeypatch.setattr(ray_following.time, "monotonic", lambda: now)
    ray.starts = dict.fromkeys((f"instance-{number}" for number in range(20)), RayError("no module named tasks"))
    room = growth(1, 2)
    follower = followed([], tmp_path, room)
    times = []
    while now < 200.0:
        before = len(ray.begun)
        follower.follow_once()
        times += [now] * (len(ray.begun) - before)
        now += 0.5
    assert times == [0.0, 1.5, 4.0, 8.5, 17.0, 33.5, 66.0, 126.5, 187.0]
    room.losses = 2000  # half a day later
    now += 60.0
    ray.starts = {}
    for _ in range(2):
        follower.follow_once()
    assert room.losses == 0


def test_nothing_is_started_while_the_head_is_away(ray, tmp_path):
    follower = followed([instance(0, again=0.001)], tmp_path, growth(1, 2))
    follower._watch.waits = True
    follower.follow_once()
    assert ray.begun == []
    follower._watch.waits = False
    follower.follow_once()
    assert ray.begun == ["instance-0", "instance-1"]


def test_room_that_ray_does_not_take_back_does_not_end_the_following(ray, tmp_path, capsys):
    def refuse(group):
        raise DeadlineError("Ray's head has not answered")

    ray.remove = refuse
    room = growth(1, 2)
    ray.starts["instance-1"] = RayError("the actor died")
    with followed(begun(instance(0)), tmp_path, room):
        wait_for(lambda: "instance-1" in ray.begun, "a further instance", 10)
        ray.news["instance-0"] = News(None, b"goes on\n")
        wait_for(lambda: (tmp_path / "instance-0.log").exists(), "the other part", 10)
    assert "warning: the cluster is not followed: DeadlineError: Ray's head has not" in capsys.readouterr().err


# the end, and Ray itself ---------------------------------------------------------------------------


def test_what_fails_at_the_end_keeps_no_process_and_no_room(ray, tmp_path):
    class Growing:
        def stop(self):
            raise RayError("the head is gone")

    for lost in ("", "the head"):
        ray_parts.ask_for_room([part := instance(0)], "SPREAD", "run")
        ray_parts.begin(part)
        ending = ray_cluster._ending([part], Growing(), tmp_path, SimpleNamespace(lost=lost))
        if lost:  # a head that is lost is asked for nothing
            with ending:
                pass
        else:
            with pytest.raises(RayError, match="the head is gone"), ending:
                pass
            assert ray.groups == []
        assert part.actor is None


def test_room_is_not_given_back_to_a_head_that_dies_as_the_run_ends(ray, tmp_path):
    """A process that a signal ends gets no second one from RayWatch."""
    ray.remove = lambda group: threading.Event().wait(60.0)
    ray_parts.ask_for_room([part := instance(0)], "SPREAD", "run")
    watch = SimpleNamespace(lost="")
    threading.Timer(0.3, lambda: setattr(watch, "lost", "the head")).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), ray_cluster._ending([part], growth(), tmp_path, watch):
        raise KeyboardInterrupt
    assert time.monotonic() - began < 30.0


@contextmanager
def needed(name):
    """A part of Ray that listens, and its socket."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        yield ray_following.Needed(name, f"127.0.0.1:{there.getsockname()[1]}"), there


@pytest.fixture
def quick_looks(monkeypatch):
    """And a handler of SIGTERM like the one of the command line."""
    monkeypatch.setattr(ray_following, "LOOK_S", 0.05)
    monkeypatch.setattr(ray_following, "SILENCES", 3)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_ray_that_is_lost_ends_what_the_run_does_with_one_error(monkeypatch, capsys, quick_looks):
    with needed("the head") as (head, _), needed("the node") as (node, there):
        said = rf"the node \({node.address}\) has not answered 3 times in \d s"
        threading.Timer(0.5, there.close).start()
        with pytest.raises(MetronomeError, match=f"{said}, and .*: resume the run"):
            with ray_following.RayWatch([head, node]):
                time.sleep(60.0)
        assert re.search(f"{said}; the run ends", capsys.readouterr().out)
        with pytest.raises(ValueError, match="its own"), ray_following.RayWatch([head]):
            raise ValueError("its own")
        monkeypatch.setattr(interruption._command, "stops", True)  # it saves a checkpoint, which no signal may end
        with ray_following.RayWatch([node]) as watch:
            wait_for(lambda: watch.lost, "the loss", 30)
            time.sleep(0.2)


def test_a_process_without_another_file_says_nothing_of_ray():
    with needed("the node") as (node, _):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            answers = node.answers()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert answers
        assert node.answers()
    assert not node.answers()
