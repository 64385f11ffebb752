"""What a fault does to processes and files, without a run around them."""

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from chaos import nemesis
from chaos.nemesis import Nemesis, flip
from chaos.schedule import Fault
from support.runs import wait_for


@pytest.fixture
def process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield psutil.Process(child.pid)
    child.kill()
    child.wait()


@pytest.fixture
def given(process):
    """A nemesis of a run whose only process, of every role, is this one; and what it said."""
    said = []
    run = SimpleNamespace(processes=lambda role: [process] if role != "flow" else [], largest=lambda: process)
    return Nemesis(run, said.append), said


def fault(kind, target, for_s=0.0):
    return Fault(at_s=0.0, kind=kind, target=target, for_s=for_s, choice=0.9)


@pytest.mark.parametrize("kind", [("kill", "rank"), ("out of memory", "largest")])
def test_a_process_is_killed(given, process, kind):
    one, said = given
    one.give(fault(*kind))
    wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE, "its end", 10)
    assert f"process {process.pid}" in said[0]
    assert [what for what, _ in one.given] == [fault(*kind)]


def test_a_process_is_stopped_for_its_time(given, process):
    one, said = given
    one.give(fault("stop", "rank", 1.5))
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the stop", 10)
    wait_for(lambda: process.status() != psutil.STATUS_STOPPED, "its time to be over", 10)
    wait_for(lambda: said[-1] == "over: stop, rank", "word of it", 10)


def test_all_that_lasts_is_undone_at_the_end(given, process):
    one, _ = given
    one.give(fault("stop", "rank", 600.0))
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the stop", 10)
    one.heal()
    wait_for(lambda: process.status() != psutil.STATUS_STOPPED, "its end", 10)


def test_a_fault_without_its_target_is_skipped_with_the_reason(given, monkeypatch):
    monkeypatch.setattr(nemesis, "TARGET_S", 0.3)
    one, said = given
    one.give(fault("kill", "flow"))
    assert one.given == []
    assert [why for _, why in one.skipped] == ["there is no flow now"]
    assert said == ["skipped: kill, flow: there is no flow now"]


def test_faults_come_at_their_times(given):
    one, _ = given
    one._run.look_after = lambda: None
    began = time.monotonic()
    one.play([Fault(at_s=at_s, kind="stop", target="rank", for_s=60.0, choice=0.0) for at_s in (0.2, 0.6)], began)
    one.heal()
    assert [round(moment - began - fault.at_s, 1) for fault, moment in one.given] == [0.0, 0.0]


def test_one_bit_of_a_file_is_flipped(tmp_path):
    file = tmp_path / "weights"
    before = bytes(range(200))
    for where in (0.0, 0.5, 0.999):
        file.write_bytes(before)
        assert flip(file, where).startswith(f"byte {int(where * 200)} of ")
        after = file.read_bytes()
        assert sum(bin(a ^ b).count("1") for a, b in zip(before, after, strict=True)) == 1
