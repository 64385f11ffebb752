"""Ports of loopback for runs on several nodes."""

import random
import socket
from contextlib import ExitStack


def two_neighbours():
    """A free port with a free one after it: the nodes meet at the one, the orchestrator's server takes the next.

    Below those that the system gives to outgoing connections, which beside other tests come and go by the hundred.
    """
    for port in random.sample(range(20_000, 30_000), 100):
        try:
            with ExitStack() as both:
                for number in (port, port + 1):
                    both.enter_context(socket.socket()).bind(("127.0.0.1", number))
        except OSError:
            continue
        return port
    raise AssertionError("100 ports tried, and none was free with the one after it")


def free_port():
    """A port of loopback on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
