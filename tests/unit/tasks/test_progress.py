"""What the Prefect UI shows of a training, without a server: its line, and how seldom it is told."""

import threading
import time

import httpx
import pytest

from engine.config import Config
from tasks.stages import train
from tasks.stages.train import TrainingProgress
from tasks.terminal.console import step_text


def row(step, **more):
    return {
        "step": step,
        "reward_mean": 0.25 * step,
        "step_s": 90.0 + 10 * step,
        "response_length_mean": 812.4,
        "tokens_per_s_per_device": 12345.6,
        **more,
    }


def config(folder, steps):
    return Config(run={"name": "night", "output": str(folder)}, train={"steps": steps})


@pytest.mark.parametrize(("steps", "left"), [(3, "0:00"), (4, "1:40"), (40, "1:01:40"), (1000, "27:41:40")])
def test_a_line_says_where_training_is_and_how_long_the_rest_takes_at_the_mean_so_far(steps, left):
    """90, 100 and 110 s: 100 s a step."""
    told = step_text([row(0), row(1), row(2)], steps)
    assert told.strip() == f"3/{steps:,} steps  reward 0.500  12,346 tokens/s/device  {left} left"


class Server:
    """Takes the artifacts as Prefect's client would send them."""

    def __init__(self, monkeypatch):
        self.bars = []
        self.texts = []
        self.asked = threading.Event()
        self.away = False
        monkeypatch.setattr(train, "create_progress_artifact", self.create)
        monkeypatch.setattr(train, "update_progress_artifact", self.update)

    def create(self, percent, **_):
        self.asked.set()
        if self.away:
            raise httpx.ConnectError("refused")
        assert percent == 0.0
        return "bar"

    def update(self, bar, percent, description):
        self.bars.append((bar, percent))
        self.texts.append(description)


def test_a_hundred_quick_steps_are_few_updates_and_the_last_one_is_told(tmp_path, monkeypatch):
    server = Server(monkeypatch)
    with TrainingProgress(config(tmp_path, 100)) as tell:
        assert server.asked.wait(30)
        for step in range(100):
            tell(row(step))
            time.sleep(0.002)  # it could be told of each
    assert 1 <= len(server.bars) <= 3  # at the start, and at the end: ten seconds are not over
    assert server.bars[-1] == ("bar", 100.0)
    assert server.texts[-1].startswith("100/100 steps  reward 24.750  ")
    assert f"`metronome watch {tmp_path}/night` on " in server.texts[-1]


def test_while_it_goes_on_it_is_told_at_the_pace_and_not_without_news(tmp_path, monkeypatch):
    server = Server(monkeypatch)
    monkeypatch.setattr(train, "UPDATE_S", 0.05)
    with TrainingProgress(config(tmp_path, 4)) as tell:
        for number in range(1, 4):
            tell(row(number - 1))
            deadline = time.monotonic() + 30
            while len(server.bars) < number:
                assert time.monotonic() < deadline, f"waited 30 s for update {number}"
                time.sleep(0.01)
        time.sleep(0.3)  # several paces without a new line
    assert [percent for _, percent in server.bars] == [25.0, 50.0, 75.0]


def test_a_server_that_is_away_holds_up_nothing_and_is_said(tmp_path, monkeypatch, capsys):
    server = Server(monkeypatch)
    server.away = True
    with TrainingProgress(config(tmp_path, 100)) as tell:
        for step in range(100):
            tell(row(step))
    assert not server.bars
    assert server.asked.is_set()
    assert "the Prefect server does not take the progress: ConnectError: refused" in capsys.readouterr().out
