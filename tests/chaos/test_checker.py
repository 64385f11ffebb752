"""Each check fires on a run that is doctored, and is silent on one that is not."""

import json
from types import SimpleNamespace

import pytest

from chaos import checker, nemesis
from chaos.schedule import Fault
from support.runs import ROOT

STEPS = 6


@pytest.fixture
def run(tmp_path):
    """A run folder as a whole run leaves it, as far as the checks read it."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/model.safetensors").write_bytes(b"weights of the run")
    write_steps(tmp_path, range(STEPS))
    (tmp_path / "evaluations.jsonl").write_text(
        json.dumps({"benchmark": "small", "samples": 1, "step": 0, "weight_version": 0, "ended_s": 9.0}) + "\n"
    )
    return tmp_path


def write_steps(folder, steps):
    rows = [{"step": step, "ended_s": 10.0 + step, **{f"figure_{n}": n / 7 for n in range(40)}} for step in steps]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_weights_that_differ_in_one_bit_or_are_missing(run):
    undisturbed = checker.weights(run)
    assert checker.same_weights(run, undisturbed) == []
    (run / "policy/model.safetensors").write_bytes(b"weights of the ruo")
    assert "differ" in checker.same_weights(run, undisturbed)[0]
    (run / "policy/model.safetensors").unlink()
    for compared in (undisturbed, {}):
        assert checker.same_weights(run, compared) == ["there are no final weights"]


def test_steps_that_are_missing_doubled_or_out_of_order(run):
    assert checker.each_step_once(run, STEPS) == []
    for steps in ([0, 1, 2, 4, 5], [0, 1, 2, 2, 3, 4, 5], [0, 2, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6], []):
        write_steps(run, steps)
        assert checker.each_step_once(run, STEPS)


def test_figures_that_are_missing_doubled_or_too_many(run):
    wanted = checker.wanted_figures(run)
    assert len(wanted) > checker.FEWEST_FIGURES
    assert any("/avg_at_" in name for name in wanted)
    assert checker.compared_figures(wanted, wanted) == []
    name = next(iter(wanted))
    points = wanted[name]
    for doctored in (points[1:], [*points, points[3]], [*points, (3, 20_000)], [*points, (STEPS, 20_000)], []):
        [problem] = checker.compared_figures(wanted, wanted | {name: doctored})
        assert name in problem
    assert checker.compared_figures(wanted, wanted | {name: [*points, (3, 9_000)]}) == [], "step 3 was trained again"
    assert checker.compared_figures({name: wanted[name]}, wanted) == ["a step has only 1 figures"]


OURS = f"""Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/httpx/client.py", line 3, in send
    raise error
  File "{ROOT}/tasks/train.py", line 99, in train
    raise error
httpx.ConnectError: refused"""
THEIRS = """Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/httpx/client.py", line 3, in send
    raise error
json.JSONDecodeError: refused"""
FAILED = OURS.replace("httpx.ConnectError", "engine.errors.DiskError")
FLOW_RUN = "ERROR | Encountered exception during execution: "
PROCESS = "ERROR | Engine execution exited with unexpected exception"


@pytest.mark.parametrize(
    ("text", "lines", "while_away"),
    [
        ("all is well", [], []),
        (OURS, [2], [2]),
        ("json.JSONDecodeError: x", [2], [2]),
        ("  + ExceptionGroup", [2], [2]),
        ("Traceback (most recent call last):", [2], [2]),
        (THEIRS, [2, 5], []),  # a library says that its server is away
        (f"{THEIRS}\n\nThe above exception was the direct cause of the following one:\n\n{OURS}", [2, 5, 9], [9]),
        (f"{THEIRS}\njson.JSONDecodeError: of ours", [2, 5, 6], [6]),
        (f"{FLOW_RUN}\n{FAILED}", [], []),  # Prefect says by which of our errors a flow run has failed
        (f"{PROCESS}\n{FAILED}", [], []),
        (f"{FLOW_RUN}\n{OURS}", [3], [3]),
        (f"ERROR | all else\n{FAILED}", [3], [3]),
    ],
)
def test_logs_with_a_traceback(tmp_path, text, lines, while_away):
    log = tmp_path / "orchestrator.log"
    assert checker.clean_logs([log], True) == []
    log.write_text(f"all is well\n{text}\nand well again\n")
    for expected, servers_went in ((lines, False), (while_away, True)):
        found = checker.clean_logs([log], servers_went)
        assert [problem.partition(":")[0] for problem in found] == [f"orchestrator.log, line {n}" for n in expected]


def test_bounds():
    assert not checker.none_left({})
    assert checker.none_left({12: "python -m engine.trainer.rank"})
    assert not checker.few_wasted(wasted=20, faults=10, every=2)
    assert checker.few_wasted(wasted=21, faults=10, every=2)
    assert not checker.fast(throughput=0.6, least=0.6)
    assert checker.fast(throughput=0.59, least=0.6)
    assert not checker.quick([1.0] * 50 + [100.0], 30.0, 180.0)
    for recoveries, problems in (([1.0] * 10 + [181.0], 1), ([1.0, float("inf")], 1), ([200.0] * 3, 2)):
        assert len(checker.quick(recoveries, 30.0, 180.0)) == problems


class Absent:
    """A run without processes, which finishes so many steps in each look at them."""

    def __init__(self, steps):
        self.progress = SimpleNamespace(finished=0)
        self.steps = steps

    def processes(self, role):
        self.progress.finished += self.steps
        return []


@pytest.mark.parametrize(("steps", "problems"), [(0, 0), (1, 0), (2, 1)])
def test_a_fault_that_does_not_happen_is_a_problem_unless_the_run_does_not_train(monkeypatch, steps, problems):
    monkeypatch.setattr(nemesis, "TARGET_S", 0.0)
    given = nemesis.Nemesis(Absent(steps), lambda line: None)
    given.give(Fault(at_s=0.0, kind="kill", target="rank", for_s=0.0, choice=0.0))
    assert len(given.skipped) == 1
    found = checker.all_happened(given.given, given.skipped, spoiled=0)
    assert len(found) == problems
    assert all("kill, rank did not happen" in problem for problem in found)


def test_faults_of_replies_must_have_spoiled_one():
    given = [(Fault(at_s=0.0, kind="garbage", target="reply", for_s=0.0, choice=0.0), 0.0)]
    assert checker.all_happened(given, [], spoiled=1) == []
    assert checker.all_happened(given, [], spoiled=0) == ["no reply was spoiled, although 1 faults were to"]
