"""What a cached result depends on beside a task's inputs: the engine's own code."""

from __future__ import annotations

import hashlib

from engine.recipe import HOME


def code_hash(*packages: str) -> str:
    """Hash (hex) of the source of some packages of engine/, for example "data"."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted((HOME / "engine" / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
