"""Encryption of the control channel between nodes (CurveZMQ). The server refuses peers that do not know its key."""

from __future__ import annotations

import os
from dataclasses import dataclass

import zmq

CONTROL_KEY = "METRONOME_CONTROL_KEY"
"""Environment variable of ranks with the server's public key; unset for a local channel, which is not encrypted."""


@dataclass(frozen=True)
class Keys:
    """The server's key pair. Each start of a launcher makes a new one."""

    public: str
    secret: str


def make_keys() -> Keys:
    """Return a new key pair."""
    public, secret = zmq.curve_keypair()
    return Keys(public.decode(), secret.decode())


def guard_server(socket: zmq.Socket, keys: Keys) -> None:
    """Accept only peers that know the server's public key, which is therefore kept secret."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_publickey = keys.public.encode()


def guard_client(socket: zmq.Socket) -> None:
    """Encrypt for the server whose public key is in the environment; without a key leave the socket unencrypted."""
    if key := os.environ.get(CONTROL_KEY):
        public, secret = zmq.curve_keypair()
        socket.curve_serverkey = key.encode()
        socket.curve_publickey = public
        socket.curve_secretkey = secret
