"""Ports of loopback that no process listens on.

They lie below those that the system gives to whoever asks for any and to outgoing connections, which beside other
tests come and go by the hundred: one of these may be taken before its server starts.
"""

import random
import socket
from contextlib import ExitStack

PORTS = range(20_000, 30_000)


def free_port(count=1):
    """A free port with `count` - 1 free ones after it."""
    for port in random.SystemRandom().sample(PORTS, 100):  # tests may have seeded `random` alike
        try:
            with ExitStack() as sockets:
                for number in range(port, port + count):
                    sockets.enter_context(socket.socket()).bind(("127.0.0.1", number))
        except OSError:
            continue
        return port
    raise AssertionError(f"100 ports tried, and none was the first of {count} free ones")


def two_neighbours():
    """The first of two free ports: the nodes meet at the one, the orchestrator's server takes the next."""
    return free_port(2)
