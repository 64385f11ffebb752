"""An environment of OpenEnv: count on from `seed`. `python openenv_environment.py PORT_FILE`."""

import socket
import sys
from pathlib import Path

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    """What is said."""

    text: str


class Heard(Observation):
    """What was said last."""

    last: int


class Counting(Environment):
    """Three right numbers end an episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.last = 0
        self.right = 0

    def reset(self, seed=None, episode_id=None, **_):
        self.last = seed or 0
        self.right = 0
        return Heard(last=self.last)

    def step(self, action, timeout_s=None, **_):
        good = action.text == str(self.last + 1)
        self.last += good
        self.right += good
        return Heard(last=self.last, reward=float(good), done=self.right == 3)

    @property
    def state(self):
        return State(step_count=self.right)


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Counting, Said, Heard, max_concurrent_envs=64)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    Path(sys.argv[1]).write_text(str(listener.getsockname()[1]))
    server.run(sockets=[listener])
