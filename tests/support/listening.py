"""Which sockets the processes of a run listen on, looked up again and again while it runs."""

import contextlib
import ipaddress
import subprocess
import threading
import time
from dataclasses import dataclass, field

import psutil

POLL_S = 0.5


@dataclass
class Listening:
    """What was seen: (host, port) of each listening socket, and the process behind it."""

    sockets: dict[tuple[str, int], str] = field(default_factory=dict)
    processes: set[str] = field(default_factory=set)

    def look(self, root: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    name = " ".join(process.cmdline()[1:6])
                    self.processes.add(name)
                    for one in process.net_connections("inet"):
                        if one.status == psutil.CONN_LISTEN:
                            self.sockets[one.laddr.ip, one.laddr.port] = name

    @property
    def open_ones(self) -> dict[tuple[str, int], str]:
        """Those that other machines reach."""
        return {at: name for at, name in self.sockets.items() if not ipaddress.ip_address(at[0]).is_loopback}


@contextlib.contextmanager
def listening():
    """What is seen of this process and of all that it has started, while the block runs."""
    seen = Listening()
    over = threading.Event()

    def look():
        while not over.wait(POLL_S):
            seen.look(psutil.Process())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        over.set()
        looking.join()


def listening_while(command, timeout_s, **options):
    """Run a command to its end and look at its sockets meanwhile: (exit code, output, what was seen)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    seen = Listening()
    deadline = time.monotonic() + timeout_s
    root = psutil.Process(process.pid)
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{command} did not end within {timeout_s} s"
            seen.look(root)
            time.sleep(POLL_S)
        return process.returncode, process.stdout.read(), seen
    finally:
        process.kill()
        process.wait()
