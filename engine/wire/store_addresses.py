"""Addresses of the TransferQueue processes. The process that hosts them writes these; the orchestrator reads them."""

from __future__ import annotations

import msgspec


class StoreServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One TransferQueue process."""

    id: str
    ip: str
    ports: dict[str, int]
    """Ports by TransferQueue's name of the socket."""
    node: str = ""
    """Ray's id of the node."""


class StoreAddresses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All TransferQueue processes."""

    controller: StoreServer
    units: tuple[StoreServer, ...]
    """The storage units, in the order in which rows are distributed over them."""


def pack_addresses(addresses: StoreAddresses) -> bytes:
    """Return the addresses as JSON."""
    return msgspec.json.encode(addresses)


def read_addresses(data: bytes) -> StoreAddresses:
    """The inverse of `pack_addresses`. Raises msgspec.ValidationError for anything else."""
    return msgspec.json.decode(data, type=StoreAddresses)
