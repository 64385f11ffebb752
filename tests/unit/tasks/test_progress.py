"""What the Prefect UI shows of a training, without a server: the page's figures, and how seldom it is told."""

import threading
import time

import httpx
import pytest

from engine.config import Config
from engine.run.checkpoint_files import MARKER
from engine.run.files import seal, write_json
from tasks.stages import train
from tasks.stages.train import TrainingArtifacts, steps_page


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


def cells(text):
    """The page's table as name → value."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return dict(lines)


@pytest.mark.parametrize(("steps", "left"), [(3, "0:00"), (4, "1:40"), (40, "1:01:40"), (1000, "27:41:40")])
def test_the_page_says_where_training_is_and_how_long_the_rest_takes_at_the_mean_so_far(tmp_path, steps, left):
    """90, 100 and 110 s: 100 s a step. The newest checkpoint is not complete."""
    for name, complete in (("step-000002", True), ("step-000004", True), ("step-000006", False)):
        folder = tmp_path / "night/checkpoints" / name
        folder.mkdir(parents=True)
        if complete:
            write_json(folder / MARKER, seal({"files": {}}))
    found = cells(steps_page(config(tmp_path, steps), [row(0), row(1), row(2)]))
    assert found.pop("as of")
    assert found == {
        "run": "night",
        "steps": f"3 of {steps} ({300 / steps:.1f} %)",
        "reward (last step)": "0.500",
        "reward (mean of 3 steps)": "0.250",
        "response length": "812 tokens",
        "speed": "12,346 tokens/s/device",
        "time of a step": "110.0 s",
        "time left": left,
        "last checkpoint": "step-000004",
    }


class Server:
    """Takes the artifacts as Prefect's client would send them."""

    def __init__(self, monkeypatch):
        self.bars = []
        self.pages = []
        self.asked = threading.Event()
        self.away = False
        monkeypatch.setattr(train, "create_progress_artifact", self.create)
        monkeypatch.setattr(train, "update_progress_artifact", lambda bar, percent: self.bars.append((bar, percent)))
        monkeypatch.setattr(train, "create_link_artifact", lambda address, **_: address)
        monkeypatch.setattr(train, "create_markdown_artifact", lambda text, **_: self.pages.append(text))

    def create(self, percent, **_):
        self.asked.set()
        if self.away:
            raise httpx.ConnectError("refused")
        assert percent == 0.0
        return "bar"


def test_a_hundred_quick_steps_are_few_updates_and_the_last_one_is_told(tmp_path, monkeypatch):
    server = Server(monkeypatch)
    with TrainingArtifacts(config(tmp_path, 100)) as tell:
        assert server.asked.wait(30)
        for step in range(100):
            tell(row(step))
            time.sleep(0.002)  # it could be told of each
    assert 1 <= len(server.pages) == len(server.bars) <= 3  # at the start, and at the end: ten seconds are not over
    assert server.bars[-1] == ("bar", 100.0)
    assert "100 of 100" in server.pages[-1]


def test_while_it_goes_on_it_is_told_at_the_pace_and_not_without_news(tmp_path, monkeypatch):
    server = Server(monkeypatch)
    monkeypatch.setattr(train, "UPDATE_S", 0.05)
    with TrainingArtifacts(config(tmp_path, 4)) as tell:
        for number in range(1, 4):
            tell(row(number - 1))
            deadline = time.monotonic() + 30
            while len(server.pages) < number:
                assert time.monotonic() < deadline, f"waited 30 s for update {number}"
                time.sleep(0.01)
        time.sleep(0.3)  # several paces without a new line
    assert [percent for _, percent in server.bars] == [25.0, 50.0, 75.0]


def test_a_server_that_is_away_holds_up_nothing_and_is_said(tmp_path, monkeypatch, capsys):
    server = Server(monkeypatch)
    server.away = True
    with TrainingArtifacts(config(tmp_path, 100)) as tell:
        for step in range(100):
            tell(row(step))
    assert not server.pages
    assert server.asked.is_set()
    assert "the Prefect server does not take the progress: ConnectError: refused" in capsys.readouterr().out
