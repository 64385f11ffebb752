"""On real processes: a rollout program's responses and weights depend on nothing but its input."""

import os
from functools import cache
from pathlib import Path

import pytest

from support import elastic_job
from support.faults import kill_in_update
from support.runs import ROOT, base_settings, launch
from support.whole_runs import run, same, steps, weights

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

PROGRAMS = f"{ROOT}/tests/support/programs.py"
STEPS = 4
POINTS = ("tool", "between turns", "turn", "sync")


def recipe(settings, folder, mode, instances=1, program="scored"):
    """A run with two turns in each response, whose rewards `Job.held` holds."""
    return elastic_job.exact_recipe(settings, folder, STEPS, instances) | {
        "run.name": "run",
        "train.mode": mode,
        "train.prompts_per_step": 6,
        "rollout.program": f"{PROGRAMS}:{program}",
        "rollout.heartbeat_s": 15,  # not taken for silent before it is killed
        "rollout.max_new_tokens": 24,
        "reward.environment": ["METRONOME_TEST_MARKS", "METRONOME_TEST_POINT"],
        "checkpoint.every": 1,
    }


def run_whole(settings, folder, *arguments):
    """The weights of a run."""
    run(settings, Path(settings["run.output"]), *arguments, timeout_s=400)
    return weights(Path(settings["run.output"]), "run")


def run_replay(settings, folder):
    """The weights of a replay of what the run in `folder` has recorded."""
    (folder / "replay").mkdir()
    replayed = settings | {"run.output": str(folder / "replay"), "train.record": False}
    return run_whole(replayed, folder, "--replay", str(folder / "run/record.msgpack"))


@pytest.fixture(scope="module")
def undisturbed(tiny_model, problems, tmp_path_factory):
    """Gives the weights of a mode and a program."""

    @cache
    def weights_of(mode, program):
        folder = tmp_path_factory.mktemp(mode)
        return run_whole(recipe(base_settings(tiny_model, problems, folder), folder, mode, program=program), folder)

    return weights_of


def die_in_syncs(settings, folder):
    """An instance dies in one weight sync, and the orchestrator in the next one."""
    with elastic_job.Job(settings, folder, patience_s=200) as run:
        run.wait(lambda: run.steps() >= 1, "a step")
        kill_in_update(run, "instance-0")
        with run.held():
            run.wait(lambda: run.is_("instance-0", state="serving", restarts=1), "its return")
            run.wait_for_samples()
            processes = run.processes("instance-0")
            for process in processes:
                process.suspend()
        run.wait(lambda: run.is_("instance-0", state="updating"), "an update")
        run.process.kill()
        for process in processes:
            process.resume()
        run.process.wait(20)


def die_in_program(settings, folder, point, monkeypatch):
    """An instance, a program's process and the orchestrator die at a point of an episode."""
    monkeypatch.setenv("METRONOME_TEST_POINT", point)
    code, output = launch(settings, folder, timeout_s=400)
    assert code < 0, output  # the program has killed it
    assert {"instance", "worker", "orchestrator"} <= set(os.listdir(folder / "marks"))


@pytest.mark.parametrize(
    ("mode", "point", "instances"),
    [
        pytest.param(
            mode,
            point,
            instances,
            marks=[] if (mode, point, instances) == ("periodic", "between turns", 2) else pytest.mark.nightly,
        )
        for mode in ("sync", "periodic", "one_step_off")
        for point in POINTS
        for instances in (1, 2)
    ],
)
def test_deaths_at_every_point_change_no_bit(settings, tmp_path, monkeypatch, undisturbed, mode, point, instances):
    """Of an instance, a program's process and the orchestrator: in a tool, between turns, in a turn, in a sync.

    With one_step_off a run that is resumed after its first steps samples the batch in flight again, by newer weights
    (docs/modes.md). Its own replay then has its bits.
    """
    monkeypatch.setenv("METRONOME_TEST_MARKS", str(tmp_path / "marks"))
    (tmp_path / "marks").mkdir()
    program = "unscored" if point == "sync" else "scored"  # Job.held holds the reward function
    given = recipe(settings, tmp_path, mode, instances, program=program)
    if point == "sync":
        die_in_syncs(given, tmp_path)
    else:
        die_in_program(given, tmp_path, point, monkeypatch)
    ended = run_whole(given, tmp_path, "--resume")
    lines = steps(tmp_path, "run")
    late = int(mode == "one_step_off")
    again = late and point == "sync"
    newer = {step for step, line in enumerate(lines) if line["versions_seen"] == [step] != [max(0, step - late)]}
    assert len(newer) == int(again)
    whole = "sync" if mode == "periodic" else mode  # with the same weights
    assert same(ended, run_replay(given, tmp_path) if again else undisturbed(whole, program))
    expected = [[step if step in newer else max(0, step - late)] for step in range(STEPS)]
    assert [line["versions_seen"] for line in lines] == expected
    assert late or max(line["max_ratio_gap"] for line in lines) <= 1e-3
    assert {line["reward/episode/turns"] for line in lines} == {2.0}
    assert point == "sync" or {line["reward/calls"] for line in lines} == {1.0}
    assert len({line["grad_norm"] for line in lines}) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["periodic", pytest.param("one_step_off", marks=pytest.mark.nightly)])
def test_a_replay_asks_no_tool_again(settings, tmp_path, mode):
    """What a tool has answered is recorded: a replay has the bits of a run whose tool tells the time."""
    live = recipe(settings, tmp_path, mode, program="clock") | {"train.consume": "arrival"}
    expected = run_whole(live, tmp_path)
    assert same(run_replay(live, tmp_path), expected)
