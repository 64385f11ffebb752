"""What a built wheel holds: everything that is found beside the code, so that it runs where there is no clone."""

import os
import subprocess
import sys
import zipfile

import pytest

from support.runs import ROOT

pytestmark = pytest.mark.slow  # pip fetches the build backend

SHIPPED = ("engine", "tasks", "flows", "infra", "data")
LOAD = """
from engine.config.recipe import HOME, load_config
print(HOME, (HOME / load_config("infra/recipes/quickstart.toml").data.train).exists())
"""


def run(*command, **more):
    """Its output; fails with it."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of what git tracks."""
    clone = tmp_path_factory.mktemp("clone")
    files = run("git", "ls-files", "-z", cwd=ROOT).rstrip("\0").split("\0")
    for name in files:
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", clone / "wheel", clone)
    (built,) = (clone / "wheel").glob("metronome-*.whl")
    return built, [name for name in files if name.startswith(SHIPPED) and (ROOT / name).is_file()]


def test_every_file_of_the_project_is_in_it(wheel):
    built, files = wheel
    there = set(zipfile.ZipFile(built).namelist())
    assert len(files) > 250
    assert [name for name in files if name not in there] == []


def test_recipes_and_data_are_found_without_a_clone(wheel, tmp_path):
    built, _ = wheel
    zipfile.ZipFile(built).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    found = run(sys.executable, "-c", LOAD, cwd=tmp_path, env=environment)
    assert found.split() == [str(tmp_path / "site"), "True"]
