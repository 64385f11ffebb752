"""A TCP proxy in front of an HTTP server (S3, Prefect) that spoils requests: a real connection that is cut, a real
answer of 500."""

import re
import socket
import threading
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest
import s3fs

from support.s3_server import s3_server

FAULTS = ("refuse", "cut", "cut body", "lose answer")
"""refuse: 500 instead of passing it on. cut: the connection ends before the request is passed on. cut body: after half
of it is. lose answer: after the endpoint has done it."""
FORBID = "forbid"
"""403 instead of passing it on, which clients do not ask again."""


class S3Proxy:
    """Passes HTTP requests on, one connection for each, and spoils those that it is told to."""

    def __init__(self, host, port):
        """The endpoint to pass on to."""
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests = []
        """First lines of the requests since `spoil`, without the HTTP version."""
        self._first = 0
        self._last = -1
        self._fault = ""
        self._only = ""
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def spoil(self, fault, first, last=10**9, only=""):
        """Spoil the requests number `first` to `last`, counted from 0 from now on; `only`: those whose first line
        begins as this pattern are counted, and no others."""
        with self._lock:
            self.requests = []
            self._only = only
            self._fault = fault
            self._first = first
            self._last = last

    def heal(self):
        """Pass everything on."""
        self.spoil("", 0, -1)

    def close(self):
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with suppress(OSError), client:
            head, body, missing = _read_head(client)
            if not head:
                return
            fault = self._fault_of(head)
            if b"100-continue" in head.lower() and fault != "cut":
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            if fault == "cut":
                return
            body = _read_chunks(client, body) if _is_chunked(head) else body + _read(client, missing)
            if fault in ("refuse", FORBID):
                status = b"500 Internal Server Error" if fault == "refuse" else b"403 Forbidden"
                client.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            self._pass_on(client, _one_request(head), body, fault)

    def _fault_of(self, head):
        with self._lock:
            line = " ".join(head.split(b"\r\n")[0].decode().split()[:2])
            if not re.match(self._only, line):
                return ""
            number = len(self.requests)
            self.requests.append(line)
            return self._fault if self._first <= number <= self._last else ""

    def _pass_on(self, client, head, body, fault):
        with socket.create_connection(self._target, timeout=30) as server:
            if fault == "cut body":
                server.sendall(head + body[: len(body) // 2])
                return
            server.sendall(head + body)
            answer = b"".join(iter(lambda: server.recv(65536), b""))
        if fault != "lose answer":
            client.sendall(answer)


def _read_head(client):
    """(head, what has come of the body, bytes that are missing of it)."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        if not part:
            return b"", b"", 0
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [
        int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
    ]
    return head + b"\r\n\r\n", body, sum(lengths) - len(body)


def _read(client, count):
    data = b""
    while len(data) < count and (part := client.recv(65536)):
        data += part
    return data


def _is_chunked(head):
    return b"transfer-encoding: chunked" in head.lower()


def _read_chunks(client, data):
    """A body in chunks as it comes: the last one is empty."""
    while not (data == b"0\r\n\r\n" or data.endswith(b"\r\n0\r\n\r\n")) and (part := client.recv(65536)):
        data += part
    return data


def _one_request(head):
    """The head with `Connection: close`, so that the answer ends with the connection."""
    lines = [
        line
        for line in head.rstrip(b"\r\n").split(b"\r\n")
        if not line.lower().startswith((b"connection:", b"expect:"))
    ]
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n"


@contextmanager
def s3_proxy(host, port):
    proxy = S3Proxy(host, port)
    try:
        yield proxy
    finally:
        proxy.close()


@contextmanager
def proxied_s3():
    """An S3 server behind a proxy, whose `behind` is the server's own address. AWS_ENDPOINT_URL leads to the proxy, and
    no client tries a request a second time."""
    with s3_server() as address, pytest.MonkeyPatch.context() as patch:
        there = urlsplit(address)
        with s3_proxy(there.hostname, there.port) as running:
            running.behind = address
            patch.setenv("AWS_ENDPOINT_URL", running.url)
            patch.setenv("AWS_MAX_ATTEMPTS", "1")
            patch.setattr(s3fs.S3FileSystem, "retries", 1)
            yield running
