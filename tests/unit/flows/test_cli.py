import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from engine.run.process import Child
from flows.cli import app
from support.guard import guarded_command
from support.runs import ROOT

ROW = '{"problem": "1+1=", "answer": "2"}\n'


def metronome(*arguments, cwd=None, timeout=60):
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(ROW)
    return path


@pytest.fixture
def refuse(tmp_path, problems):
    """Runs `metronome run` with settings; asserts exit code 2 and one message; returns it.

    `here`: in this process, which has the libraries already. tests/integration/test_pipeline.py starts the script.
    """

    def check(*settings, command="run", flags=(), here=True):
        given = [f"run.output={tmp_path / 'runs'}", f"data.train={problems}", f"data.heldout={problems}", *settings]
        line = [command, *(part for one in given for part in ("--set", one)), *flags]
        done = CliRunner().invoke(app, line) if here else metronome(*line)
        assert (done.exit_code if here else done.returncode) == 2, done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1, "one message, no traceback"
        return done.stderr

    return check


def test_help_lists_the_commands_and_starts_no_library():
    done = metronome("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("run", "train", "evaluate", "serve", "doctor"))
    code = (
        "import sys, flows.cli; print([m for m in ('prefect', 'mlflow', 'torch', 'transformers') if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"


MISTAKES = [
    *(
        ([command], "train.stepz=3")
        for command in ("run", "train", "evaluate", "try-reward", "serve", "plan", "service")
    ),
    (["deploy"], "train.stepz=3"),
    (["train", "missing.toml"], "train.steps=3"),
    (["run"], "tracking.experiment="),
    (["train"], "reward.function=missing.py:reward"),
    (["run"], "model.path=missing"),
]


def test_a_recipes_mistakes_are_found_before_the_large_libraries_are_loaded(tmp_path):
    """Each takes seconds to import. One process tries all, because none of them is allowed to load any."""
    code = f"""
import sys
from flows.cli import app
for command, setting in {MISTAKES!r}:
    try:
        app([*command, "--set", "run.output={tmp_path}/runs", "--set", setting], prog_name="metronome")
    except SystemExit as ended:
        print(command, ended.code, [m for m in ("torch", "transformers", "mlflow", "prefect") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    told = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert told == [f"{command} 2 []" for command, _ in MISTAKES], done.stdout + done.stderr


def test_a_command_ends_no_child_of_the_process_that_calls_it(tmp_path):
    """Only the console script drops the lifeline. A notebook or a test that calls a command keeps its own servers."""
    server = Child("server", guarded_command([sys.executable, "-c", "import time; time.sleep(600)"]), tmp_path / "log")
    try:
        refused = CliRunner().invoke(app, ["run", str(tmp_path / "missing.toml")])
        assert refused.exit_code == 2, refused.output
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(2)
    finally:
        server.stop(0.0)


def test_doctor_names_every_requirement():
    done = metronome("doctor")
    assert done.returncode == 0, done.stdout
    assert "ok        megatron-core 0.16.1" in done.stdout


def test_the_options_of_the_device_check_need_it():
    done = CliRunner().invoke(app, ["doctor", "--only", "kernels"])
    assert (done.exit_code, done.stderr) == (2, "error: --only, --out and --set are for metronome doctor --device\n")


@pytest.mark.parametrize(
    ("arguments", "steps"), [([], 7), (["infra/recipes/quickstart.toml"], 50), (["--set", "train.steps=9"], 9)]
)
def test_a_plan_from_a_run_is_one_of_its_settings(tmp_path, monkeypatch, arguments, steps):
    (tmp_path / "config.toml").write_text("[train]\nsteps = 7\n")
    planned = []
    monkeypatch.setattr(
        "tasks.commands.plan.make_plan", lambda config, runs, **rest: planned.append((config.train.steps, runs))
    )
    done = CliRunner().invoke(app, ["plan", *arguments, "--from", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert planned == [(steps, [str(tmp_path)])]


TALKS = """
from flows.cli import _exit_codes
from tasks.terminal.console import say
with _exit_codes():
    while True:
        say("stage", "text")
"""


def test_a_run_whose_output_nobody_reads_says_so():
    """As in `metronome run | head -1`."""
    command = [sys.executable, "-c", TALKS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as talking:
        talking.stdout.readline()
        talking.stdout.close()
        told = talking.stderr.read()
    assert told.startswith("error: nobody reads the output any more\n")


def test_the_version_is_the_packages():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"metronome {metadata.version('metronome')}\n")


FILES = {
    "broken.jsonl": ROW + '{"problem": "2+2=", "answer"\n',
    "empty.jsonl": '{"problem": "2+2="}\n',
    "mine.py": "def other(): ...\n",
    "model/config.json": json.dumps({"architectures": ["MambaForCausalLM"]}),
}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.learning_rat=1", "unknown key train.learning_rat; did you mean train.learning_rate?"),
        ("train.steps=-1", "train.steps = -1"),
        ("rollout.group_size=1", "rollout.group_size must be at least 2"),
        ("data.train={}/gone.json", "gone.json: no such file"),
        ("evaluate.benchmark={}/gone.json", "gone.json: no such file"),
        ("data.train={}/broken.jsonl", "broken.jsonl, line 2"),
        ("data.heldout={}/empty.jsonl", "no usable row among 1"),
        ("reward.function=no_such_module:reward", "no_such_module"),
        ("reward.function={}/mine.py:reward", "defines no reward"),
        ("model.path={}", "no config.json there"),
        ("model.path={}/gone", "no config.json there"),
        ("model.path={}/model", "MambaForCausalLM is not supported; supported: "),
        ("checkpoint.path=gopher://bucket", "expected a folder or s3://"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing_behind(refuse, tmp_path, setting, said):
    (tmp_path / "model").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert said in refuse(setting.format(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_a_name_of_the_hub_as_model_is_asked_for_there(refuse, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    message = refuse("model.path=nobody/tiny", here=False)  # the hub's address is read with its library
    assert "model nobody/tiny: no such file or folder here, and the Hugging Face hub can't be reached" in message


def test_train_says_which_rows_are_left_out(tmp_path, problems):
    (tmp_path / "bad.msgpack").write_bytes(b"no record")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"question": "{n}+1=", "answer": "One more\\n#### {n + 1}"}}\n' for n in range(2, 7)) + "{}\n"
    )
    given = [f"run.output={tmp_path / 'runs'}", f"data.train={rows}", f"data.heldout={problems}"]
    command = ["train", "--replay", str(tmp_path / "bad.msgpack"), *(part for one in given for part in ("--set", one))]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "5 problems of 4 characters (4-4), 1 held out; skipped 1 × no problem; " in done.output
    assert "rows.jsonl, 5 rows: the answer is what follows ####, as in GSM8K" in done.output


@pytest.fixture
def dry(tmp_path, problems):
    """A dry `metronome train` without RECIPE: (exit code, what it printed)."""

    def command(*keys):
        given = [part for one in ("run.dry=true", *keys) for part in ("--set", one)]
        done = CliRunner().invoke(app, ["train", *given])
        return done.exit_code, done.output

    return command


def test_a_run_on_own_problems_has_nothing_of_the_quickstart_under_it(dry, problems):
    code, told = dry(f"data.train={problems}", f"data.heldout={problems}")
    assert code == 0, told
    assert "recipe       infra/recipes/own_data.toml, as data.train is set and no recipe is named: " in told
    assert "frozen " not in told  # the quickstart's old policy and reference
    code, told = dry("run.name=any")
    assert (code, "recipe  " in told, "frozen " in told) == (0, False, True)


def test_the_recipe_for_own_problems_sets_nothing():
    from engine.config.recipe import load_config

    ours, plain = (load_config(one, ["run.name=one"]) for one in ("infra/recipes/own_data.toml", None))
    assert ours == plain


def test_a_run_on_own_problems_needs_its_own_heldout_ones(dry, problems):
    code, told = dry(f"data.train={problems}")
    assert code == 2
    assert "error: --set data.train: data.heldout would be the quickstart's additions; also give " in told
    assert dry(f"data.train={problems}", "data.heldout_fraction=0.5")[0] == 0


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("reward.function=no_such_module:reward", "no_such_module"),
        ("rollout.program=gone.py:program", 'rollout.program = "gone.py:program": no such file'),
        ('rollout.stop=["STOP HERE"]', "tokens of this tokenizer; it must be one"),
    ],
)
def test_a_dry_run_refuses_a_reward_a_program_or_a_stop_that_cannot_work(dry, key, said):
    code, told = dry(key)
    assert (code, said in told) == (2, True), told


def test_an_output_that_is_a_file_is_refused_by_its_key(problems):
    done = CliRunner().invoke(app, ["train", "--set", f"run.output={problems}", "--set", "run.name=any"])
    assert (done.exit_code, f"error: run.output = '{problems}': {problems} is a file" in done.output) == (2, True)


def test_another_model_on_the_quickstart_is_told_whose_settings_it_has(dry):
    code, told = dry("model.path=data/quickstart_model")
    assert code == 0
    assert "recipe       infra/recipes/quickstart.toml, as no recipe is named: " in told


@pytest.mark.parametrize("command", ["evaluate", "try-reward", "deploy", "plan", "service", "serve"])
def test_a_command_without_a_recipe_says_which_one_it_takes(command):
    done = CliRunner().invoke(app, [command, "--set", "train.stepz=1"])
    assert done.exit_code == 2
    assert done.stdout.splitlines() == ["recipe       infra/recipes/quickstart.toml, as none is named"]
    assert "train.stepz" in done.stderr
