"""Encryption of the control channel where it leaves the node (CurveZMQ):
who does not know the server's key is not heard."""

from __future__ import annotations

import os
from dataclasses import dataclass

import zmq

CONTROL_KEY = "METRONOME_CONTROL_KEY"
"""Environment variable of ranks with the server's public key; unset: the channel is a local one, without keys."""


@dataclass(frozen=True)
class Keys:
    """The server's, made anew for each start of a launcher."""

    public: str
    secret: str


def make_keys() -> Keys:
    """A new pair."""
    public, secret = zmq.curve_keypair()
    return Keys(public.decode(), secret.decode())


def guard_server(socket: zmq.Socket, keys: Keys) -> None:
    """Take in only peers that know the server's public key, which therefore is kept secret."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_publickey = keys.public.encode()


def guard_client(socket: zmq.Socket) -> None:
    """Speak to the server whose key the environment has; nothing when there is none."""
    if key := os.environ.get(CONTROL_KEY):
        public, secret = zmq.curve_keypair()
        socket.curve_serverkey = key.encode()
        socket.curve_publickey = public
        socket.curve_secretkey = secret
