"""Models on a real S3 server: what is copied of them, when, and why one can't be had."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest

from engine.config.recipe import load_config
from engine.data import named_models
from engine.data.named_models import fetch_named, is_named_model, is_of_name, model_name
from engine.errors import BadInput
from engine.run.served_model import served_config
from support.commands import metronome, sets
from support.runs import ROOT
from support.s3_proxy import FORBID, proxied_s3
from tasks.commands.export import policy_folder
from tasks.stages.input_checks import with_model_folder

TINY = {path.name: path.read_bytes() for path in (ROOT / "data/quickstart_model").iterdir()}
ADDRESS = "s3://bucket/models/tiny-1.5"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def proxy():
    """In front of a server; AWS_ENDPOINT_URL leads to it, and no client tries a request a second time."""
    with proxied_s3() as running:
        running.client = boto3.client("s3", endpoint_url=running.behind)
        yield running


@pytest.fixture
def put(proxy, tmp_path, monkeypatch):
    """Writes a file of the model, which is there with a file that must not be copied; HF_HOME is empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))
    proxy.client.create_bucket(Bucket="bucket")
    for one in proxy.client.list_objects_v2(Bucket="bucket").get("Contents", ()):
        proxy.client.delete_object(Bucket="bucket", Key=one["Key"])

    def write(name, content, folder="models/tiny-1.5", **more):
        proxy.client.put_object(Bucket="bucket", Key=f"{folder}/{name}", Body=content, **more)

    for name, content in TINY.items():
        write(name, content)
    write("pytorch_model.bin", b"pickle")
    write("onnx/model.safetensors", b"other")
    proxy.heal()
    return write


def content_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def gets(proxy):
    """How often files were asked for."""
    return sum(one.startswith("GET /bucket/models/") for one in proxy.requests)


def test_a_model_is_copied_once_and_a_changed_one_into_another_folder(put, proxy, tmp_path):
    first = fetch_named(ADDRESS + "/")
    assert content_of(first) == TINY
    assert first.parent == tmp_path / "hf/metronome-s3/bucket/models"
    assert model_name(first) == f"{ADDRESS}@{first.name[-12:]}"
    assert gets(proxy) == len(TINY)

    proxy.heal()
    put("pytorch_model.bin", b"another pickle")
    put("README.md", b"not copied either")
    assert fetch_named(ADDRESS) == first
    assert gets(proxy) == 0

    put("config.json", TINY["config.json"] + b"\n")
    changed = fetch_named(ADDRESS)
    assert changed != first
    assert content_of(changed) == {**TINY, "config.json": TINY["config.json"] + b"\n"}
    assert content_of(first) == TINY
    put("config.json", TINY["config.json"])
    assert fetch_named(ADDRESS) == first

    (first / WEIGHTS).unlink()
    assert fetch_named(ADDRESS) == first
    assert content_of(first) == TINY
    assert sorted(path.name for path in first.parent.iterdir() if path.suffix != ".lock") == sorted(
        [first.name, changed.name]
    )


@pytest.mark.parametrize("fault", ["refuse", "cut", "lose answer"])
def test_a_broken_copy_is_no_model_and_the_next_one_is_whole(put, proxy, tmp_path, fault):
    proxy.spoil(fault, 0, only=f"GET /bucket/.*{WEIGHTS}")
    with pytest.raises(BadInput, match=rf"model {ADDRESS}: S3 (cannot be read|has not sent it)"):
        fetch_named(ADDRESS)
    assert [path.name for path in (tmp_path / "hf").rglob("tiny-1.5@*") if path.is_dir()] == []
    proxy.heal()
    assert content_of(fetch_named(ADDRESS)) == TINY
    assert not list((tmp_path / "hf").rglob("*.partial"))


def test_a_file_that_changes_after_the_listing_is_not_taken(put, monkeypatch):
    opened = named_models.open_s3

    def replaced_first():
        store = opened()
        get = store.get

        def get_other(*given, **more):
            put(WEIGHTS, TINY[WEIGHTS][::-1])
            return get(*given, **more)

        store.get = get_other
        return store

    monkeypatch.setattr(named_models, "open_s3", replaced_first)
    with pytest.raises(BadInput, match=rf"{ADDRESS}: {WEIGHTS} has changed on S3 since it was listed"):
        fetch_named(ADDRESS)
    monkeypatch.setattr(named_models, "open_s3", opened)
    assert content_of(fetch_named(ADDRESS)) == {**TINY, WEIGHTS: TINY[WEIGHTS][::-1]}


FETCH = "import sys; from engine.data.named_models import fetch_named; print(fetch_named(sys.argv[1]))"


def test_processes_that_start_at_once_copy_a_model_once(put, proxy, tmp_path):
    def fetch(_):
        return subprocess.run(
            [sys.executable, "-c", FETCH, ADDRESS],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, "HF_HOME": str(tmp_path / "hf")},
        ).stdout.strip()

    with ThreadPoolExecutor() as pool:
        folders = list(pool.map(fetch, range(3)))
    assert len(set(folders)) == 1
    assert content_of(Path(folders[0])) == TINY
    assert gets(proxy) == len(TINY)


def test_why_a_model_cannot_be_had(put, proxy, tmp_path, monkeypatch):
    put("pytorch_model.bin", b"pickle", "pickled")
    put("config.json", b"{}", "pickled")
    put(WEIGHTS, b"", "bare")

    def told(path):
        with pytest.raises(BadInput) as raised:
            fetch_named(path)
        return str(raised.value)

    expected = "expected config.json, tokenizer files and *.safetensors (other weight formats are not read, pickle is"
    assert f"model s3://bucket/pickled: it has no *.safetensors on S3; {expected}" in told("s3://bucket/pickled")
    assert "model s3://bucket/bare: it has no config.json on S3; expected" in told("s3://bucket/bare")
    assert f"model {ADDRESS}/config.json: a file on S3; expected the address of its folder" in told(
        f"{ADDRESS}/config.json"
    )
    for none in ("s3://bucket/nothing", "s3://nowhere/tiny"):
        assert told(none) == f"model {none}: no such file or folder on S3"
    for odd in ("s3://", "s3://bucket//tiny", "s3://bucket/../tiny"):
        assert told(odd) == f"model {odd}: not the address of a folder; expected s3://bucket/folder"
    proxy.spoil(FORBID, 0)
    assert "S3 cannot be read (Forbidden); AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID" in told(ADDRESS)
    proxy.spoil(FORBID, 0, only="GET /bucket/models/")
    assert told(ADDRESS).startswith(f"model {ADDRESS}: S3 cannot be read")
    proxy.heal()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "file"))
    assert "can't be written ([Errno 20] Not a directory" in told(ADDRESS)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "S3 cannot be read (Could not connect to the endpoint" in told(ADDRESS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(named_models, "REACH_S", 1.0)
        assert told(ADDRESS) == f"model {ADDRESS}: S3 has not sent it in time; does AWS_ENDPOINT_URL hold its address?"


def test_which_folder_is_of_which_name():
    copy = Path("/x/metronome-s3/bucket/a@b/tiny@0123456789ab")
    assert is_named_model("s3://bucket/tiny")
    assert model_name(copy) == "s3://bucket/a@b/tiny@0123456789ab"
    assert is_of_name(copy, "s3://bucket/a@b/tiny/")
    assert not any(is_of_name(copy, path) for path in ("s3://bucket/a@b", "s3://bucket/tiny", "bucket/tiny", "tiny"))
    snapshot = Path("/x/hub/models--team--tiny/snapshots/0a")
    assert model_name(snapshot) == "team/tiny@0a"
    assert is_of_name(snapshot, "team/tiny@v1")
    assert not is_of_name(Path("/x/tiny"), "team/tiny")
    assert model_name(Path("/x/tiny")) == "tiny"


def test_a_dry_run_and_a_new_recipe_read_only_the_sizes(put, proxy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, printed = metronome("run", *sets("run.dry=true", f"model.path={ADDRESS}"))
    assert status == 0, printed
    assert "1,017,600 parameters" in printed
    assert "config.json on S3" in printed
    given = [
        "--model",
        ADDRESS,
        "--data",
        str(ROOT / "data/addition_train.jsonl"),
        "--device",
        "cpu",
        "--reward",
        "exact",
    ]
    status, printed = metronome("init", "mine.toml", "--reward", "exact", *given)
    assert status == 0, printed
    assert load_config("mine.toml").model.path == ADDRESS
    assert {one.split()[1] for one in proxy.requests} == {"/bucket/models/tiny-1.5/config.json"}
    assert not (tmp_path / "hf").exists()
    put("config.json", b'{"architectures": ["Other"]}', "models/other")
    status, printed = metronome("run", *sets("run.dry=true", "model.path=s3://bucket/models/other"))
    assert (status, "s3://bucket/models/other" in printed) == (2, True), printed
    status, printed = metronome("run", *sets("run.dry=true", "model.path=s3://bucket/none"))
    assert (status, "s3://bucket/none/config.json: no such file or folder on S3" in printed) == (2, True), printed


def test_commands_that_need_the_model_get_the_copy(put, capsys):
    copy = policy_folder(ADDRESS)
    assert content_of(Path(copy)) == TINY
    assert capsys.readouterr().out.splitlines()[-1] == f"download     {ADDRESS}: 3.9 MiB in {copy}"
    config = with_model_folder(load_config(None, [f"model.path={ADDRESS}"]))
    assert config.model.path == copy
    config, name = served_config(copy, "", [])
    assert (config.model.path, name) == (copy, Path(copy).name)
    assert capsys.readouterr().out == ""
