"""What the engine takes from Megatron is in the newest megatron-core too (CONTRIBUTING.md, "Newer releases")."""

import ast
import importlib
import json
import os
import subprocess
import sys

import pytest

from support.runs import ROOT

NEWEST = "0.19.2"
NEEDS = "triton==3.7.1"
"""megatron-core 0.19 imports it on every platform, and asks for it nowhere; torch's build for CPUs brings none."""
PIP = (
    sys.executable,
    "-m",
    "pip",
    "install",
    "--quiet",
    "--no-deps",
    "--ignore-requires-python",
    "--only-binary=:all:",
)

IMPORT = """
import dataclasses, importlib, json, sys, warnings
warnings.simplefilter("ignore")
wanted, fields, late = json.load(sys.stdin)
import megatron.core
from megatron.core.transformer.transformer_config import TransformerConfig
wrong = []
for module in [*wanted, *late]:
    try:
        found = importlib.import_module(module)
    except Exception as error:
        wrong.append(f"{module}: {error!r}")
        continue
    for name in wanted.get(module, ()):
        try:
            hasattr(found, name) or importlib.import_module(f"{module}.{name}")
        except ImportError:
            wrong.append(f"{module} has no {name}")
known = {field.name for field in dataclasses.fields(TransformerConfig)}
wrong += [f"TransformerConfig has no {name}" for name in fields if name not in known]
print(json.dumps([megatron.core.__version__, wrong]))
"""


def trees():
    return [ast.parse(path.read_text()) for path in (ROOT / "engine").rglob("*.py")]


def wanted():
    """Names that the engine imports, by module of Megatron."""
    found = {}
    for node in (node for tree in trees() for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return {module: sorted(names) for module, names in found.items()}


def fields():
    """Fields of TransformerConfig that the engine sets."""
    found = set()
    build = ast.parse((ROOT / "engine/model/build.py").read_text())
    for call in (node for node in ast.walk(build) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "TransformerConfig":
            found |= {keyword.arg for keyword in call.keywords if keyword.arg}
    families = ast.parse((ROOT / "engine/model/families.py").read_text())
    for function in (node for node in ast.walk(families) if isinstance(node, ast.FunctionDef)):
        if function.name in ("transformer_settings", "_mixture"):
            dicts = [node for node in ast.walk(function) if isinstance(node, ast.Dict)]
            found |= {key.value for each in dicts for key in each.keys if key}
    found |= {
        name
        for family in importlib.import_module("engine.model.families").FAMILIES.values()
        for name in family.settings
    }
    return sorted(found)


def answer(folder):
    """The version in a folder, and what it lacks."""
    late = [f"megatron.core.{name}" for name in importlib.import_module("engine.platform.host_view").LAZY]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        input=json.dumps([wanted(), fields(), late]),
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_pinned_release_has_what_is_asked_for(tmp_path):
    assert len(wanted()) > 20
    assert len(fields()) > 40
    _, wrong = answer(tmp_path)
    assert wrong == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_newest_release_has_it_too(tmp_path):
    """Its wheel asks for Python 3.12, and 3.11 imports it all the same."""
    for options in (("--python-version=3.12", f"megatron-core=={NEWEST}"), (NEEDS,)):
        done = subprocess.run([*PIP, f"--target={tmp_path}", *options], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip can't install {options[-1]}: {done.stderr[-500:]}")
    version, wrong = answer(tmp_path)
    assert (version, wrong) == (NEWEST, [])
