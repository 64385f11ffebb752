"""The hashes of the packages in constraints.txt: `make hashes`, and tests/contract/test_hashes.py.

They are read from the package index that pip is configured for, for every file that a container may install: wheels for
Python 3.11 and 3.12 on x86-64 and aarch64, and the source where there is no such wheel. Two files have them, in pip's
format: what the package with the extra `team` needs, which is in every image, and the rest, which only tests need.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from support import pins
from support.runs import ROOT

FOLDER = ROOT / "infra/packages"
IMAGES = FOLDER / "images.txt"
TESTS = FOLDER / "tests.txt"
LIST = pins.PackageList(("constraints.txt",), extras=("team",))
PYTHONS = ((3, 11), (3, 12))
HEAD = """# {what} The versions are those of constraints.txt.
# Written by `make hashes`; do not edit.
#   pip install --require-hashes --no-deps --requirement {path}
"""
WHAT = {
    IMAGES: "What the package with the extra `team` needs, without CUDA's packages. Each image installs it.",
    TESTS: "The other packages of constraints.txt, which only tests need.",
}
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def index() -> str:
    """Address of the package index that pip is configured for, as pip's own help says it."""
    command = [sys.executable, "-m", "pip", "download", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("--index-url")[2]
    found = re.search(r"\(default\s+(\S+)\)", said)
    assert found, "pip does not say which index it is configured for"
    return found[1].rstrip("/")


def needed() -> set[str]:
    """Names of the packages that the package with the extra `team` needs, on any architecture."""
    found: set[str] = set()
    known = pins.load()
    for architecture in pins.ARCHITECTURES:
        have = pins.pins(LIST, architecture)
        edges = pins._wanted(LIST, architecture, have, dict(known["any"]) | known[architecture])
        reached = ["metronome"]
        for name in reached:
            asked = {canonicalize_name(wanted.name) for asking, wanted in edges if asking == name}
            reached += sorted(asked & have.keys() - set(reached))
        found |= set(reached[1:])
    return found


def read(versions: Mapping[str, str]) -> dict[str, list[str]]:
    """SHA-256 of the files of each package at its version, by name. Raises RuntimeError if a package has none."""
    where = index()
    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(lambda name: (name, _hashes(where, name, versions[name])), sorted(versions)))


def _hashes(where: str, name: str, version: str) -> list[str]:
    request = urllib.request.Request(f"{where}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        files = json.load(reply)["files"]
    found = {one["hashes"]["sha256"] for one in _chosen(files, version)}
    if not found:
        raise RuntimeError(f"{name}=={version}: the index has no file for {', '.join(pins.ARCHITECTURES)}")
    return sorted(found)


def _chosen(files: Iterable[Mapping[str, Any]], version: str) -> list[Mapping[str, Any]]:
    wheels: dict[str, list[Mapping[str, Any]]] = {one: [] for one in pins.ARCHITECTURES}
    sources = []
    for file in files:
        name = file["filename"]
        if name.endswith(".whl"):
            for one in _machines(name, version):
                wheels[one].append(file)
        elif name.endswith(f"-{version}.tar.gz"):
            sources.append(file)
    return [file for found in wheels.values() for file in found or sources]


def _machines(name: str, version: str) -> Iterator[str]:
    """The architectures on which a wheel may be installed."""
    try:
        _, its, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename:
        return
    if str(its) == version:
        yield from (one for one in pins.ARCHITECTURES if any(_fits(tag, one) for tag in tags))


def _fits(tag: Tag, architecture: str) -> bool:
    linux = re.fullmatch(rf"(manylinux.*|linux)_{architecture}", tag.platform)
    return bool((tag.interpreter, tag.abi) in _interpreters() and (linux or tag.platform == "any"))


@cache
def _interpreters() -> set[tuple[str, str]]:
    """Interpreter and ABI of the wheels that our Pythons install."""
    found: list[Tag] = []
    for major, minor in PYTHONS:
        found += cpython_tags((major, minor), [f"cp{major}{minor}"], ["any"])
        found += compatible_tags((major, minor), None, ["any"])
    return {(tag.interpreter, tag.abi) for tag in found}


def lines(file: Path) -> dict[str, set[str]]:
    """What a file says: the hashes by pin."""
    found = {}
    for line in file.read_text().splitlines():
        if line and not line.startswith("#"):
            pin, _, rest = line.partition(" ")
            found[pin] = set(HASH.findall(rest))
    return found


def save(versions: Mapping[str, str], hashes: Mapping[str, Iterable[str]]) -> None:
    """Write both files, a line for each package."""
    FOLDER.mkdir(exist_ok=True)
    images = needed()
    for file, names in ((IMAGES, images), (TESTS, versions.keys() - images)):
        text = HEAD.format(what=WHAT[file], path=file.relative_to(ROOT))
        for name in sorted(names):
            text += " ".join([f"{name}=={versions[name]}", *(f"--hash=sha256:{one}" for one in hashes[name])]) + "\n"
        file.write_text(text)


def main() -> None:
    """Read all hashes and write both files."""
    versions = pins.pins(LIST, pins.ARCHITECTURES[0])
    save(versions, read(versions))
    print(f"{len(lines(IMAGES))} packages in {IMAGES.name}, {len(lines(TESTS))} in {TESTS.name}")


if __name__ == "__main__":
    main()
