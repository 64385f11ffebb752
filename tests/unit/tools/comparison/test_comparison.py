"""Runs side by side: the figures against sums done by hand, the verdict's words, the page."""

import json
import math
import random
import re

import pytest

from engine.evaluation.intervals import mean_interval
from engine.tools.comparison import accuracy, page, run_figures
from engine.tools.comparison.run_figures import ComparedRun, Interval, steps_once
from engine.tools.comparison.verdict import _more, config_differences, judge_runs
from support.compared_runs import evaluation, run, step


def test_speed_is_tokens_by_time_and_not_the_mean_of_speeds():
    rows = [step(0, seconds=10, tokens=1000), step(1, seconds=90, tokens=1000)]
    assert run_figures.mean_speed(rows) == pytest.approx(2000 / 100)


def test_a_steps_time_adds_up():
    means = run_figures.step_breakdown(run())
    assert sum(means[key] for key in (*run_figures.PARTS, "other_s")) == pytest.approx(means["step_s"])
    assert means["other_s"] == pytest.approx(0.5)


def slow_noise(seconds, seed, alike=0.8, noise=0.2):
    """120 steps whose log times are a stationary AR(1) process, as of a machine whose load changes slowly."""
    chance = random.Random(seed)
    rows = []
    now = chance.gauss(0, noise)
    for number in range(120):
        rows.append(step(number, seconds * math.exp(now)))
        now = alike * now + math.sqrt(1 - alike**2) * chance.gauss(0, noise)
    return ComparedRun("slow", "slow", {}, rows)


def noise(seconds, seed):
    return run(seconds=seconds, noise=0.2, seed=seed)


@pytest.mark.parametrize(("noisy", "least"), [(noise, 180), (slow_noise, 172)])  # blocks of n^(1/3) steps gave 158
def test_the_speed_interval_covers_the_true_ratio_as_often_as_it_says(noisy, least):
    """200 pairs of runs with a true ratio of 1.25 and 20 % noise per step."""
    found = [run_figures.speed_ratio(noisy(8.0, seed), noisy(10.0, 1000 + seed), 0.95) for seed in range(200)]
    assert least <= sum(one.low <= 1.25 <= one.high for one in found) <= 199


@pytest.mark.parametrize("steps", [1, 5, 6, 7, 11, 39, 200])
def test_blocks_are_few_and_take_each_step_once(steps):
    found = run_figures.split_blocks(range(steps))
    assert [step for block in found for step in block] == list(range(steps))
    assert len(found) == min(steps, 6)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def loaded(name, factor, mode="periodic", **config):
    """A run whose machine was busier: training and updates take `factor` times as long for the same tokens."""
    rows = [step(n, 10.0 * factor, train_s=4.0 * factor, update_s=0.5 * factor) for n in range(20)]
    return ComparedRun(name, name, {"train.mode": mode, **config}, rows)


@pytest.mark.parametrize(
    ("mode", "config", "work"),
    [("periodic", {}, "tokens"), ("sync", {}, "update"), ("sync", {"platform.device": "npu"}, "tokens")],
)
def test_another_load_is_said_before_any_verdict_on_speed(mode, config, work):
    runs = [loaded("calm", 1.0, mode, **config), loaded("busy", 2.5, **config)]
    for pair, value in ((runs, 0.4), (runs[::-1], 2.5)):
        found = judge_runs(pair)[0]
        assert found.answer.startswith(f"Another load: busy took 2.5 times as long as calm for the same {work}, ")
        assert "of unknown speed, and" in found.answer
        assert f"{value:.2f} times as fast" in found.sentences[0]
        assert not re.search(r"was (faster|slower)", " ".join([found.answer, *found.sentences]))


def test_few_steps_and_no_common_steps_give_no_interval():
    few = judge_runs([run("sync", steps=5), run("periodic", 8.0, steps=5)])[0]
    assert "4 common steps after the warm-up are too few" in few.sentences[0]
    late = ComparedRun("periodic", "p", {}, [step(n) for n in range(100, 120)])
    none = judge_runs([run("sync"), late])[0]
    assert "no steps in common" in none.sentences[0]


def test_a_paired_difference_sees_what_the_intervals_do_not():
    """90 of 100 against 84 of 100, the 84 among the 90: unpaired no difference is shown, paired one is."""
    means = [{str(n): float(n < right) for n in range(100)} for right in (84, 90)]
    rows = [evaluation(0.84, 0.756, 0.899, table="t"), evaluation(0.90, 0.826, 0.945, table="t")]
    given = list(zip(("sync", "periodic"), rows, means, strict=True))
    told = judge_runs([run(name, evaluations=[row], tables={"t": found}) for name, row, found in given])[0].sentences[1]
    assert told.startswith("Evaluation on ")  # not "Accuracy": scores may be partial
    assert "periodic was better" in told
    assert "paired over 100 problems" in told
    plain = judge_runs([run(name, evaluations=[row]) for name, row, _ in given])[0].sentences[1]
    assert "no difference shown" in plain
    assert "unpaired" in plain


def test_the_difference_of_two_wilson_intervals_is_newcombes():
    """Newcombe 1998, table II (a): 56/70 - 48/80 = 0.2, method 10 gives 0.0524 to 0.3339."""
    wilson = [mean_interval([1.0] * right + [0.0] * (n - right)) for right, n in ((56, 70), (48, 80))]
    found = accuracy.unpaired_interval(evaluation(0.8, *wilson[0]), evaluation(0.6, *wilson[1]), 0.95)
    assert (found.low, found.high) == (pytest.approx(0.0524, abs=1e-4), pytest.approx(0.3339, abs=1e-4))


def test_the_base_model_and_unlike_evaluations_are_not_taken_for_results():
    base = {**evaluation(0.1, 0.05, 0.2), "step": 0, "weight_version": 0}
    assert accuracy.accuracy_difference(run(evaluations=[base]), run(evaluations=[base]), "b", 0.95) is None
    twice = [evaluation(0.5, 0.4, 0.6), evaluation(0.6, 0.5, 0.7)]
    assert accuracy.last_evaluation(run(evaluations=twice), "b")["avg_at_k"] == 0.6, (
        "evaluated again: the newest counts"
    )
    late = {**evaluation(0.5, 0.4, 0.6), "step": 30, "weight_version": 30}
    found = judge_runs([run("sync", evaluations=[late]), run("periodic", evaluations=[evaluation(0.5, 0.4, 0.6)])])[0]
    assert "Careful: after 40 and 30 updates" in found.sentences[1]
    assert "on b (evaluated differently), compared" in found.answer


def test_several_benchmarks_widen_the_intervals_of_accuracy(tmp_path):
    """Two others and three benchmarks: of speed each has 1 - 0.05 / 2, of accuracy each 1 - 0.05 / 6."""
    rows = [evaluation(0.5, 0.4, 0.6, benchmark=name) for name in ("b", "c", "d")]
    runs = [run(name, noise=0.1, seed=seed, evaluations=rows) for seed, name in enumerate(("one", "two", "three"))]
    found = judge_runs(runs)[0]
    assert "97.5% interval" in found.sentences[0]
    assert [one.level for one in found.accuracy] == [pytest.approx(1 - 0.05 / 6)] * 3
    assert all("99.2% interval" in sentence for sentence in found.sentences[1:4])
    [alone] = judge_runs([run(name, evaluations=rows[:1]) for name in ("one", "two")])
    assert found.accuracy[0].interval.low < alone.accuracy[0].interval.low
    page.write_page(runs, tmp_path / "page.html")
    assert "c: difference from one, with 99.2% intervals" in (tmp_path / "page.html").read_text()


def test_other_settings_are_named_and_places_are_not():
    one = ComparedRun("a", "a", {"train.mode": "sync", "run.seed": "0", "run.output": "x"}, [step(0)])
    other = ComparedRun("b", "b", {"train.mode": "periodic", "run.seed": "1", "run.output": "y"}, [step(0)])
    assert config_differences([one, other]) == {"train.mode": ["sync", "periodic"], "run.seed": ["0", "1"]}
    assert "also differ in run.seed" in " ".join(judge_runs([one, other])[0].cautions)


@pytest.mark.parametrize(
    ("base", "other", "compared", "caution"),
    [
        (
            {"algorithm.clip_high": "0.2", "run.seed": "0"},
            {"algorithm.clip_high": "0.28", "run.seed": "0"},
            "algorithm.clip_high (0.2, 0.28)",
            "",
        ),
        (
            {"train.mode": "sync"},
            {"train.mode": "bounded", "train.max_staleness": "2"},
            "train.mode (sync, bounded), train.max_staleness (not set, 2)",
            "",
        ),
        (
            {"run.seed": "0", "train.steps": "3"},
            {"run.seed": "1", "train.steps": "4"},
            "",
            "also differ in run.seed, train.steps",
        ),
    ],
)
def test_the_key_that_two_runs_were_meant_to_differ_in_is_no_caution(base, other, compared, caution):
    found = judge_runs([ComparedRun(str(n), str(n), keys, [step(0)]) for n, keys in enumerate((base, other))])[0]
    assert caution in " ".join(found.cautions)
    assert ("differ" in " ".join(found.cautions)) == bool(caution)
    assert found.sentences[-1] == f"Compared: {compared}." or not compared
    assert found.sentences[-1].startswith("Compared") == bool(compared)


@pytest.mark.parametrize(
    ("seconds", "right", "answer"),
    [
        (8.0, 90, "faster (1.25 times as fast), and better on b"),
        (8.0, 60, "faster (1.25 times as fast), but worse on b"),
        (12.5, 90, "slower (0.80 times as fast), but better on b"),
        (8.0, 75, "faster (1.25 times as fast), and with no visible difference on b"),
        (8.0, 76, "faster (1.25 times as fast), and not shown to be better or worse on b"),
        (
            8.0,
            80,
            "faster (1.25 times as fast), and not shown to be better or worse on b",
        ),  # 5 of 5 coins: p = 1/16
        (8.0, 81, "faster (1.25 times as fast), and better on b"),  # p = 1/32
    ],
)
def test_both_questions_are_answered_in_one_sentence(seconds, right, answer):
    """Of 100 problems sync is right on the first 75."""
    runs = [
        run(
            name,
            length,
            evaluations=[evaluation(solved / 100, 0.0, 1.0, table="t")],
            tables={"t": {str(n): float(n < solved) for n in range(100)}},
        )
        for name, length, solved in (("sync", 10.0, 75), ("periodic", seconds, right))
    ]
    assert judge_runs(runs)[0].answer == f"periodic was {answer}, compared with sync."


def test_runs_that_did_not_end_well_are_marked(tmp_path):
    planned = {"train.steps": "12"}
    whole = ComparedRun("whole", "whole", planned, [step(n) for n in range(12)])
    dead = ComparedRun("dead", "dead", planned, [step(n) for n in range(7)], failure="the trainer died")
    cut = ComparedRun("cut", "cut", planned, [step(n) for n in range(3)])
    found = page.write_page([whole, dead, cut], tmp_path / "page.html")
    assert "dead failed after 7 of 12 steps: the trainer died" in found[0].cautions
    assert "cut has only 3 of 12 steps: it is still running, or it was stopped." in found[1].cautions
    assert not re.search("whole (failed|has only)", str([one.cautions for one in found]))
    lengths = [row[2] for row in page.summary_table([whole, dead, cut])[1]]
    assert lengths == ["12", "7 of 12, failed", "3 of 12, unfinished"]


def test_the_page_is_one_file_and_holds_the_figures(tmp_path):
    target = tmp_path / "deep" / "page.html"
    long = run("</script><b><!--<script>", steps=3000)
    page.write_page([run("sync", evaluations=[evaluation(0.5, 0.4, 0.6)]), long], target)
    text = target.read_text()
    assert not re.search(r'(src|href)="?http', text)
    assert text.count("</script>") == 3
    assert "<!--" not in text  # from which on, a browser takes the page's own end of the script for its text
    content = json.loads(re.search(r'id="data">(.*)</script>\n', text).group(1))
    assert "</script><b><!--<script>" in json.dumps(content)
    short, thinned = content["columns"]
    assert {len(values) for values in thinned.values()} == {375}  # means of eight steps
    assert (short["step"][-1], short["minutes"][-1], short["reward_mean"][-1]) == (39, pytest.approx(400 / 60), 0.5)
    assert len(text) < 170_000


def controlled(rewards, cosines=()):
    rows = [step(number) | {"reward_mean": reward} for number, reward in enumerate(rewards)]
    for row, cosine in zip(rows[1:], cosines, strict=False):
        row["grad_cosine"] = cosine
    return ComparedRun("stale", "stale", {"algorithm.gac_low": "0.1"}, rows)


def test_the_columns_of_gacs_table_3_count_from_step_50():
    run = controlled([0.5] * 151, [0.9] * 49 + [0.02, -0.04] * 45 + [0.2] * 11)
    found = run_figures.gradient_alignment(run.steps)
    assert found.mean == pytest.approx((45 * 0.06 + 11 * 0.2) / 101)
    assert (found.p90, found.share, found.low) == (0.2, 90 / 101, 0.1)
    assert run_figures.gradient_alignment(controlled([0.5] * 9).steps) is None
    tenths = [{"step": step, "grad_cosine": step / 10} for step in range(10)]
    assert run_figures.gradient_alignment(tenths).p90 == 0.8  # nine of ten are at most that
    own = run_figures.gradient_alignment(controlled([0.5] * 61, [0.4, -0.6] * 30).steps, "auto")
    assert own.low == pytest.approx(0.6)  # the mean of the first ten plus their standard deviation
    columns, rows = page.summary_table([run, controlled([0.5] * 9)])
    place = columns.index("|cosine| of gradients")
    assert [row[place] for row in rows] == ["mean 0.049, p90 0.200, 89% up to 0.1", "not measured"]


@pytest.mark.parametrize(
    ("rewards", "cosines", "said"),
    [
        ([0.2 + 0.01 * n for n in range(40)], [0.03] * 39, []),
        ([0.5] * 40, [0.03] * 19 + [0.5] * 20, ["left its on-policy range (up to 0.1; GAC §3.2)"]),
        ([0.8] * 20 + [0.3] * 20, [], ["collapse: the reward fell from 0.800 to 0.300 and did not recover"]),
        (([0.8] * 10 + [0.3] * 10) * 3 + [0.8] * 10, [], ["the reward swings: 3 falls"]),
        ([0.8, 0.3] * 30, [], []),
        ([0.8] * 3 + [0.1] * 3, [], []),
    ],
    ids=["sound", "aligned", "collapsed", "swinging", "noise", "short"],
)
def test_instability_is_named_as_gac_defines_it(rewards, cosines, said):
    run = controlled(rewards, cosines)
    found = run_figures.signs_of_instability(run.steps, "0.1")
    assert len(found) == len(said)
    assert all(part in sign for part, sign in zip(said, found, strict=True))
    cautions = " ".join(judge_runs([run, run])[0].cautions)
    assert all(part in cautions for part in said)


def test_of_a_redone_step_the_last_line_counts():
    rows = [step(0), step(1), step(2), step(1, seconds=7), step(2, seconds=8)]
    assert [row["step_s"] for row in steps_once(rows)] == [10, 7, 8]


def test_times_that_may_differ_for_another_reason_are_no_other_load():
    shared = ComparedRun("sync", "s", {"train.mode": "sync"}, [step(n, 16.0, train_s=10.0) for n in range(20)])
    assert judge_runs([shared, run("periodic", steps=20)])[0].answer.startswith("periodic was faster")
    small = loaded("small", 1.0, **{"parallel.data": "2"})
    assert judge_runs([small, loaded("large", 2.5)])[0].answer.startswith("large (periodic) was slower")


@pytest.mark.parametrize(
    ("ratio", "steps", "said"),
    [  # logs of value, low and high: the half width shrinks with the square root of the steps
        ((0.1, -0.1, 0.3), 50, "about 150 more steps would be enough"),  # 0.2: four times the steps
        ((-0.1, -0.3, 0.1), 50, "about 150 more steps would be enough"),
        ((0.1, -0.001, 0.201), 10, "about 1 more step would be enough"),
        ((0.1, -0.1, 0.3), 111, "about 340 more steps would be enough"),
        ((0.001, -0.1053, 0.0953), 50, "the two are nearly alike: a difference of more than 10% is unlikely"),
        ((0.0, -0.1053, 0.0953), 50, "the two are nearly alike: a difference of more than 10% is unlikely"),
    ],
)
def test_how_many_more_steps_would_decide(ratio, steps, said):
    assert _more(Interval(*map(math.exp, ratio)), steps) == f"; {said}"


def test_without_enough_steps_and_benchmarks_the_answer_claims_nothing():
    found = judge_runs([run("sync", steps=4), run("periodic", 8.0, steps=4)])[0]
    assert (
        "was of unknown speed (too few common steps), and of unknown quality by its reward in training" in found.answer
    )


@pytest.mark.parametrize(
    ("steps", "which"), [(4, "all 4 common steps"), (8, "last 5 of 8 common steps"), (30, "last 10 of 30 common steps")]
)
def test_the_reward_says_over_which_steps_it_is(steps, which):
    found = judge_runs([run(name="a", steps=steps), run(name="b", steps=steps, seed=1)])[0]
    assert any(sentence.startswith(f"Reward in training ({which}): ") for sentence in found.sentences)
