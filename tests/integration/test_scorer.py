"""The reference on ranks of its own, on real processes: it changes no number, and its death costs none."""

import pytest

from engine.orchestrator.stages import scorer_log
from support.runs import ROOT, Tree, base_settings, send, wait_for
from support.whole_runs import orchestrating, run, same, spans, steps, weights

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(900)]
AGENT = "engine.trainer.ranks.agent --ranks 1 --module"
REWARDS = ROOT / "tests/support/rewards.py"
TIMES = ("_s", "_per_device", "_gib", "wait_ratio")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the runs of all tests lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def exact(tiny_model, problems, folder):
    """Several windows a step, whose rows do not depend on when they come."""
    return base_settings(tiny_model, problems, folder) | {
        "train.micro_batch_tokens": 150,
        "train.consume": "prompt_order",
        "train.prompts_per_step": 8,
        "rollout.deterministic": True,
    }


@pytest.fixture(scope="module")
def one_by_one(exact):
    """A step has a window for each group, and groups are sampled one at a time."""
    return exact | {"rollout.concurrency": 1, "rollout.instances": 1, "rollout.max_new_tokens": 40}


@pytest.fixture(scope="module")
def within(one_by_one, folder):
    """Name of a run whose trainer holds the reference."""
    run(one_by_one | {"run.name": "within"}, folder)
    return "within"


@pytest.fixture(scope="module")
def slow(exact):
    """Each step takes four seconds, so most of its groups are scored after a signal at its beginning."""
    return with_scorer(exact, lease_s=5) | {"reward.function": f"{REWARDS}:after_500_ms", "train.steps": 4}


@pytest.fixture(scope="module")
def undisturbed(slow, folder):
    """Name of such a run whose scorer gets no signal."""
    run(slow | {"run.name": "undisturbed"}, folder)
    return "undisturbed"


def with_scorer(settings, **keys):
    """With a scorer of the reference, which takes its defaults from the config but for `keys`."""
    return settings | {f"stages.reference.{key}": value for key, value in {"tensor": 1, **keys}.items()}


def figures(folder, name):
    """The lines of steps.jsonl without what is a time or memory."""
    return [{key: value for key, value in line.items() if not key.endswith(TIMES)} for line in steps(folder, name)]


def gap(one, other):
    """The largest difference of two models' weights."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_a_scorer_in_the_trainers_layout_changes_no_bit(one_by_one, within, folder):
    run(with_scorer(one_by_one) | {"run.name": "beside"}, folder)
    assert same(weights(folder, within), weights(folder, "beside"))
    assert figures(folder, within) == figures(folder, "beside")
    assert max(line["kl"] for line in steps(folder, "beside")[1:]) > 0
    scored = spans(folder, "beside", "score")
    for step in range(3):
        groups = [group for span in scored if span["step"] == step for group in span["groups"]]
        assert sorted(groups) == list(range(8))
    assert {span["lane"] for span in scored} == {"scorer-reference-0"}
    assert_overlap(folder, "beside")


def assert_overlap(folder, name):
    """AsyncFlow §4.1, Fig. 7: each task of a step begins with the first rows that are ready for it."""
    sampled, scored, trained = (spans(folder, name, kind) for kind in ("rollout", "score", "train"))
    for step in range(1, 3):
        last_sampled = max(span["start"] for span in sampled if span["step"] == step)
        last_scored = max(span["start"] for span in scored if span["step"] == step)
        assert min(span["end"] for span in scored if span["step"] == step) < last_sampled
        assert min(span["end"] for span in trained if span["step"] == step) < min(last_sampled, last_scored)


@pytest.mark.parametrize(
    "axis", ["tensor", *(pytest.param(axis, marks=pytest.mark.nightly) for axis in ("pipeline", "context", "data"))]
)
def test_a_scorer_in_another_layout_only_rounds(axis, one_by_one, within, folder):
    run(with_scorer(one_by_one, **{axis: 2}) | {"run.name": axis}, folder)
    whole = weights(folder, within)
    other = weights(folder, axis)
    assert gap(whole, other) <= 1e-5
    if axis in ("pipeline", "data"):  # each matrix is whole, and so is each row
        assert same(whole, other)


def scorer_process(orchestrator, part="engine.trainer.ranks.scorer_rank"):
    """The process of the only rank of a scorer, or its agent; None if there is none now."""
    found = [process for process, line in Tree(orchestrator.pid).command_lines() if f"-m {part}" in line]
    return found[0] if found else None


@pytest.mark.parametrize("signal", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.nightly)])
def test_a_scorer_that_dies_or_hangs_is_started_again_and_changes_no_bit(signal, slow, undisturbed, folder):
    with orchestrating(slow | {"run.name": signal}, folder) as (orchestrator, _):
        wait_for(lambda: steps(folder, signal), "the first step")
        before = scorer_process(orchestrator)
        tree = Tree(orchestrator.pid)
        send(before, signal)
        wait_for(lambda: (now := scorer_process(orchestrator)) is not None and now.pid != before.pid, "another scorer")
        assert orchestrator.wait(timeout=200) == 0
        assert tree.left() == []
    assert same(weights(folder, undisturbed), weights(folder, signal))
    assert figures(folder, undisturbed) == figures(folder, signal)


def fails(settings, folder, harm):
    """What the orchestrator of a run says that fails because `harm` was done to its scorer's processes."""
    with orchestrating(settings, folder) as (orchestrator, said):
        harm(orchestrator)
        tree = Tree(orchestrator.pid)
        assert orchestrator.wait(timeout=120) == 1
        assert tree.left() == []
        return said()


@pytest.mark.nightly
def test_a_run_whose_scorer_never_starts_fails_by_name(exact, folder):
    def stop(orchestrator):
        wait_for(lambda: scorer_process(orchestrator, AGENT), "the scorer's agent")
        send(scorer_process(orchestrator, AGENT), "SIGSTOP")

    said = fails(with_scorer(exact, wait_s=10) | {"run.name": "never"}, folder, stop)
    assert "have waited 10 s (stages.reference.wait_s) for the stage 'reference'" in said
    assert f"its ranks have not asked for rows; their log: {scorer_log(folder / 'never/logs', 'reference')}" in said


@pytest.mark.nightly
def test_a_run_whose_scorer_dies_again_and_again_fails_by_name(exact, folder):
    def kill(orchestrator):
        killed = set()
        while len(killed) < 2:
            wait_for(lambda: (one := scorer_process(orchestrator)) is not None and one.pid not in killed, "a scorer")
            one = scorer_process(orchestrator)
            send(one, "SIGKILL")
            killed.add(one.pid)

    said = fails(with_scorer(exact, restarts=1) | {"run.name": "dies"}, folder, kill)
    assert (
        "the stage 'reference' has made no progress in the 2 starts of its ranks (stages.reference.restarts = 1)"
        in said
    )
    assert "scorer rank 0: Signal 9 (SIGKILL)" in said


@pytest.mark.nightly
def test_nothing_survives_the_orchestrator(exact, folder):
    endless = with_scorer(exact) | {"run.name": "killed", "train.steps": 100_000}
    with orchestrating(endless, folder) as (orchestrator, _):
        wait_for(lambda: steps(folder, "killed"), "the first step")
        tree = Tree(orchestrator.pid)
        assert tree.named("-m engine.trainer.ranks.scorer_rank")
    assert tree.left() == []
