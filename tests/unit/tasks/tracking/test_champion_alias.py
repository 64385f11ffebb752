"""The alias `champion` against a real MLflow store: moved, left, refused;
lineage and evaluations as they are logged."""

import asyncio
import json
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from hashlib import sha256
from importlib import metadata

import mlflow
import pytest

from engine.config import Config
from engine.config.recipe import load_config
from engine.evaluation.benchmarks import EncodedBenchmark
from engine.evaluation.results import Subject, record_evaluation
from engine.orchestrator.in_run_evaluation import dropped_file
from engine.run.files import append_line, read_lines
from engine.run.folder import RunFolder, dump_config
from engine.run.run_file import RunStart, update_run
from engine.types import Prompt
from support import groups
from support.run_folders import write_report
from tasks.tracking import code_version, evaluation_texts, evaluations, tracked_run
from tasks.tracking.champion_alias import update_champion
from tasks.tracking.code_version import OURS, tree_hash

SAMPLES = 4
VERSION = 2
"""That of the responses."""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """One store for all tests: making it takes MLflow seconds. Models and runs have names of their own."""
    folder = tmp_path_factory.mktemp("output")
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow sets it to the store that it used last
        yield folder


def group(index, right):
    """A problem with so many right answers of SAMPLES."""
    made = groups.group(0, VERSION, rewards=[float(n < right) for n in range(SAMPLES)], statuses=["ok"] * SAMPLES)
    texts = [f"#{7 if number < right else number}" for number in range(SAMPLES)]
    responses = [replace(one, text=text, finish_reason="stop") for one, text in zip(made.responses, texts, strict=True)]
    prompt = Prompt(f"problem-{index}", f"{index}?", "7", (1,))
    return replace(made, index=index, prompt=prompt, responses=tuple(responses))


def finished(output, name, right, **evaluate):
    """A run folder whose final policy was evaluated: `right` answers of SAMPLES per problem."""
    config = Config.model_validate(
        {
            "run": {"name": name, "output": str(output)},
            "model": {"path": str(output / "base")},
            "train": {"steps": 2},
            "evaluate": {"samples": SAMPLES, **evaluate},
        }
    )
    folder = RunFolder(config.folder)
    folder.create(config, resume=False)
    folder.policy.mkdir()
    (folder.policy / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    dump_config(config, folder.config)
    for model, version, counts in ((output / "base", 0, [0] * len(right)), (folder.policy, 2, right)):
        record(config, folder, Subject(str(model.resolve()), version), counts, seconds=1.0)
    return config, folder


def record(config, folder, subject, counts, given=None, **more):
    """An evaluation with so many right answers of SAMPLES per problem, or of these groups."""
    asyncio.run(
        record_evaluation(
            config=config,
            folder=folder,
            subject=subject,
            benchmark=EncodedBenchmark("sums", (), {}),
            groups=given or [group(index, count) for index, count in enumerate(counts)],
            verifier=None,
            sampled=VERSION,
            more=more,
        )
    )


def registered(config, folder, name="model"):
    """As the pipeline's end: (verdict, the new model version, the number of the one that is champion now, if any)."""
    with tracked_run.track_run(config):
        version = tracked_run.register_version(name, folder.policy)
        verdict = update_champion(name, version, folder, config)
    client = mlflow.MlflowClient()
    champion = client.get_registered_model(name).aliases.get("champion")
    return verdict, client.get_model_version(name, version), None if champion is None else int(champion)


def test_the_champion_moves_only_when_the_comparison_says_so(output):
    first, version, champion = registered(*finished(output, "first", [1, 2, 1, 0, 2, 1, 1, 0, 2, 1]))
    assert (first.wins, champion) == (True, 1)
    assert first.reason.startswith(
        "there was no champion; better than the base model at 95% confidence: difference +0.2750"
    )
    assert first.comparison.p_value == pytest.approx(2 / 2**8)  # eight of ten went up, two are equal
    with tracked_run.track_run(load_config(output / "first/config.toml")):  # killed behind the alias, and done again
        folder = RunFolder(output / "first")
        again = tracked_run.register_version("model", folder.policy)
        verdict = update_champion("model", again, folder, load_config(folder.config))
    assert (again, verdict.wins, verdict.reason) == (str(version.version), True, first.reason)

    close, version, champion = registered(*finished(output, "close", [1, 2, 2, 0, 2, 1, 1, 1, 2, 0]))
    assert not close.wins
    assert champion == 1
    assert version.tags["metronome.champion"].startswith(
        "not better than the champion at 95% confidence: difference +0.0250"
    )

    better, version, champion = registered(*finished(output, "better", [3, 3, 2, 1, 4, 2, 3, 2, 4, 3]))
    assert better.wins
    assert better.comparison.p_value == pytest.approx(2 / 2**10)  # all ten went up
    assert (champion, int(version.version)) == (3, 3)
    assert "better than the champion at 95% confidence" in version.tags["metronome.champion"]


@pytest.mark.parametrize(
    ("second_output", "slow", "later"),
    [
        ("", "compares", "worse"),
        ("elsewhere", "compares", "worse"),
        ("elsewhere", "takes the alias", "worse"),
        pytest.param("elsewhere", "takes the alias", "better", marks=pytest.mark.slow),
    ],
)
def test_of_two_that_challenge_at_once_the_better_one_is_champion(output, monkeypatch, second_output, slow, later):
    """One has compared itself with the earlier champion, or even decided, when the other becomes it."""
    name = f"race{second_output}{slow.split()[0]}{later}"
    registered(*finished(output, f"{name}-first", [1, 2, 1, 0, 2, 1, 1, 0, 2, 1]), name)
    runs = [finished(output, f"{name}-{right}", [right] * 10) for right in (4, 3)]
    versions = []
    for config, folder in runs:
        with tracked_run.track_run(config):
            versions.append(tracked_run.register_version(name, folder.policy))
    here = mlflow.artifacts.load_dict
    pauses = {who: 1.5 if who == later else 0.2 for who in ("better", "worse")}
    take = mlflow.MlflowClient.set_registered_model_alias

    def slowly(uri):
        found = here(uri)
        time.sleep(pauses[threading.current_thread().name] if slow == "compares" else 0.3)
        return found

    def take_slowly(client, name, alias, version):
        if slow != "compares" and version == versions[list(pauses).index(threading.current_thread().name)]:
            time.sleep(pauses[threading.current_thread().name])
        take(client, name, alias, version)

    def challenge(version, config, folder):
        if version == versions[1] and second_output:
            run = config.run.model_copy(update={"output": str(output / second_output)})
            config = config.model_copy(update={"run": run})
        update_champion(name, version, folder, config)

    monkeypatch.setattr(mlflow.artifacts, "load_dict", slowly)
    monkeypatch.setattr(mlflow.MlflowClient, "set_registered_model_alias", take_slowly)
    threads = [
        threading.Thread(target=challenge, args=(version, *run), name=who)
        for who, version, run in zip(pauses, versions, runs, strict=True)
    ]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    client = mlflow.MlflowClient()
    assert client.get_registered_model(name).aliases["champion"] == int(versions[0])
    reason = client.get_model_version(name, versions[1]).tags["metronome.champion"]
    assert reason.startswith("not better than the version 2 at 95% confidence")


def test_the_first_is_champion_only_if_it_is_better_than_its_base(output):
    config, folder = finished(output, "no-better", [0, 1, 0, 0, 1, 0, 0])  # the base had none right
    found, _, champion = registered(config, folder, "no-better")
    assert (found.wins, champion) == (False, None)
    assert found.reason.startswith(
        "there was no champion; not better than the base model at 95% confidence: difference +0.0714"
    )

    config, folder = finished(output, "no-base", [1, 2, 1, 0, 2, 1])
    base, final = read_lines(folder.evaluations)
    # the policy in training is not the base
    inside = {**final, "model": base["model"], "weight_version": 1, "in_run": True}
    folder.evaluations.write_text("".join(json.dumps(row) + "\n" for row in (inside, final)))
    found, _, champion = registered(config, folder, "no-base")
    assert (found.wins, champion) == (True, 1)
    assert found.reason == "there was no champion; not compared: the base model has no comparable evaluation"

    config, folder = finished(output, "not-evaluated", [4] * 6)
    folder.evaluations.unlink()
    found, _, champion = registered(config, folder, "not-evaluated")
    assert (found.wins, champion) == (False, None)


def test_what_cant_be_compared_leaves_the_champion_with_the_reason(output):
    registered(*finished(output, "other-first", [1, 2, 1, 1, 2, 1]), "other")
    other, version, champion = registered(*finished(output, "other-warmer", [4] * 6, temperature=0.7), "other")
    assert (other.wins, champion) == (False, 1)
    apart = "can't be compared with the champion's: "
    assert other.reason == f"its evaluation {apart}evaluate.temperature (0.7, 1.0) differ (new, champion)"
    other, _, champion = registered(*finished(output, "other-more", [4] * 7), "other")
    assert (other.wins, champion) == (False, 1)
    assert other.reason.endswith("with the champion's: problems (7, 6), prompts differ (new, champion)")

    config, folder = finished(output, "other-not-evaluated", [4] * 6)
    folder.evaluations.unlink()
    other, _, champion = registered(config, folder, "other")
    assert (other.wins, champion) == (False, 1)
    assert other.reason == "the new policy was not evaluated on the run's first benchmark"

    client = mlflow.MlflowClient()
    client.set_registered_model_alias("other", "champion", "4")  # one without results
    other, _, champion = registered(*finished(output, "other-again", [4] * 6), "other")
    assert (other.wins, champion) == (False, 4)
    assert other.reason.startswith("the results of the champion (version 4) can't be read")


def test_a_policy_whose_judge_fails_more_often_does_not_become_champion(output):
    registered(*finished(output, "judged", [1, 2, 1, 1, 2, 1]), "judged")
    config, folder = finished(output, "unjudged", [4] * 6)
    row = list(read_lines(folder.evaluations))[-1]
    groups = [group(index, 4) for index in range(6)]
    groups[0] = replace(groups[0], scores=(replace(groups[0].scores[0], excluded=True), *groups[0].scores[1:]))
    record(config, folder, Subject(row["model"], 2), [4] * 6, groups)
    found, _, champion = registered(config, folder, "judged")
    assert (found.wins, champion) == (False, 1)
    assert found.reason.endswith("champion's: 1 of its responses have no score, 0 of the champion's")


def test_evaluations_are_logged_once_with_their_tables_and_the_closing_table_compares_them(output):
    config, folder = finished(output, "logged", [1, 2, 4])
    for _ in range(2):
        with tracked_run.track_run(config) as run_id:
            pass
        assert evaluations.log_finished(config) == run_id
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run_id, "sums/avg_at_4")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.0), (2, pytest.approx(7 / 12))]
    assert client.get_metric_history(run_id, "sums/maj_at_4")[1].value == pytest.approx((1 / 4 + 1 + 1) / 3)
    assert client.get_metric_history(run_id, "sums/against/difference")[0].value == pytest.approx(7 / 12)
    tables = sorted(item.path for item in client.list_artifacts(run_id, "evaluations"))
    assert tables == sorted(row["table"] for row in read_lines(folder.evaluations))
    text = mlflow.artifacts.load_text(f"runs:/{run_id}/{tables[1]}")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["right"] for row in rows] == [1, 2, 4]
    assert len(rows[0]["responses"]) == SAMPLES
    table = evaluation_texts.closing_rows(folder)
    assert table["accuracy before"].startswith("avg@4 0.000 [0.000, 0.561]")
    assert "pass@4 1.000" in table["accuracy after"]
    assert "on 3 problems of sums" in table["accuracy after"]
    assert table["difference"].startswith("+0.583 [")
    assert table["difference"].endswith("p = 0.25; better on 3, worse on 0 of 3 problems")


def test_the_cost_of_evaluations_inside_a_run_stands_in_the_closing_table(output):
    config, folder = finished(output, "inside", [1, 2, 4])
    with tracked_run.track_run(config):
        append_line(dropped_file(folder), {"weight_version": 2, "reason": "too late", "exposed_s": 3.0})
        record(config, folder, Subject(str(output / "base"), 3), [2] * 3, in_run=True, seconds=2.0, exposed_s=0.0)
    closing = evaluation_texts.closing_rows(folder)
    assert closing["evaluated in the run"] == "1 time, 1 dropped (too late); training waited 3.0 s for it"


def test_the_lineage_of_a_policy_names_what_it_was_made_of(output):
    config, folder = finished(output, "night", [1, 2, 1])
    update_run(folder.path, start=RunStart(start="nightly", continued_from="models:/nights/6"))
    write_report(folder.path, "5e884898da28")
    _, version, _ = registered(config, folder, "nights")
    tags = {key.removeprefix("metronome."): value for key, value in version.tags.items()}
    assert {"code_version", "champion"} <= tags.keys()
    assert tags["base_model"] == str(output / "base")
    assert tags["base_model_hash"] == sha256(b"config.json" + sha256(b"{}").digest()).hexdigest()
    assert (tags["start"], tags["continued_from"]) == ("nightly", "models:/nights/6")
    assert tags["data_version"] == "5e884898da28"
    assert tags["config_hash"] == sha256(folder.config.read_bytes()).hexdigest()
    assert (tags["steps"], tags["mode"]) == ("2", "periodic")
    assert tags["run_folder"] == str(output / "night")
    assert (tags["benchmark"], tags[f"avg_at_{SAMPLES}"]) == ("sums", f"{4 / 12:.6f}")
    assert json.loads(tags["protocol"])["evaluate.samples"] == SAMPLES


def test_the_code_version_is_that_of_all_our_code(tmp_path):
    for folder in OURS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.py").write_text("one")
    seen = {tree_hash(tmp_path)}
    for folder, name in (("engine", "one.py"), ("tasks", "one.py"), ("flows", "two.py"), ("infra", "recipe.toml")):
        (tmp_path / folder / name).write_text("other")
        seen.add(tree_hash(tmp_path))
    (tmp_path / "infra/recipe.toml").rename(tmp_path / "infra/renamed.toml")
    seen.add(tree_hash(tmp_path))
    assert len(seen) == 6
    (tmp_path / "tasks/__pycache__").mkdir()
    (tmp_path / "tasks/__pycache__/one.pyc").write_text("compiled")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/tour.md").write_text("not code")
    assert tree_hash(tmp_path) in seen


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_the_code_version_names_the_commit_and_that_files_differ_from_it(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(code_version, "HOME", tmp_path)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/one.py").write_text("one")
    assert "commit" not in code_version.code_version()
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    clean = code_version.code_version().split()
    assert clean[:4] == [metadata.version("metronome"), "commit", git("rev-parse", "HEAD"), "code"]
    (tmp_path / "engine/one.py").write_text("two")
    changed = code_version.code_version().split()
    assert changed[2] == clean[2] + "-dirty"
    assert changed[4] != clean[4]
    (tmp_path / ".git/HEAD").unlink()  # git refuses
    assert code_version.code_version().split()[:3] == [metadata.version("metronome"), "commit", "unknown"]
