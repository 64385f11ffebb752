"""A process that starts later scores, plays or trains with the code of the run's start."""

import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from engine.config import Config
from engine.evaluation.tables import evaluation_protocol
from engine.orchestrator.workers.program_pool import ProgramPool
from engine.orchestrator.workers.verifier_pool import VerifierPool
from engine.run.run_file import read_run
from engine.run.run_inputs import code_of, kept_code, record_inputs
from engine.run.user_code import find_code
from engine.wire.verifier_messages import LoadTokenizer
from support.runs import ROOT, config_of
from support.verifier_calls import PROMPT, response

FILES = {
    "mine.py": """
import time
from pathlib import Path
import helper
from parts import deep as deeper

def reward(prompt, responses):
    import late
    if prompt.answer == "slow":
        time.sleep(60)
    beside = float(Path(__file__).with_name("beside.txt").read_text())
    return [1.0 + 10 * helper.VALUE + 100 * deeper.VALUE + 1000 * late.VALUE + 10000 * beside for _ in responses]
""",
    "helper.py": "VALUE = 1",
    "parts/__init__.py": "from .inner import FACTOR",
    "parts/deep.py": "from . import FACTOR\nVALUE = FACTOR",
    "parts/inner.py": "FACTOR = 1",
    "late.py": "VALUE = 1",
    "beside.txt": "1",
}


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "mine"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def config(settings, tmp_path, tiny_model, code):
    keys = {"model.path": str(tiny_model), "reward.function": f"{code}/mine.py:reward", "reward.timeout_s": 0.5}
    return config_of(settings | keys | {"reward.workers": 1})


async def score(pool, answer="2"):
    [found] = await pool.score(replace(PROMPT, answer=answer), [response()])
    return found.value


async def test_a_reward_that_is_edited_in_the_middle_of_a_run_scores_by_the_copy(config, code):
    """A call that times out ends its process, and the next one loads the reward again. Files that are no code are read
    where they lie."""
    record_inputs(config)
    pool = VerifierPool(config.reward)
    try:
        await pool.start(LoadTokenizer(code=str(kept_code(config.folder, config, "reward"))))
        assert await score(pool) == 11111
        for name, text in FILES.items():
            (code / name).write_text(text.replace("1", "5"))
        assert await score(pool, "slow") == 0  # its process is replaced
        assert await score(pool) == 51111
    finally:
        pool.close()


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".py")])
def test_each_file_that_the_reward_imports_belongs_to_its_identity(config, code, name):
    record_inputs(config)
    before = read_run(config.folder).inputs["reward"]
    assert {file.name for file in kept_code(config.folder, config, "reward").rglob("*.py")} == {
        name.rpartition("/")[2] for name in FILES if name.endswith(".py")
    }
    (code / name).write_text(FILES[name] + "\n# edited")
    record_inputs(config)  # no checkpoint: the run begins again
    after = read_run(config.folder).inputs["reward"]
    assert after["hash"] != before["hash"]
    assert after["named"] == before["named"]


async def test_a_program_of_a_later_process_is_that_of_the_start(code, tmp_path):
    (code / "play.py").write_text("import helper\n\nasync def play(prompt, chat):\n    return helper.VALUE\n")
    config = Config(rollout={"program": f"{code}/play.py:play"}, reward={"workers": 1})
    copies = kept_code(tmp_path / "run", config, "reward")
    (code / "play.py").write_text("syntax error")
    pool = ProgramPool(config)
    try:
        await pool.start(LoadTokenizer(code=str(copies)))
    finally:
        pool.close()


LOADS = """
import sys
from pathlib import Path
from engine.run.user_code import load_copies, load_function
load_copies(Path(sys.argv[1]))
own, file = load_function("algorithm.advantage", sys.argv[2], "", "")
print(own(None, None), file)
"""


def test_a_rank_loads_the_code_of_the_start_and_no_other(settings, tmp_path, code):
    config = config_of(settings | {"algorithm.advantage": f"{code}/own.py:advantage"})
    (code / "own.py").write_text("from helper import VALUE\n\ndef advantage(rewards, lengths):\n    return VALUE\n")
    copies = kept_code(tmp_path / "run", config, "algorithms")
    for name in ("own", "other"):
        (code / f"{name}.py").write_text("def advantage(rewards, lengths):\n    return 5\n")
    (code / "helper.py").write_text("VALUE = 5")

    def loads(name):
        command = [sys.executable, "-c", LOADS, str(copies), f"{code}/{name}.py:advantage"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        return done.stdout + done.stderr

    assert loads("own") == f"1 {code}/own.py\n"
    assert f"{code}/other.py is not the code of the run's start, of which {copies} has copies" in loads("other")


def test_an_evaluation_scores_as_the_run_and_by_the_present_file_where_there_is_no_run(config, code, tmp_path):
    record_inputs(config)
    before = kept_code(config.folder, config, "reward")
    (code / "mine.py").write_text("def reward(prompt, responses):\n    return [5.0] * len(responses)\n")
    assert kept_code(config.folder, config, "reward") == before
    protocol = evaluation_protocol(config, "some", [])
    assert protocol["reward_hash"] == code_of(config.folder, config, "reward")["hash"]
    assert protocol["reward_hash"].startswith(before.name.removeprefix("reward-"))
    alone = kept_code(tmp_path / "alone", config, "reward")
    assert alone.name != before.name
    assert [file.name for file in alone.rglob("*.py")] == ["mine.py"]


def test_installed_packages_are_no_code_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "made", ModuleType("made"))  # it has no spec
    (tmp_path / "own.py").write_text(
        "import json, numpy, engine.types, missing, made, __main__\nfrom ..." + "." * 99 + " import gone\n"
    )
    assert find_code(f"{tmp_path}/own.py:reward") == [tmp_path / "own.py"]
    (tmp_path / "own.py").write_text("def broken(")
    assert find_code(f"{tmp_path}/own.py:reward") == [tmp_path / "own.py"]


def test_two_files_of_one_name_have_two_copies(settings, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(f"def {name}(prompt, responses): return [1.0]")
    functions = [{"function": f"{tmp_path}/{name}/own.py:{name}"} for name in "ab"]
    copies = kept_code(tmp_path / "run", Config(reward={"functions": functions}), "reward")
    assert sorted(file.read_text()[4] for file in copies.rglob("own.py")) == ["a", "b"]
