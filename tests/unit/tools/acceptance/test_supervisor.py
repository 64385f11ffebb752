"""Parts that hang, crash, fail or come too late: each is named, and the later ones run."""

import json
import sys
import time

import pytest

from engine.errors import BadInput
from engine.tools.acceptance import device_parts, part, supervisor
from engine.tools.acceptance.notes import PartFailed, PartSkipped, notes_of
from engine.tools.acceptance.supervisor import NAMES, AcceptancePart, PartResult, check, run_part

QUICK = AcceptancePart("quick", 30.0, "ask")
TELLS = "import json, os, sys, time\ndef tell(**row): open(sys.argv[1], 'a').write(json.dumps(row) + '\\n')\n"


def run(tmp_path, code, one=QUICK, **more):
    command = [sys.executable, "-c", TELLS + code, str(notes_of(tmp_path, one.name))]
    return run_part(one, command, tmp_path, **more)


def test_a_part_that_ends_well(tmp_path):
    found = run(
        tmp_path, "tell(line='seen'); tell(figures={'n': 1}); tell(end={'status': 'ok', 'reason': '', 'remedy': ''})"
    )
    assert (found.part, found.status, found.lines, found.figures) == ("quick", "ok", ("seen",), {"n": 1})
    assert found.remedy == ""


def test_a_part_that_hangs_is_ended_at_its_deadline_and_says_where(tmp_path):
    """Also one that ignores SIGTERM, and holds children."""
    code = (
        "import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "tell(line='before'); tell(doing='rank 1 of nccl'); print('the log', flush=True); time.sleep(600)"
    )
    began = time.monotonic()
    found = run(tmp_path, code, AcceptancePart("hung", 2.0, "check the driver"))
    assert time.monotonic() - began < 20
    assert found.status == "failed"
    assert found.reason.startswith("not finished after 2 s, at: rank 1 of nccl; ")
    assert "the log" in found.reason
    assert (found.lines, found.remedy) == (("before",), "check the driver")


@pytest.mark.parametrize(("load", "said"), [(3.0, ""), (9.4, "the machine is busy (load 9 on 2 cores); ")])
def test_a_deadline_on_a_busy_machine_says_so(tmp_path, monkeypatch, load, said):
    monkeypatch.setattr(supervisor, "usable_cores", lambda: {0, 1})
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    found = run(tmp_path, "time.sleep(600)", left_s=0.1)
    assert f"at: starting; {said}it was ended by SIGTERM" in found.reason


def test_a_part_that_crashes_is_reported_with_its_signal_and_log(tmp_path):
    found = run(tmp_path, "tell(doing='kernel npu'); print('segmentation', flush=True); os.abort()")
    assert found.status == "failed"
    assert found.reason.startswith("crashed, at: kernel npu; it was ended by SIGABRT")
    assert "segmentation" in found.reason


ENDS = (
    (PartSkipped("one device", "two"), {"status": "skipped", "reason": "one device", "remedy": "two"}),
    (PartFailed("is wrong"), {"status": "failed", "reason": "is wrong", "remedy": ""}),
    (BadInput("npu: no torch_npu"), {"status": "failed", "reason": "BadInput: npu: no torch_npu", "remedy": ""}),
    (OSError("no CANN"), {"status": "failed", "reason": "OSError: no CANN; the traceback is in its log", "remedy": ""}),
)


@pytest.mark.parametrize(("error", "expected"), ENDS, ids=[type(error).__name__ for error, _ in ENDS])
def test_how_a_part_ends_is_told(tmp_path, monkeypatch, error, expected):
    def fails(task):
        task.notes.doing("something")
        raise error

    monkeypatch.setattr(device_parts, "devices", fails)
    part.main("devices", tmp_path, ["platform.device=cpu"])
    last = json.loads(notes_of(tmp_path, "devices").read_text().splitlines()[-1])
    assert last == {"end": expected}


def installed():
    return ["ok        torch 2.13.0", "missing   zmq"], False


@pytest.fixture
def commands(monkeypatch):
    """Parts that all end well, except the one that is set to another end."""
    ends = {}

    def command(name, folder, settings):
        code = f"tell(end={{'status': {ends.get(name, 'ok')!r}, 'reason': 'why', 'remedy': ''}})"
        return [sys.executable, "-c", TELLS + code, str(notes_of(folder, name))]

    monkeypatch.setattr(supervisor, "part_command", command)
    return ends


def test_a_failed_part_does_not_stop_the_later_ones(tmp_path, commands):
    commands["devices"] = "failed"
    commands["broadcast"] = "skipped"
    said = []
    found = check(settings=[], folder=tmp_path, only=(), installed=lambda: ([], True), say=said.append)
    assert [one.part for one in found] == list(NAMES)
    assert [one.part for one in found if one.status == "failed"] == ["devices"]
    assert [one.part for one in found if one.status == "skipped"] == ["broadcast"]
    assert said[1].startswith("## 2/8 devices: failed")
    assert "6 ok, 1 failed, 1 skipped" in said[-1]


def test_what_is_installed_belongs_to_the_first_part(tmp_path, commands):
    (found,) = check(settings=[], folder=tmp_path, only=("versions",), installed=installed, say=lambda text: None)
    assert (found.status, found.lines) == ("failed", tuple(installed()[0]))
    assert found.reason == "something is missing or does not fit"


def test_parts_that_come_after_ten_minutes_are_skipped(tmp_path, commands, monkeypatch):
    monkeypatch.setattr(supervisor, "TOTAL_S", 0.0)
    (found,) = check(settings=[], folder=tmp_path, only=("weight sync",), installed=installed, say=lambda text: None)
    assert found.status == "skipped"
    assert found.remedy == 'metronome doctor --device --only "weight sync"'


def test_the_limits_are_longer_where_instances_start_slowly(tmp_path, monkeypatch):
    """By what the parts of an NPU may need for their starts, and their sum. On no other platform."""

    def limits(*settings):
        given = {}

        def runs(part, command, folder, left_s):
            given[part.name] = (part.deadline_s, round(left_s))
            return PartResult(part=part.name, status="ok", seconds=0.0)

        monkeypatch.setattr(supervisor, "run_part", runs)
        check(settings=settings, folder=tmp_path, only=(), installed=lambda: ([], True), say=lambda text: None)
        return given

    usual = limits("platform.device=cuda")
    slow = limits("platform.device=npu")
    assert {left for _, left in usual.values()} == {600}
    more = {name: slow[name][0] - usual[name][0] for name in NAMES}
    assert {name: starts for name, starts in more.items() if starts} == {
        "completion": 200.0,
        "weight sync": 200.0,
        "sync against periodic": 400.0,
    }
    assert {left for _, left in slow.values()} == {600 + sum(more.values())}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch_npu")
    assert limits() == slow
    assert limits("platform.device=cpu") == usual


def test_an_unknown_part_is_refused(tmp_path):
    with pytest.raises(BadInput, match="--only kernel: there is no such part, expected one of versions, devices"):
        check(settings=[], folder=tmp_path, only=("kernel",), installed=installed, say=print)
