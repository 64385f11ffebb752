"""The hashes of the packages in constraints.txt: `make hashes`, and tests/contract/test_hashes.py.

They are read from the package index (support/index.py), for every file that a container may install: wheels for
Python 3.11 and 3.12 on x86-64 and aarch64, and the source where one of these four has no wheel. Two files have them, in
pip's format: what the package with the extra `team` needs, which every image has, and the rest, which only tests need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.utils import canonicalize_name

from support import index, pins
from support.index import MACHINES, File
from support.runs import ROOT

FOLDER = ROOT / "infra/packages"
IMAGES = FOLDER / "images.txt"
TESTS = FOLDER / "tests.txt"
LIST = pins.PackageList(("constraints.txt",), extras=("team",))
HEAD = """# {what} The versions are those of constraints.txt.
# Written by `make hashes`; do not edit.
#   pip install --require-hashes --no-deps --requirement {path}
"""
WHAT = {
    IMAGES: "What the package with the extra `team` needs, without CUDA's packages. Each image installs it.",
    TESTS: "The other packages of constraints.txt, which only tests need.",
}
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def needed() -> set[str]:
    """Names of the packages that the package with the extra `team` needs, on any machine."""
    found: set[str] = set()
    known = pins.load()
    for machine in MACHINES:
        have = pins.pins(LIST, machine)
        edges = pins._wanted(LIST, machine, have, pins.asks(known, machine))
        reached = ["metronome"]
        for name in reached:
            asked = {canonicalize_name(wanted.name) for asking, wanted in edges if asking == name}
            reached += sorted(asked & have.keys() - set(reached))
        found |= set(reached[1:])
    return found


def read(versions: Mapping[str, str]) -> dict[str, list[str]]:
    """SHA-256 of the files of each package at its version, by name. Raises RuntimeError if a package has none."""
    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(lambda name: (name, _hashes(name, versions[name])), sorted(versions)))


def _hashes(name: str, version: str) -> list[str]:
    found = {one["hashes"]["sha256"] for one in chosen(index.files(name), version)}
    if not found:
        raise RuntimeError(f"{name}=={version}: the index has no file for {', '.join(map(str, MACHINES))}")
    return sorted(found)


def chosen(files: Iterable[File], version: str) -> list[File]:
    """The files that some machine may install: wheels that fit it, or the source if none does."""
    files = list(files)
    sources = [file for file in files if file["filename"].endswith(f"-{version}.tar.gz")]
    return [file for machine in MACHINES for file in index.fitting(files, version, machine) or sources]


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
    versions = pins.pins(LIST, MACHINES[0])
    save(versions, read(versions))
    print(f"{len(lines(IMAGES))} packages in {IMAGES.name}, {len(lines(TESTS))} in {TESTS.name}")


if __name__ == "__main__":
    main()
