"""The proxy between orchestrator and guest, with real sockets: what it does to bytes in each mode."""

import socket
import socketserver
import subprocess
import sys
import threading
import time

import pytest

from chaos.link import SPOILED
from support.ports import free_port
from support.runs import ROOT, wait_for

REQUEST = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
BODY = b'{"choices": [{"token_ids": [1, 2, 3]}]}'
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
QUICK_S = 0.3


class Answers(socketserver.BaseRequestHandler):
    """Answers every piece that comes with REPLY, and keeps what came."""

    def handle(self):
        while data := self.request.recv(65536):
            self.server.came.append(data)
            self.request.sendall(REPLY)


@pytest.fixture
def target():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        server.came = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def link(target):
    """(tells the link its mode, a connection through it, reads a line that it says)."""
    port = free_port()
    pair = f"127.0.0.1:{port}=127.0.0.1:{target.server_address[1]}"
    command = [sys.executable, "-m", "chaos.link", pair]
    process = subprocess.Popen(command, cwd=ROOT / "tests", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "serves\n"

    def tell(mode):
        process.stdin.write(f"{mode}\n")
        process.stdin.flush()
        time.sleep(0.1)

    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        yield tell, connection, process.stdout.readline
    process.stdin.close()
    assert process.wait(10) == 0  # it ends with the one who holds its standard input


def answered(connection, within_s):
    """What comes back within the time; b"" if nothing does."""
    connection.settimeout(within_s)
    try:
        return connection.recv(65536)
    except TimeoutError:
        return b""


@pytest.mark.parametrize(
    ("mode", "arrives"), [("hold to the guest", False), ("hold from the guest", True), ("hold both ways", False)]
)
def test_a_link_that_holds_goes_on_when_it_heals(link, target, mode, arrives):
    tell, connection, _ = link
    connection.sendall(b"first")
    assert answered(connection, 5) == REPLY
    tell(mode)
    connection.sendall(REQUEST)
    assert answered(connection, QUICK_S) == b""
    assert (REQUEST in target.came) == arrives
    tell("pass")
    wait_for(lambda: REQUEST in target.came, "the request", 5)
    assert answered(connection, 5) == REPLY


def test_one_bit_of_some_replies_is_flipped_and_they_are_counted(link):
    tell, connection, said = link
    tell("flip 0.5")
    different = []
    for _ in range(SPOILED + 1):
        connection.sendall(REQUEST)
        reply = answered(connection, 5)
        different.append(sum(bin(a ^ b).count("1") for a, b in zip(reply, REPLY, strict=True)))
    assert different == [1] * SPOILED + [0]
    tell("count")
    assert said() == f"{SPOILED}\n"
