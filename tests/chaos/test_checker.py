"""Each check fires on a run that is doctored, and is silent on one that is not."""

import json

import pytest

from chaos import checker
from support.runs import ROOT

STEPS = 6


@pytest.fixture
def run(tmp_path):
    """A run folder as a whole run leaves it, as far as the checks read it."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/model.safetensors").write_bytes(b"weights of the run")
    write_steps(tmp_path, range(STEPS))
    (tmp_path / "evaluations.jsonl").write_text(
        json.dumps({"benchmark": "small", "step": 0, "weight_version": 0, "ended_s": 9.0}) + "\n"
    )
    return tmp_path


def write_steps(folder, steps):
    rows = [{"step": step, "ended_s": 10.0 + step, **{f"figure_{n}": n / 7 for n in range(40)}} for step in steps]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_weights_that_differ_in_one_bit(run):
    undisturbed = checker.weights(run)
    assert checker.same_weights(run, undisturbed) == []
    (run / "policy/model.safetensors").write_bytes(b"weights of the ruo")
    assert "differ" in checker.same_weights(run, undisturbed)[0]


def test_weights_that_are_missing(run):
    undisturbed = checker.weights(run)
    (run / "policy/more.safetensors").write_bytes(b"")
    assert checker.same_weights(run, undisturbed)
    for file in run.glob("policy/*"):
        file.unlink()
    assert checker.same_weights(run, undisturbed) == ["there are no final weights"]
    assert checker.same_weights(run, {}) == ["there are no final weights"]


@pytest.mark.parametrize(
    "steps", [[0, 1, 2, 4, 5], [0, 1, 2, 2, 3, 4, 5], [0, 2, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6], []]
)
def test_steps_that_are_missing_doubled_or_out_of_order(run, steps):
    assert checker.each_step_once(run, STEPS) == []
    write_steps(run, steps)
    assert checker.each_step_once(run, STEPS)


def test_figures_that_are_missing_doubled_or_too_many(run):
    wanted = checker.wanted_figures(run)
    assert len(wanted) > checker.FEWEST_FIGURES
    assert any(name.endswith("avg_at_k") for name in wanted)
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
WORDS = ("json.JSONDecodeError: x", "  + ExceptionGroup", "Traceback (most recent call last):")


@pytest.mark.parametrize("servers_went", [True, False])
@pytest.mark.parametrize("text", [OURS, *WORDS])
def test_logs_with_a_traceback(tmp_path, text, servers_went):
    log = tmp_path / "orchestrator.log"
    assert checker.clean_logs([log], servers_went) == []
    log.write_text("all is well\n")
    assert checker.clean_logs([log], servers_went) == []
    log.write_text(f"all is well\n{text}\nand well again\n")
    assert checker.clean_logs([log], servers_went) == [f"orchestrator.log, line 2: {text.splitlines()[0].strip()}"]


def test_a_traceback_of_a_library_is_excused_while_its_server_is_away_and_no_other(tmp_path):
    log = tmp_path / "worker.log"
    log.write_text(f"{THEIRS}\n")
    assert checker.clean_logs([log], servers_went=True) == []
    assert len(checker.clean_logs([log], servers_went=False)) == 2
    log.write_text(f"{THEIRS}\n\nThe above exception was the direct cause of the following one:\n\n{OURS}\n")
    assert checker.clean_logs([log], servers_went=True) == ["worker.log, line 8: Traceback (most recent call last):"]
    log.write_text(f"{THEIRS}\njson.JSONDecodeError: of ours\n")
    assert checker.clean_logs([log], servers_went=True) == ["worker.log, line 5: json.JSONDecodeError: of ours"]


@pytest.mark.parametrize(
    ("before", "error", "problems"),
    [
        ("ERROR | Encountered exception during execution: DiskError()", "engine.errors.DiskError: the disk is full", 0),
        ("ERROR | Engine execution exited with unexpected exception", "engine.errors.DiskError: the disk is full", 0),
        ("ERROR | Encountered exception during execution: OSError()", "OSError: the disk is full", 1),
        ("ERROR | all else", "engine.errors.DiskError: the disk is full", 1),
    ],
)
def test_prefect_may_say_by_which_of_our_errors_a_flow_run_has_failed(tmp_path, before, error, problems):
    log = tmp_path / "worker.log"
    log.write_text("\n".join((before, *OURS.splitlines()[:-1], error, "")))
    assert len(checker.clean_logs([log], servers_went=True)) == problems


def test_processes_that_are_left():
    assert checker.none_left({}) == []
    assert "process 12" in checker.none_left({12: "python -m engine.trainer.rank"})[0]


def test_too_many_wasted_steps():
    assert checker.few_wasted(wasted=20, faults=10, every=2) == []
    assert "21 steps" in checker.few_wasted(wasted=21, faults=10, every=2)[0]


def test_slow_recoveries():
    assert checker.quick([1.0] * 50 + [100.0], 30.0, 180.0) == []
    assert checker.quick([1.0] * 10 + [181.0], 30.0, 180.0) == [
        "p99 of the recoveries is 181.0 s, expected up to 180 s"
    ]
    assert len(checker.quick([200.0] * 3, 30.0, 180.0)) == 2
    assert checker.quick([1.0, float("inf")], 30.0, 180.0)


def test_slow_steps():
    assert checker.fast(throughput=0.6, least=0.6) == []
    assert "0.59" in checker.fast(throughput=0.59, least=0.6)[0]
