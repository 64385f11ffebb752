"""Models and datasets by their names on the hub, from a server that speaks its API."""

import json

import pytest

from engine.data.hub import is_model_name
from support.hub_server import TOKEN, at_hub, hub_server
from support.runs import ROOT

FETCH = """
import json, sys
from engine.data.hub import fetch_model
from engine.errors import BadInput
for name in sys.argv[1:]:
    try:
        print(fetch_model(name))
    except BadInput as error:
        print(error)
"""
READ = """
import json, sys
from engine.data.problems import read_problems
from engine.errors import BadInput
for name in sys.argv[1:]:
    try:
        found = read_problems(name)
        print(found.source, *(row.answer for row in found.rows))
    except BadInput as error:
        print(error)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The quickstart's, and what must not be downloaded."""
    folder = tmp_path_factory.mktemp("model")
    for path in (ROOT / "data/quickstart_model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


@pytest.fixture
def hub():
    with hub_server() as hub:
        yield hub


def lines(hub, cache, code, *names, **variables):
    status, printed, errors = at_hub(hub, cache, "-c", code, *names, **variables)
    assert status == 0, errors
    return printed.splitlines()


def test_a_model_is_downloaded_and_then_read_from_the_cache(hub, model, tmp_path):
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    commit = hub.put("models", "team/tiny", files)
    (folder,) = lines(hub, tmp_path, FETCH, "team/tiny")
    assert folder == str(tmp_path / "hub" / "models--team--tiny" / "snapshots" / commit)
    there = {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
    assert there == {name: content for name, content in files.items() if name != "pytorch_model.bin"}
    hub.requests.clear()
    assert lines(hub, tmp_path, FETCH, "team/tiny", HF_HUB_OFFLINE="1") == [folder]
    assert not hub.requests


def test_a_revision_is_a_tag_or_a_commit_and_why_a_model_cannot_be_had(hub, model, tmp_path):
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    old = hub.put("models", "team/tiny", files, "v1")
    new = hub.put("models", "team/tiny", {**files, "notes.txt": b"new"})
    hub.put("models", "team/pickled", {"config.json": b"{}", "pytorch_model.bin": b"", "onnx/a.safetensors": b""})
    hub.put("models", "team/bare", {"model.safetensors": b""})
    hub.put("models", "team/gated", files)
    hub.gated.add("team/gated")
    names = ["team/gone", "team/tiny@v9", "team/pickled", "team/bare", "team/gated"]
    *found, by_tag, by_commit, newest = lines(
        hub, tmp_path, FETCH, *names, "team/tiny@v1", f"team/tiny@{old}", "team/tiny"
    )
    assert (by_tag[-40:], by_commit[-40:], newest[-40:]) == (old, old, new)
    assert found == [
        f"model team/gone: no such file or folder here, and the Hugging Face hub has no {hub.url}/team/gone; check the "
        "name, or log in with `hf auth login` or set HF_TOKEN if it is private",
        "model team/tiny@v9: the hub has no revision v9 of it; give a branch, a tag or a commit of "
        f"{hub.url}/team/tiny",
        "model team/pickled: it has no *.safetensors on the hub; expected config.json, tokenizer files and "
        "*.safetensors (other weight formats are not read, pickle is unsafe)",
        "model team/bare: it has no config.json on the hub; expected config.json, tokenizer files and *.safetensors "
        "(other weight formats are not read, pickle is unsafe)",
        f"model team/gated: it is gated: accept its terms at {hub.url}/team/gated, then log in with `hf auth login` or "
        "set HF_TOKEN",
    ]
    (folder,) = lines(hub, tmp_path, FETCH, "team/gated", HF_TOKEN=TOKEN)
    assert (tmp_path / folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    (offline,) = lines(hub, tmp_path / "empty", FETCH, "team/tiny", HF_HUB_OFFLINE="1")
    assert f"HF_HUB_OFFLINE is set, and the cache {tmp_path}/empty/hub does not have it" in offline
    (away,) = lines(hub, tmp_path, FETCH, "team/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert "the Hugging Face hub can't be reached for http://127.0.0.1:9/team/tiny" in away
    assert "set HF_HUB_OFFLINE=1 if it is in the cache" in away


def test_what_reads_as_a_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_model_name("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert is_model_name("owner/name@refs/pr/1")
    assert not any(map(is_model_name, ["name", "/a/b", "../a", "a/b/c", "s3://a/b", "data/nothere"]))
    (tmp_path / "runs").mkdir()
    assert not is_model_name("runs/nothere"), "most likely a run whose name is wrong"


CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: socratic
  data_files:
  - {split: test, path: socratic/test.jsonl}
---
"""


def rows(*answers):
    return "".join(json.dumps({"problem": f"The answer is {one}?", "answer": one}) + "\n" for one in answers).encode()


def test_datasets_by_config_split_and_revision(hub, tmp_path):
    several = {
        "README.md": CARD,
        "main/train.jsonl": rows("1", "2"),
        "main/test.jsonl": rows("3"),
        "socratic/test.jsonl": rows("4"),
    }
    old = hub.put("datasets", "open/sums", {**several, "main/test.jsonl": rows("5")}, "v1")
    new = hub.put("datasets", "open/sums", several)
    odd = {"README.md": CARD.replace(b"config_name: main", b"config_name: plain"), **dict(list(several.items())[1:])}
    hub.put("datasets", "open/odd", odd)
    hub.put("datasets", "open/gated", several)
    hub.gated.add("open/gated")
    plain = hub.put("datasets", "open/plain", {"train.jsonl": rows("6")})
    names = {
        "open/sums": f"open/sums:main/train@{new} 1 2",
        "open/sums:test": f"open/sums:main/test@{new} 3",
        "open/sums:socratic/test": f"open/sums:socratic/test@{new} 4",
        "open/sums:test@v1": f"open/sums:main/test@{old} 5",
        "open/plain": f"open/plain:train@{plain} 6",
        "open/sums:dev": "problem set open/sums:dev: the dataset has no split dev; it has train, test: give "
        "open/sums:SPLIT",
        "open/sums:test@v9": "problem set open/sums:test@v9: the hub has no revision v9 of it; give a branch, a tag or "
        f"a commit of {hub.url}/datasets/open/sums",
        "open/sums:other/test": "problem set open/sums:other/test: the dataset has no config other; give one of main, "
        "socratic as open/sums:CONFIG/SPLIT",
        "open/odd:test": "problem set open/odd:test: the dataset has several configs; give one of plain, socratic as "
        "open/odd:CONFIG/SPLIT",
        "open/gated": f"problem set open/gated: it is gated: accept its terms at {hub.url}/datasets/open/gated, then "
        "log in with `hf auth login` or set HF_TOKEN",
        "open/gone": f"problem set open/gone: no such file or folder here, and the Hugging Face hub has no "
        f"{hub.url}/datasets/open/gone; check the name, or log in with `hf auth login` or set HF_TOKEN if it is "
        "private",
    }
    assert dict(zip(names, lines(hub, tmp_path, READ, *names), strict=True)) == names
    lines(hub, tmp_path, READ, "open/sums:socratic/test@v1")  # what is cached last is not the default
    hub.requests.clear()
    cached = [f"open/sums:test@{new}", "open/plain", "open/sums:test@v1"]
    found = lines(hub, tmp_path, READ, *cached, HF_HUB_OFFLINE="1")
    assert not hub.requests
    assert found == [
        f"problem set open/sums:test@{new}: commit {new} of it is wanted, the cache only has {old}, and the hub gives "
        "no other now; read it once where the hub can be reached and without HF_HUB_OFFLINE",
        f"open/plain:train@{plain} 6",
        f"open/sums:main/test@{old} 5",
    ]
