"""What follows from the news of a process that Ray placed. Ray itself is in tests/integration/test_ray_cluster.py."""

import re
import resource
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.run.instance_process import REFILL_S
from engine.run.placed_process import ActorPlace, News
from support.runs import config_of, wait_for
from tasks import interruption
from tasks.cluster import ray_cluster, ray_following, ray_parts, ray_room

HERE = ActorPlace("node", "10.0.0.1", {}, 0)


@pytest.fixture
def ray(monkeypatch):
    """The names of Ray that are used here."""
    error = type("RayError", (Exception,), {})
    found = SimpleNamespace(
        kill=lambda actor: None,
        wait=lambda answers, num_returns=1, timeout=None: (answers, []),
        get=lambda answer, timeout=None: answer() if callable(answer) else answer,
        exceptions=SimpleNamespace(RayError=error, GetTimeoutError=type("GetTimeoutError", (error, TimeoutError), {})),
    )
    monkeypatch.setitem(sys.modules, "ray", found)
    return found


def followed(parts, logs, growth=None, **keys):
    logs.mkdir(exist_ok=True)
    config = config_of({"cluster.engine": "ray"} | keys)
    growth = growth or ray_room.Growth(len(parts), 0, None, run="run")
    watch = SimpleNamespace(waits=False)
    return ray_following.Followed(parts=parts, config=config, logs=logs, here=HERE, growth=growth, watch=watch)


def actor(**answers):
    """An actor whose methods answer so; an exception is raised."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=lambda *_, a=a: a) for name, a in answers.items()})


def raises(error):
    def answer():
        raise error

    return answer


def test_an_hour_without_a_fault_resets_the_count_of_restarts(ray, monkeypatch, tmp_path):
    now = 0.0
    monkeypatch.setattr(ray_following.time, "monotonic", lambda: now)
    part = ray_parts.PlacedPart("instance-0", {"CPU": 1.0}, module="flows.cli", files={"config.toml": ""})
    follower = followed([part], tmp_path, **{"rollout.restarts": 2})
    again = []
    for ran_s in (1.0, 1.0, REFILL_S + 1.0, 1.0, 1.0):
        part.began = now
        part.again = 0.0
        now += ran_s
        part.actor = actor(stop=b"last")
        assert follower.has_ended(part, News(1, b"log"))
        again.append(part.again > 0)
    assert again == [True, True, True, True, False]
    assert (tmp_path / "instance-0.log").read_bytes() == b"loglast" * 4 + b"log"


def test_what_a_process_prints_while_it_is_ended_reaches_its_log(ray, tmp_path):
    part = ray_parts.PlacedPart("trainer node 1", {"CPU": 1.0}, module=ray_parts.RANKS, actor=actor(stop=b"bye\n"))
    ray_parts.end([part], tmp_path)
    assert (tmp_path / "trainer-node-1.log").read_bytes() == b"bye\n"
    assert part.actor is None


def test_a_log_that_cant_be_written_keeps_no_process_from_its_end(ray, tmp_path, capsys):
    parts = [
        ray_parts.PlacedPart(name, {}, module="flows.cli", actor=actor(stop=b"bye\n"))
        for name in ("instance-0", "instance-1")
    ]
    (tmp_path / "instance-0.log").mkdir()
    ray_parts.end(parts, tmp_path)
    assert [part.actor for part in parts] == [None, None]
    assert (tmp_path / "instance-1.log").read_bytes() == b"bye\n"
    assert "instance-0.log can't be written" in capsys.readouterr().err


def test_a_part_that_cant_be_followed_is_lost_and_said_and_the_others_go_on(ray, monkeypatch, tmp_path, capsys):
    begun = []
    monkeypatch.setattr(ray_following, "begin", lambda part: begun.append(part.name))
    monkeypatch.setattr(ray_following, "BACKOFF_S", 0.01)
    monkeypatch.setattr(ray_following, "LOOK_S", 0.01)
    wrong = ray_parts.PlacedPart("instance-0", {}, "flows.cli", files={"a": ""}, answer=raises(KeyError("what")))
    fine = ray_parts.PlacedPart("instance-1", {}, "flows.cli", files={"a": ""}, answer=lambda: News(None, b"on\n"))
    fine.actor = actor(look=lambda: News(None, b"on\n"))
    wrong.actor = actor()
    monkeypatch.setattr(ray, "kill", lambda actor: raises(ValueError("no such actor"))())
    with followed([wrong, fine], tmp_path):
        wait_for(lambda: "instance-0" in begun, "the restart", 10)
        wait_for(lambda: (tmp_path / "instance-1.log").read_bytes().count(b"on") > 2, "the other's log", 10)
    printed = capsys.readouterr()
    assert "instance-0 can't be followed: KeyError: 'what'; it starts again where there is room" in printed.out
    assert "Ray can't end instance-0: ValueError: no such actor" in printed.err


def test_what_fails_on_a_node_is_said_and_not_that_the_node_is_lost(ray, monkeypatch, tmp_path, capsys):
    """Ray wraps what an actor raises; the first line of that names the worker's process."""
    wrapped = ray.exceptions.RayError("ray::_Held.start_with() (pid=7)\n  File ...\nOSError: no space left")
    wrapped.cause = OSError("no space left")
    part = ray_parts.PlacedPart("instance-0", {}, "flows.cli", files={"a": ""}, actor=actor(), answer=raises(wrapped))
    followed([part], tmp_path)._follow_part(part)
    part.answer = raises(ray.exceptions.RayError("the actor died"))
    with pytest.raises(BadInput, match="Ray can't start instance-0: the actor died"):
        ray_parts.first_place(part, 1.0)
    followed([part], tmp_path)._follow_part(part)
    part.answer = raises(wrapped)
    with pytest.raises(BadInput, match="Ray can't start instance-0: no space left$"):
        ray_parts.first_place(part, 1.0)
    wrapped.cause = DeadlineError("nothing was sent")
    with pytest.raises(DeadlineError, match="Ray can't start instance-0: nothing was sent$"):
        ray_parts.first_place(part, 1.0)
    said = capsys.readouterr().out
    assert "instance-0 fails on its node: OSError: no space left; it starts again" in said
    assert "instance-0 is lost with its node: the actor died; it starts again" in said


def refusal(ray, text):
    """What Ray makes of an actor's BadInput."""
    wrapped = ray.exceptions.RayError("ray::_Held.start_with() (pid=7)")
    wrapped.cause = BadInput(text)
    return wrapped


def test_an_instance_whose_start_is_refused_is_given_up_and_without_any_other_the_run_ends(ray, tmp_path, capsys):
    parts = [
        ray_parts.PlacedPart(f"instance-{number}", {"CPU": 1.0}, "flows.cli", files={"a": ""}) for number in range(2)
    ]
    follower = followed(list(parts), tmp_path)
    parts[0].actor = actor()
    parts[0].answer = raises(refusal(ray, "m has changed"))
    follower._follow_part(parts[0])
    said = "instance-0 can't start on its node and is not started again: m has changed"
    assert said in capsys.readouterr().out
    assert (parts[0].actor, parts[0].answer, parts[0].again) == (None, None, 0.0)
    assert follower.await_nodes() is follower._config  # there is another one
    assert follower.has_ended(parts[1], News(2, b"bad input"))
    with pytest.raises(MetronomeError, match=f"of the instances that Ray starts is left, .*: {said}"):
        follower.await_nodes()


def test_a_further_instance_whose_start_is_refused_leaves_its_room_to_others(ray, monkeypatch, tmp_path):
    room = RoomOnRay(monkeypatch, 2)
    growth = ray_room.Growth(1, 3, further, run="run")
    part = growth.grown()
    part.actor = actor()
    part.answer = raises(refusal(ray, "m has changed"))
    follower = followed([part], tmp_path, growth)
    follower._follow_part(part)
    assert (room.free, follower._parts, part.actor, growth.grown()) == (2, [], None, None)


@pytest.mark.parametrize("least", [0, 1])
def test_a_trainer_node_that_is_not_started_again_is_waited_for_by_nobody(ray, tmp_path, capsys, least):
    keys = {"parallel.nodes": 2, "parallel.data": 2, "parallel.rendezvous": "auto", "cluster.least_nodes": least}
    part = ray_parts.PlacedPart("trainer node 1", {}, ray_parts.RANKS, place=HERE)
    follower = followed([part], tmp_path, **keys, **{"run.resumes": 0})
    part.actor = actor(place=HERE, stop=b"")
    assert follower.has_ended(part, News(1, b"no rendezvous"))
    said = r"trainer node 1 ended with 1 and is not started again; its log: .*trainer-node-1\.log"
    if least:
        assert follower.await_nodes().parallel.nodes == 1
        assert re.search(f"{said}; the run goes on with parallel.nodes = 1", capsys.readouterr().out)
        part.again = 0.0
    else:
        with pytest.raises(MetronomeError, match=said):
            follower.await_nodes()


def test_a_log_that_cant_be_written_ends_no_process(ray, tmp_path, capsys):
    part = ray_parts.PlacedPart("instance-0", {}, "flows.cli", files={"a": ""})
    follower = followed([part], tmp_path / "logs")
    (tmp_path / "logs/instance-0.log").mkdir()
    assert not follower.has_ended(part, News(None, b"log"))
    assert not follower.has_ended(part, News(None, b"log"))
    assert capsys.readouterr().err.count("instance-0.log can't be written") == 1


def test_a_run_goes_on_with_fewer_trainer_nodes_and_asks_for_all_again(ray, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ray_following, "SPARE_S", 0.2)
    keys = {"parallel.nodes": 4, "parallel.data": 4, "parallel.rendezvous": "auto", "cluster.least_nodes": 2}
    nodes = [ray_parts.PlacedPart(f"trainer node {number}", {}, ray_parts.RANKS) for number in (1, 2, 3)]
    for part in nodes:
        part.place = HERE
        part.actor = actor(place=HERE, stop=b"")
    follower = followed(list(nodes), tmp_path, **keys)
    assert follower.await_nodes().parallel.nodes == 4
    nodes[1].actor = actor(place=raises(ray.exceptions.RayError("its node is gone")))
    left = follower.await_nodes()
    assert (left.parallel.nodes, left.parallel.data, left.parallel.rendezvous) == (3, 3, "auto")
    assert "goes on with parallel.nodes = 3 and parallel.data = 3" in capsys.readouterr().out
    for part in nodes[:2]:  # another one is lost, and the first one comes back
        part.place = None
    found = []

    def look_again():
        found.append(nodes[1].again)
        nodes[0].place = HERE
        nodes[1].place = HERE

    monkeypatch.setattr(ray_following.time, "sleep", lambda s: look_again())
    assert follower.await_nodes() is follower._config
    assert found[0] != float("inf")


def test_a_run_that_may_not_shrink_waits_and_names_the_node(ray, monkeypatch, tmp_path):
    keys = {"parallel.nodes": 2, "parallel.data": 2, "parallel.rendezvous": "auto", "cluster.wait_s": 0.1}
    part = ray_parts.PlacedPart("trainer node 1", {}, ray_parts.RANKS)
    with pytest.raises(DeadlineError, match=r"not started trainer node 1 again within 0\.1 s \(cluster\.wait_s\)"):
        followed([part], tmp_path, **keys).await_nodes()


class RoomOnRay:
    """A cluster with room for a number of bundles, the requests that it has not answered, and another
    run."""

    def __init__(self, monkeypatch, free):
        self.free = free
        self.groups = []
        monkeypatch.setattr(ray_room, "ask_for_room", self.ask)
        table = SimpleNamespace(placement_group_table=self.table)
        monkeypatch.setitem(sys.modules, "ray.util.placement_group", table)
        monkeypatch.setattr(ray_room, "has_room", lambda part: self.settle() or part.group.granted)
        monkeypatch.setattr(ray_room, "give_back", self.give_back)

    def ask(self, parts, strategy, run, selector=None):
        group = SimpleNamespace(id=bytes([len(self.groups)]), wants=len(parts), granted=False, name=f"{run}/{strategy}")
        self.groups.append(group)
        for part in parts:
            part.group = group

    def table(self):
        """As Ray's."""
        states = {True: "CREATED", False: "PENDING"}
        ours = {one.id.hex(): {"name": one.name, "state": states[one.granted]} for one in self.groups}
        others = [("another/1", "CREATED"), ("gone/1", "REMOVED"), ("waits/1", "PENDING"), ("", "CREATED")]
        return ours | {f"ff{place}": {"name": name, "state": state} for place, (name, state) in enumerate(others)}

    def settle(self):
        for group in self.groups:
            if not group.granted and group.wants <= self.free:
                self.free -= group.wants
                group.granted = True

    def give_back(self, parts):
        for group in {id(part.group): part.group for part in parts}.values():
            self.groups.remove(group)
            self.free += group.wants * group.granted


def test_a_run_keeps_no_part_of_its_room_from_others_and_takes_all_once_it_is_there(ray, monkeypatch):
    room = RoomOnRay(monkeypatch, 3)
    monkeypatch.setattr(ray_room, "HOLD_S", 0.2)
    monkeypatch.setattr(ray_room, "BACK_S", 0.01)
    monkeypatch.setattr(ray_room, "POLL_S", 0.01)
    ray.available_resources = lambda: {"CPU": room.free}
    nodes = [
        ray_parts.PlacedPart("trainer node 0", {"CPU": 1.0}),
        ray_parts.PlacedPart("trainer node 1", {"CPU": 1.0}, "ranks"),
    ]
    instances = [ray_parts.PlacedPart(f"instance-{number}", {"CPU": 1.0}, files={"a": ""}) for number in range(2)]
    seen = set()
    give_back = room.give_back

    def others(parts):
        give_back(parts)
        seen.add(room.free)
        if len(seen) and len(room.groups) == 0:
            room.free += 1  # another run ends

    monkeypatch.setattr(ray_room, "give_back", others)
    ray_room.take_room(nodes, instances, 10.0, HERE, run="run")
    assert seen == {3}  # it gave back the nodes' room while it waited for the instances'
    assert room.free == 0
    assert all(part.group.granted for part in [*nodes, *instances])


def test_without_room_the_run_says_what_it_lacks(ray, monkeypatch):
    room = RoomOnRay(monkeypatch, 1)
    ray.available_resources = lambda: {"CPU": room.free}
    nodes = [ray_parts.PlacedPart("trainer node 0", {"NPU": 8.0})]
    instances = [ray_parts.PlacedPart(f"instance-{number}", {"CPU": 1.0}, "serve") for number in range(2)]
    with pytest.raises(DeadlineError) as error:
        ray_room.take_room(nodes, instances, 0.3, HERE, run="run")  # which has room for its nodes meanwhile
    wants = "instance-0 (1 CPU), instance-1 (1 CPU)"
    said = f"Ray has no room for {wants}; free are no devices; room is held by another; waited 0.3 s (cluster.wait_s)"
    assert str(error.value) == said
    assert room.groups == []


def further(number):
    return ray_parts.PlacedPart(f"instance-{number}", {"CPU": 1.0}, "serve", files={"a": ""}, extra=True)


def test_instances_grow_with_the_cluster_up_to_their_most_and_give_their_room_back(ray, monkeypatch, tmp_path):
    room = RoomOnRay(monkeypatch, 1)
    begun = []
    monkeypatch.setattr(ray_following, "begin", begun.append)
    monkeypatch.setattr(ray_following, "LOOK_S", 0.01)

    with followed([], tmp_path, ray_room.Growth(1, 3, further, run="run")) as follower:
        wait_for(lambda: [part.name for part in begun] == ["instance-1"], "the first", 10)
        room.free += 5
        wait_for(lambda: len(begun) == 2, "the second", 10)
        wait_for(lambda: room.free == 4, "no further one", 10)
        begun[0].answer = raises(ray.exceptions.RayError("its node is gone"))
        wait_for(lambda: len(begun) == 3, "another in its place", 10)
    assert [part.name for part in follower._parts] == ["instance-2", "instance-3"]
    assert len(room.groups) == 2


def test_a_node_that_cant_start_further_instances_is_asked_ever_less_often(ray, monkeypatch, tmp_path):
    RoomOnRay(monkeypatch, 10)
    now = 0.0
    begun = []
    monkeypatch.setattr(ray_following.time, "monotonic", lambda: now)
    growth = ray_room.Growth(1, 2, further, run="run")
    follower = followed([], tmp_path, growth)

    def begin(part):
        begun.append(now)
        part.answer = raises(ray.exceptions.RayError("no module named tasks"))

    monkeypatch.setattr(ray_following, "begin", begin)
    while now < 200.0:
        follower._grow()
        for part in list(follower._parts):
            follower._follow_part(part)
        now += 0.5
    assert begun == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0]
    growth.losses = 2000  # half a day later
    now = 300.0
    follower._grow()
    follower._lose(follower._parts[0], "is lost")
    monkeypatch.setattr(ray_following, "begin", lambda part: setattr(part, "answer", HERE))
    now += 60.0
    follower._grow()
    follower._parts[0].actor = actor(look=None)
    follower._look_at(follower._parts[0])
    assert growth.losses == 0


def test_a_further_instance_that_has_ended_for_good_leaves_its_room_to_others(ray, monkeypatch, tmp_path):
    room = RoomOnRay(monkeypatch, 2)
    growth = ray_room.Growth(1, 3, further, run="run")
    part = growth.grown()
    part.actor = actor(stop=b"")
    follower = followed([part], tmp_path, growth)
    assert room.free == 1
    assert follower.has_ended(part, News(2, b"bad input"))
    assert (room.free, follower._parts, part.actor, growth.grown()) == (2, [], None, None)


def test_the_first_trainer_node_is_not_waited_for_without_end(ray, monkeypatch):
    errors = {ray.exceptions.GetTimeoutError: DeadlineError, ray.exceptions.RayError: BadInput}
    for raised, shown in errors.items():

        def get(answer, timeout=None, raised=raised):
            assert timeout == 5.0
            raise raised("no module named tasks")

        ray.get = get
        monkeypatch.setattr(ray_cluster, "start_actor", lambda part: actor(place="asked"))
        part = ray_parts.PlacedPart("trainer node 0", {"GPU": 1.0})
        with pytest.raises(shown, match="start(ed)? trainer node 0"), ray_cluster._devices([part], 5.0):
            pass


def test_what_fails_at_the_end_keeps_no_process_and_no_room(ray, monkeypatch, tmp_path):
    done = []

    class Growing:
        def stop(self):
            raise ray.exceptions.RayError("the head is gone")

    monkeypatch.setattr(ray_cluster, "end", lambda parts, logs: done.append("ended"))
    monkeypatch.setattr(ray_cluster, "give_back", lambda parts: done.append("given back"))
    there = SimpleNamespace(lost="")
    with (
        pytest.raises(ray.exceptions.RayError, match="the head is gone"),
        ray_cluster._ending([], Growing(), tmp_path, there),
    ):
        pass
    assert done == ["ended", "given back"]
    with ray_cluster._ending([], Growing(), tmp_path, SimpleNamespace(lost="the head")):
        pass
    assert done[2:] == ["ended"]


@pytest.fixture
def sigterm():
    """A handler like the one of the command line."""

    def handle(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handle)
    yield
    signal.signal(signal.SIGTERM, before)


def needed(name, there, **more):
    return ray_following.Needed(name, f"127.0.0.1:{there.getsockname()[1]}", **more)


@pytest.fixture
def quick_looks(monkeypatch):
    monkeypatch.setattr(ray_following, "TOUCH_S", 0.05)
    monkeypatch.setattr(ray_following, "SILENCES", 3)


def test_a_ray_that_is_lost_ends_what_the_run_does_with_one_error(monkeypatch, capsys, sigterm, quick_looks):
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        head = needed("the head", one)
        node = needed("the node", other)
        said = rf"the node \({node.address}\) has not answered 3 times in \d s"
        began = time.monotonic()
        threading.Timer(0.5, other.close).start()
        with pytest.raises(MetronomeError, match=f"{said}, and .*: resume the run"):
            with ray_following.RayWatch([head, node]):
                time.sleep(60.0)
        assert 0.5 < time.monotonic() - began < 30.0
        assert re.search(f"{said}; the run ends", capsys.readouterr().out)
        with pytest.raises(ValueError, match="its own"), ray_following.RayWatch([head]):
            raise ValueError("its own")
        monkeypatch.setattr(interruption._command, "stops", True)  # it saves a checkpoint, which no signal may end
        with ray_following.RayWatch([node]) as watch:
            wait_for(lambda: watch.lost, "the loss", 30)
            time.sleep(0.2)


def test_a_head_that_can_come_back_is_waited_for_with_a_word_before_and_after(capsys, sigterm, quick_looks):
    there = threading.Event()
    there.set()
    with socket.create_server(("127.0.0.1", 0)) as one:
        head = needed("the head", one, responds=there.is_set, wait_s=600.0)
        with ray_following.RayWatch([head]) as watch:
            there.clear()
            wait_for(lambda: watch.waits, "the silence", 30)
            time.sleep(0.5)
            there.set()
            wait_for(lambda: not watch.waits, "the answer", 30)
            time.sleep(0.2)
            assert not watch.lost
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2
    silent = rf"the head \({head.address}\) has not answered 3 times in \d s; the run goes on without it"
    assert re.search(f"{silent} for up to 600 s", told[0])
    assert re.search(rf"the head \({head.address}\) is back after \d s", told[1])


def test_a_head_that_does_not_come_back_in_time_is_lost_and_it_is_the_one_that_is_named(capsys, sigterm, quick_looks):
    """Ray's node gives up too, and ends."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        head = needed("the head", one, responds=lambda: False, wait_s=1.5)
        node = needed("the node", other)
        began = time.monotonic()
        threading.Timer(0.5, other.close).start()
        with pytest.raises(MetronomeError, match=r"the head \(\S+\) has not answered \d+ times"):
            with ray_following.RayWatch([head, node]):
                time.sleep(60.0)
        assert time.monotonic() - began < 30.0
        began = time.monotonic()
        with pytest.raises(MetronomeError, match=r"the head \(\S+\) has not answered \d+ times in [12] s"):
            with ray_following.RayWatch([head]):
                time.sleep(60.0)
        assert 1.5 <= time.monotonic() - began < 30.0


def test_nothing_is_started_while_the_head_is_away(ray, monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(ray_following, "begin", begun.append)
    part = ray_parts.PlacedPart("instance-0", {}, "flows.cli", files={"a": ""}, again=1.0)
    following = followed([part], tmp_path)
    following._growth = SimpleNamespace(grown=lambda: begun.append("more"))
    following._watch.waits = True
    following._follow_all()
    assert begun == []
    following._watch.waits = False
    following._follow_all()
    assert begun == [part, "more"]


def test_room_is_not_given_back_to_a_head_that_dies_as_the_run_ends(ray, monkeypatch, tmp_path):
    """A process that a signal ends gets no second one from RayWatch."""
    monkeypatch.setattr(ray_cluster, "give_back", lambda parts: threading.Event().wait(60.0))
    watch = SimpleNamespace(lost="")
    threading.Timer(0.3, lambda: setattr(watch, "lost", "the head")).start()
    began = time.monotonic()
    growth = ray_room.Growth(0, 0, None, run="run")
    with pytest.raises(KeyboardInterrupt), ray_cluster._ending([], growth, tmp_path, watch):
        raise KeyboardInterrupt
    assert time.monotonic() - began < 30.0


def test_a_head_that_stands_still_is_not_waited_for_without_end(ray, monkeypatch):
    monkeypatch.setattr(ray_room, "HEAD_S", 0.1)
    with pytest.raises(DeadlineError, match=r"Ray's head has not answered within 0\.1 s"):
        ray_room._answer(lambda: threading.Event().wait(60.0))
    with pytest.raises(TimeoutError, match="its own"):
        ray_room._answer(raises(TimeoutError("its own")))


def test_room_that_ray_does_not_take_back_does_not_end_the_following(ray, monkeypatch, tmp_path, capsys):
    class Kept(ray_room.Growth):
        def drop(self, part, again=0.0):
            raise DeadlineError("Ray's head has not answered")

    monkeypatch.setattr(ray_following, "LOOK_S", 0.01)
    lost = ray_parts.PlacedPart("instance-1", {}, "flows.cli", files={"a": ""}, extra=True)
    lost.actor = actor()
    lost.answer = raises(ray.exceptions.RayError("the actor died"))
    ended = ray_parts.PlacedPart("instance-0", {}, "flows.cli", files={"a": ""}, place=HERE)
    ended.actor = actor()
    ended.answer = News(0, b"its last words")
    with followed([lost, ended], tmp_path, Kept(1, 2, None, run="run")):
        wait_for(lambda: ended.answer is None, "the next part", 10)
    assert (tmp_path / "instance-0.log").read_bytes() == b"its last words"
    said = capsys.readouterr().err
    assert "warning: the cluster is not followed: DeadlineError: Ray's head has not answered" in said


def test_a_process_without_another_file_says_nothing_of_ray(ray):
    with socket.create_server(("127.0.0.1", 0)) as there:
        node = needed("the node", there)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            answers = node.answers()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert answers
        assert node.answers()
    assert not node.answers()
