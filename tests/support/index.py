"""The package index that pip is configured for: files of a package, the wheel that a machine takes, what it asks for.

The index is asked by its own protocol (PEP 691), and of a wheel only its METADATA is read, by ranges of bytes. So what
else pip is configured for (folders of wheels, constraints, more indexes) plays no part.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email import message_from_bytes
from functools import cache
from typing import Any
from urllib.parse import urljoin

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

GLIBC = 35
"""Minor version of glibc 2 up to which wheels are taken: Ubuntu 22.04 has 2.35."""
OLD = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
BLOCK = 1 << 18
"""Bytes that are read at once: the directory and METADATA of most wheels are in the last so many."""

File = Mapping[str, Any]
"""A file of a package as the index describes it (PEP 691)."""


@dataclass(frozen=True)
class Machine:
    """Linux with CPython, where packages are installed."""

    python: str
    architecture: str

    def __str__(self) -> str:
        return f"{self.python} {self.architecture}"

    def markers(self) -> dict[str, str]:
        """What requirements with a marker are evaluated with."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.9",
            "platform_machine": self.architecture,
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }


MACHINES = tuple(Machine(python, one) for python in ("3.11", "3.12") for one in ("x86_64", "aarch64"))


@cache
def _ranks(machine: Machine) -> dict[Tag, int]:
    """The tags of wheels that a machine installs: the lower the number, the rather."""
    platforms = []
    for minor in range(GLIBC, 4, -1):
        platforms += [f"{kind}_{machine.architecture}" for kind in (f"manylinux_2_{minor}", OLD.get(minor)) if kind]
    platforms.append(f"linux_{machine.architecture}")
    major, minor = map(int, machine.python.split("."))
    tags = [*cpython_tags((major, minor), [f"cp{major}{minor}"], platforms)]
    tags += compatible_tags((major, minor), f"cp{major}{minor}", platforms)
    return {tag: rank for rank, tag in reversed([*enumerate(tags)])}


@cache
def _wheel(name: str) -> tuple[str, frozenset[Tag]]:
    """Version and tags; no tags if it is no wheel."""
    try:
        _, version, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename:
        return "", frozenset()
    return str(version), tags


def fitting(files: Iterable[File], version: str, machine: Machine) -> list[File]:
    """The wheels of a version that a machine can install, the one that pip takes first."""
    ranked = []
    for file in files:
        its, tags = _wheel(file["filename"])
        ranks = [_ranks(machine)[tag] for tag in tags if tag in _ranks(machine)]
        if its == version and ranks and _runs(file, machine):
            ranked.append((min(ranks), file))
    return [file for _, file in sorted(ranked, key=lambda one: one[0])]


def _runs(file: File, machine: Machine) -> bool:
    return SpecifierSet(file.get("requires-python") or "").contains(machine.markers()["python_full_version"])


@cache
def _address() -> str:
    """Address of the index, as pip's own help says it."""
    command = [sys.executable, "-m", "pip", "download", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("--index-url")[2]
    found = re.search(r"\(default\s+(\S+)\)", said)
    assert found, "pip does not say which index it is configured for"
    return found[1].rstrip("/")


@cache
def files(name: str) -> list[File]:
    """All files of a package; none if the index does not have it."""
    page = f"{_address()}/{name}/"
    request = urllib.request.Request(page, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            found = json.load(reply)["files"]
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return []
    return [file | {"url": urljoin(page, file["url"])} for file in found]


@cache
def requirements(url: str, size: int) -> list[str]:
    """Requires-Dist of the wheel of so many bytes."""
    with zipfile.ZipFile(io.BufferedReader(Remote(url, size), BLOCK)) as wheel:
        (path,) = [name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        return message_from_bytes(wheel.read(path)).get_all("Requires-Dist", [])


class Remote(io.RawIOBase):
    """A file of the index, of which only what is asked for is fetched."""

    def __init__(self, url: str, size: int) -> None:
        self._url = url
        self._size = size
        self._at = 0
        self._tail = self._fetch(max(0, size - BLOCK), size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        end = min(self._at + len(buffer), self._size)
        if self._at >= end:
            return 0
        tail = self._size - len(self._tail)
        data = self._tail[self._at - tail : end - tail] if self._at >= tail else self._fetch(self._at, end)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _fetch(self, start: int, end: int) -> bytes:
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={start}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            if reply.status != 206:
                raise RuntimeError("the package index sends whole files only, and a range of bytes was asked for")
            return reply.read()
