import json
import sys
import time
from types import SimpleNamespace

import pytest

from engine.config import Config, Model, Rollout, Run, Train
from engine.errors import BadInput, DeadlineError, MetronomeError, ProcessDied, RatioGapError
from engine.run import limits
from engine.run.folder import RunFolder
from tasks.stages import orchestrator_process
from tasks.stages.orchestrator_process import Silence, run_training
from tasks.terminal import interruption


@pytest.fixture
def orchestrator(tmp_path, monkeypatch):
    """Runs code in the orchestrator's place: `send` sends an event, and `folder` is the run folder. The time to stop it
    is short."""
    monkeypatch.setattr(orchestrator_process, "STOP_S", 0.1)
    head = (
        "import os, pathlib, signal, sys, time\n"
        "from engine.run.event_stream import EventWriter\n"
        "send = EventWriter(int(sys.argv[1])).send\n"
        f"folder = pathlib.Path({str(tmp_path / 'mine')!r})\n"
    )

    def becomes(code):
        def command(config, resume, replay, events, attempt):
            return [sys.executable, "-c", head + code, str(events)]

        monkeypatch.setattr(orchestrator_process, "orchestrator_command", command)

    return becomes


@pytest.fixture
def config(tmp_path):
    return Config(run=Run(name="mine", output=str(tmp_path)))


def test_steps_notices_and_progress_are_passed_on_and_nothing_is_in_progress_at_the_end(config, orchestrator, capsys):
    orchestrator("""
send("progress", ["loading", None])
send("notice", ["rewards", "3 of 8 groups teach nothing"])
for step in range(3):
    send("step", {"step": step})
send("progress", ["3/4 steps", 0.75])
while b"0.75" not in (folder / "logs/progress.json").read_bytes():
    time.sleep(0.1)
""")
    rows = []
    folder = run_training(config, on_step=rows.append)
    assert rows == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert "rewards      3 of 8 groups teach nothing\n" in capsys.readouterr().out
    assert not folder.progress.exists()


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ('send("failed", ["RatioGapError", "weights differ"]); sys.exit(1)', RatioGapError, "^weights differ$"),
        ('send("failed", ["BadInput", "no such key"]); sys.exit(2)', BadInput, "^no such key$"),
        ('send("failed", ["NoSuchError", "it failed"]); sys.exit(1)', MetronomeError, "^it failed$"),
        ('print("the last words", flush=True); os.abort()', ProcessDied, "(?s)ended by SIGABRT.*the last words"),
    ],
)
def test_the_error_that_the_orchestrator_told_is_raised_or_how_it_died(config, orchestrator, code, error, message):
    folder = RunFolder(config.folder)
    folder.create(config, resume=False)
    folder.write_failure(DeadlineError("of an earlier attempt"))
    orchestrator(code)
    with pytest.raises(error, match=message) as raised:
        run_training(config)
    assert type(raised.value) is error
    assert not folder.failure.exists()


@pytest.mark.parametrize("beats", [5, 0])
def test_a_orchestrator_that_is_stopped_is_ended_and_named(tmp_path, orchestrator, beats):
    config = Config(
        run=Run(name="mine", output=str(tmp_path)), train=Train(timeout_s=0.5), rollout=Rollout(timeout_s=1.0)
    )
    orchestrator(f"""
for beat in range({beats}):
    send("progress", ["alive", None])
    time.sleep(0.2)
os.kill(os.getpid(), signal.SIGSTOP)
""")
    said = "0.9 s .2 x train.timeout_s, less 0.1 s to end in"
    if not beats:
        said = said.replace("0.9", "1.9") + " . rollout.timeout_s"
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=rf"the orchestrator .process \d+. gave no sign of life for {said}."):
        run_training(config)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(("parameters", "whole"), [(135_000_000, True), (1, False)])
def test_a_checkpoint_has_the_time_that_its_size_takes(tmp_path, orchestrator, monkeypatch, capsys, parameters, whole):
    """The trainer of SmolLM2 takes two seconds to save, after which another is ended."""
    (tmp_path / "model").mkdir()
    header = json.dumps({"weight": {"shape": [parameters], "dtype": "F32"}}).encode()
    (tmp_path / "model/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    config = Config(run=Run(name="mine", output=str(tmp_path)), model=Model(path=str(tmp_path / "model")))
    folder = RunFolder(config.folder)
    orchestrator("""
def save(*_):
    time.sleep(2)
    (folder / "saved").touch()
    sys.exit()
signal.signal(signal.SIGINT, save)
(folder / "steps.jsonl").write_text('{"step": 0, "pool_size": 1}\\n{"step": 1, "pool_size": 1}\\n')
send("step", {"step": 1})
time.sleep(60)
""")
    monkeypatch.setattr(limits, "UNDER_WAY_S", 0.1)
    monkeypatch.setattr(interruption, "_command", interruption._Command())
    interruption.note_run(config, "train")

    def interrupt(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(config, on_step=interrupt)
    assert (folder.path / "saved").exists() == whole
    seconds = 31 if whole else 0
    said = f"stopping: the trainer saves the weights from before this step, for up to {seconds} s; Ctrl-C again ends "
    assert f"{said}at once and loses 2 finished steps\n" in capsys.readouterr().err


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(10, 11), (6, 6)])  # twice as long less 9 s, but not shorter
def test_signs_of_life_end_the_silence_and_of_a_pause_in_which_this_process_slept_a_moment_counts(
    monkeypatch, timeout_s, limit_s
):
    now = 0.0
    monkeypatch.setattr(orchestrator_process, "time", SimpleNamespace(monotonic=lambda: now))
    config = Config(train=Train(timeout_s=timeout_s), rollout=Rollout(timeout_s=7.0))
    silence = Silence(SimpleNamespace(pid=1, log="its log"), config)

    def after(seconds, heard=False):
        nonlocal now
        for pause_s in seconds:
            now += pause_s
            silence.look(heard)

    after([1.0] * (limit_s + 7))
    for _ in range(2):
        after([0.0], heard=True)
        after([1.0] * limit_s)
    after([0.0], heard=True)
    after([3600.0, *[1.0] * (limit_s - 5)])
    with pytest.raises(DeadlineError, match=f"no sign of life for {limit_s} s"):
        after([0.1])
