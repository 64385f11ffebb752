"""The link between orchestrator and guest: a proxy process that passes bytes on, late, or not, or spoils replies.

`python -m chaos.link LISTEN=TARGET ... [--replace OLD=NEW]`. Reads its mode from standard input, one a line, and ends
when that closes; to "count" it says how many replies it has spoiled. A leading `!` on a pair marks one whose clients
are the guest's.
"""

import argparse
import asyncio
import contextlib
import sys
from dataclasses import dataclass

DELAY_S = 0.5
LOOK_S = 0.02
SPOILED = 3
"""Replies to /v1/completions that are spoiled once that was asked for."""
GARBAGE = (
    b"<html><body>It works!</body></html>",
    b'{"choices": [{"token_ids": [-7, 99999999], "logprobs": {"token_logprobs": [NaN, 1.5]}}]}',
    b"\x00\xff" * 200,
    b'{"choices": [], "weight_versions": []}',
)
"""Bodies of an answer of 200 that are no reply."""


@dataclass
class State:
    """What is done to the bytes."""

    mode: str = "pass"
    replace: tuple[bytes, bytes] = (b"", b"")
    spoil: str = ""
    """How the next replies are spoiled: "flip FRACTION" or "garbage FRACTION"."""
    left: int = 0
    spoiled: int = 0

    def set(self, line: str) -> None:
        """A line of standard input."""
        if line == "count":
            print(self.spoiled, flush=True)
        elif line.startswith(("flip", "garbage")):
            self.spoil = line
            self.left = SPOILED
        else:
            self.mode = line

    def holds(self, to_guest: bool) -> bool:
        """Whether bytes in this direction are held."""
        return self.mode in ("hold both ways", "hold to the guest" if to_guest else "hold from the guest")


class Connection:
    """One connection of a client, and one to the target."""

    def __init__(self, state: State, clients_are_guests: bool) -> None:
        self._state = state
        self._guests = clients_are_guests
        self._route = b""

    async def serve(self, target, reader, writer) -> None:
        """Until either side closes."""
        host, _, port = target.rpartition(":")
        try:
            while self._state.holds(to_guest=not self._guests):
                await asyncio.sleep(LOOK_S)
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        forth = asyncio.create_task(self._pass(reader, back, to_guest=not self._guests, replies=False))
        answers = asyncio.create_task(self._pass(there, writer, to_guest=self._guests, replies=True))
        await asyncio.wait((forth, answers), return_when=asyncio.FIRST_COMPLETED)
        for task, end in ((forth, writer), (answers, back)):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await task
            end.close()

    async def _pass(self, source, sink, to_guest: bool, replies: bool) -> None:
        """Each piece goes on when its time has come; a piece is read while others wait."""
        waiting: asyncio.Queue = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def read() -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    waiting.put_nowait((loop.time(), data))
            waiting.put_nowait((loop.time(), b""))

        reading = asyncio.create_task(read())
        try:
            while True:
                came, data = await waiting.get()
                while self._state.holds(to_guest) or (self._state.mode == "delay" and loop.time() < came + DELAY_S):
                    await asyncio.sleep(LOOK_S)
                if not data:
                    return
                sink.write(self._reply(data) if replies else self._request(data))
                await sink.drain()
        except OSError:
            return
        finally:
            reading.cancel()

    def _request(self, data: bytes) -> bytes:
        if data.startswith((b"POST ", b"GET ")):
            self._route = data.split(b" ", 2)[1]
        old, new = self._state.replace
        return data.replace(old, new) if old else data

    def _reply(self, data: bytes) -> bytes:
        state = self._state
        if not state.left or self._route != b"/v1/completions":
            return data
        what, _, where = state.spoil.partition(" ")
        head, end, body = data.partition(b"\r\n\r\n") if data.startswith(b"HTTP/") else (b"", b"", data)
        if not body:
            return data
        state.left -= 1
        state.spoiled += 1
        if what == "flip":
            at = int(float(where) * len(body))
            return head + end + body[:at] + bytes([body[at] ^ 1 << at % 8]) + body[at + 1 :]
        if not head:
            return data
        garbage = GARBAGE[int(float(where) * len(GARBAGE) + state.spoiled) % len(GARBAGE)]
        return (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
            + str(len(garbage)).encode()
            + b"\r\nConnection: close\r\n\r\n"
            + garbage
        )


async def main() -> None:
    """Until standard input closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="+")
    parser.add_argument("--replace", default="=")
    arguments = parser.parse_args()
    old, _, new = arguments.replace.partition("=")
    state = State(replace=(old.encode(), new.encode()))
    for pair in arguments.pairs:
        listen, _, target = pair.removeprefix("!").partition("=")
        host, _, port = listen.rpartition(":")

        guests = pair.startswith("!")

        def serve(reader, writer, target=target, guests=guests):
            return Connection(state, guests).serve(target, reader, writer)

        await asyncio.start_server(serve, host, int(port))
    print("serves", flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        state.set(line.decode().strip())


if __name__ == "__main__":
    asyncio.run(main())
