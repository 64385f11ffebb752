"""Identifies the code that produced a result, for the task cache and for the lineage of a policy."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from importlib.metadata import version as installed
from pathlib import Path

from engine.config.recipe import HOME

OURS = ("engine", "tasks", "flows", "infra")
"""Folders of the code that runs in production, including recipes and pool templates."""


def code_hash(*packages: str) -> str:
    """Hash (hex) of the source of some packages of engine/, for example "data"."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted((HOME / "engine" / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def code_version() -> str:
    """The installed version, the git commit if there is one ("-dirty" if files differ from it), and the code's hash."""
    commit = _commit(HOME)
    return " ".join([installed("metronome"), *([f"commit {commit}"] if commit else []), f"code {tree_hash(HOME)}"])


def tree_hash(home: Path) -> str:
    """Hash (hex) of the names and contents of all files in `OURS` under a folder, except compiled Python files."""
    digest = hashlib.sha256()
    for folder in OURS:
        files = (path for path in (home / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        for path in sorted(files):
            digest.update(f"{path.relative_to(home)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _commit(home: Path) -> str:
    """The commit of a folder that is itself a git checkout; "unknown" if git fails; "" for an installed package or
    without git."""
    if not (home / ".git").exists() or shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(home), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        # to decide on "-dirty", git reads every file, which is slow on a shared disk
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except subprocess.SubprocessError:  # another user's checkout or a slow disk must not cost a policy
        return "unknown"
