"""Declared instances that die: noticed, started again, given up.
Their processes are real, what they serve is next to nothing."""

import asyncio
import contextlib
import re
import signal
import sys
from types import SimpleNamespace

import pytest

from engine.config import Config
from engine.errors import BadInput, DeadlineError, ProcessDied
from engine.orchestrator.pool import health
from engine.orchestrator.pool import pool as pool_module
from engine.orchestrator.pool.health import HealthMonitor
from engine.orchestrator.pool.pool import InstanceProcesses, Pool
from engine.orchestrator.run_events import RunEvents
from engine.run import instance_process
from engine.run.instance_process import InstanceProcess
from engine.run.process import signal_group
from support.scripted import SERVES, Scripted, publishing, until

FAILS = "import sys; print('the device is busy', file=sys.stderr); sys.exit(1)"
REFUSES = "import sys; print('instance-0: the model is bad\\nso it ends', file=sys.stderr); sys.exit(2)"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
HANGS = "import time; time.sleep(600)"


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """A pool of declared instances whose processes run what `programs` gives, the last one for ever."""

    @contextlib.asynccontextmanager
    async def begin(programs, **rollout):
        started = []

        def command(config, model, name, number, port_file):
            started.append(name)
            program = programs[min(len(started), len(programs)) - 1]
            return [sys.executable, "-S", "-c", program, str(port_file)], {}

        monkeypatch.setattr(pool_module, "instance_command", command)
        monkeypatch.setattr(health, "BACKOFF_S", 0.05)
        settings = {"heartbeat_s": 0.6, "wait_s": 30, "timeout_s": 10, "restarts": 2, "instances": 1} | rollout
        told = []
        notices = RunEvents(lambda stage, text: told.append(text))
        pool = Pool(Config(rollout=settings), tmp_path, tmp_path, synced=True, notices=notices)
        pool.told = told
        pool.spawn(settings["instances"])
        try:
            async with HealthMonitor(pool), publishing(pool, 5):
                yield pool, started
        finally:
            await pool.close()
        assert not any(one.child.alive for one in pool.processes.declared)

    return begin


def kill(pool, name="instance-0", number=signal.SIGKILL):
    signal_group(pool.find_instance(name).child.pid, number)


async def test_a_killed_instance_is_started_again_and_gets_the_weights(declare):
    async with declare([SERVES], instances=2) as (pool, started):
        await pool.connect_instances()
        await until(lambda: pool.serving == 2, "both")
        first = pool.find_instance("instance-0")
        kill(pool)
        await until(lambda: first.state == "gone", "its death", 0.5)
        assert "was ended by SIGKILL" in first.reason
        await until(lambda: pool.serving == 2, "its return")
        again = pool.find_instance("instance-0")
        assert (again is first, again.restarts, again.version) == (False, 1, 5)
        assert started == ["instance-0", "instance-1", "instance-0"]
        assert again.version == 5


async def test_after_the_last_restart_the_pool_waits_and_then_fails_with_how_it_ended(declare):
    async with declare([SERVES], restarts=1, wait_s=0.5) as (pool, started):
        await pool.connect_instances()
        for _ in range(2):
            await until(lambda: pool.serving == 1, "it")
            kill(pool)
            await until(lambda: pool.serving == 0, "its death")
        with pytest.raises(
            ProcessDied, match=r"no rollout instance is left: waited 0\.5 s.*; instance-0 was ended by SIGKILL"
        ):
            await asyncio.wait_for(pool.wait_for(lambda: pool.members() or None), 5)
        assert len(started) == 2


def test_only_a_life_that_was_long_gives_the_restarts_back(tmp_path, monkeypatch):
    now = 0.0
    for module in (instance_process, pool_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(InstanceProcesses, "_child", lambda *given: None)
    made = InstanceProcesses(Config(), tmp_path, tmp_path)
    one = InstanceProcess(0, None, tmp_path / "address", began=0.0)
    for _ in range(2):
        assert one.may_restart(2)
        made.restart(one)
    for _ in range(2):
        assert not one.may_restart(2)
        now += instance_process.REFILL_S
        assert not one.may_restart(2)
        now += 1.0
        for _ in range(2):
            assert one.may_restart(2)
            made.restart(one)
    assert one.restarts == 6


@pytest.mark.parametrize(
    ("program", "limits", "error", "said", "starts"),
    [
        (FAILS, {}, ProcessDied, r"(?s)instance-0 exited with 1; its log .*the device is busy", 1),
        (REFUSES, {}, BadInput, r"^instance-0: the model is bad \(its log: .*/logs/instance-0.log\)$", 1),
        (REFUSES.replace("instance-0: ", ""), {}, BadInput, r"(?s)exited with 2; its log .*the model is bad", 1),
        (KILLED, {"restarts": 1}, ProcessDied, "instance-0 was ended by SIGKILL", 2),
        (
            HANGS,
            {"timeout_s": 0.3},
            DeadlineError,
            r"instance-0 was not ready after 0\.3 s \(rollout.timeout_s.* is running; its",
            1,
        ),
    ],
)
async def test_an_instance_that_can_not_start_fails_the_run_by_name_and_one_that_was_killed_is_started_again(
    declare, program, limits, error, said, starts
):
    """A run whose input is refused is not resumed: bad input is not among the errors that need not occur again."""
    async with declare([program], **limits) as (pool, started):
        with pytest.raises(error, match=said):
            await pool.connect_instances()
        await asyncio.sleep(0.2)
        assert pool.failed_starts.empty()
        assert len(started) == starts


async def test_a_run_whose_own_instances_can_not_start_goes_on_while_one_that_joined_is_left(declare):
    async with declare([FAILS], instances=2, restarts=1, wait_s=1.5) as (pool, started), Scripted().serving() as url:
        guest = pool.enter("guest", url)
        await until(lambda: guest.met, "its first answer")
        await pool.connect_instances()
        await until(lambda: pool.serving == 1 and len(started) == 4, "the guest, and the restarts of the others")
        goes_on = "could not start, the run goes on with 1 other"
        assert [line.partition(";")[0] for line in pool.told if goes_on in line] == [
            f"{name} {goes_on}: {name} exited with 1" for name in ("instance-0", "instance-1")
        ]
        async with pool.borrow(size=1) as place:
            assert place.instance is guest
        pool.leave(guest)
        with pytest.raises(
            ProcessDied, match=r"(?s)no rollout instance is left: .*instance-0 .*exited with 1.*guest left"
        ):
            await asyncio.wait_for(pool.wait_for(lambda: pool.members() or None), 20)


async def test_one_that_can_not_start_with_the_others_is_started_again_and_the_run_begins_without_it(declare):
    async with declare([KILLED, SERVES]) as (pool, started):
        await pool.connect_instances()
        await until(lambda: pool.serving == 1 and len(started) == 2, "one that was killed while it started")
    async with declare([FAILS, SERVES, FAILS, SERVES], instances=2) as (pool, started):
        await pool.connect_instances()
        assert pool.find_instance("instance-1") is not None
        await until(lambda: pool.serving == 2, "the second restart")
        assert started == ["instance-0", "instance-1", "instance-0", "instance-0"]
        assert pool.find_instance("instance-0").restarts == 2


async def test_an_instance_that_hangs_for_too_long_is_replaced_before_the_run_gives_up(declare):
    async with declare([SERVES], wait_s=6.0) as (pool, started):
        await pool.connect_instances()
        await until(lambda: pool.serving == 1, "it")
        hung = pool.find_instance("instance-0")
        kill(pool, number=signal.SIGSTOP)
        await until(lambda: hung.state == "gone", "patience to end")
        told = re.fullmatch(r"did not answer for ([\d.]+) s", hung.reason)
        assert 3.0 <= float(told[1]) < 6.0
        await until(lambda: pool.serving == 1, "its replacement")
        assert len(started) == 2


async def test_a_declared_instance_that_leaves_is_ended_and_stays_away(declare):
    async with declare([SERVES], instances=2) as (pool, started):
        await pool.connect_instances()
        await until(lambda: pool.serving == 2, "both")
        one = pool.find_instance("instance-1")
        pool.leave(one)
        await until(lambda: not one.child.alive, "its end")
        await asyncio.sleep(0.3)
        assert (pool.serving, len(started)) == (1, 2)


async def test_a_restart_that_refuses_its_input_is_the_last(declare):
    async with declare([SERVES, REFUSES, SERVES], wait_s=0.5) as (pool, started):
        await pool.connect_instances()
        await until(lambda: pool.serving == 1, "it")
        kill(pool)
        await until(lambda: pool.serving == 0, "its death")
        with pytest.raises(ProcessDied, match="no rollout instance is left: .* instance-0: the model is bad"):
            await asyncio.wait_for(pool.wait_for(lambda: pool.members() or None), 5)
        assert len(started) == 2
