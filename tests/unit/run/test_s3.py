"""A run folder on a real S3 server: what is copied of it, and how its page and its trace read it."""

import gzip
import json
import socket
from pathlib import Path

import boto3
import pytest
from typer.testing import CliRunner

from engine.errors import BadInput
from engine.run import s3
from engine.run.s3 import copied_folder
from engine.tools.watch.run_view import RunView
from flows.cli import app
from support.s3_server import s3_server

ADDRESS = "s3://bucket/runs/night"
SPAN = {"lane": "trainer-0", "name": "train", "start": 1.0, "end": 2.0}


@pytest.fixture(scope="module")
def endpoint():
    with s3_server() as address:
        yield address


@pytest.fixture
def put(endpoint, monkeypatch):
    """Writes a file of the run: its name, its lines."""
    monkeypatch.setattr(s3, "EVERY_S", 0.0)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for one in client.list_objects_v2(Bucket="bucket").get("Contents", ()):
        client.delete_object(Bucket="bucket", Key=one["Key"])

    def write(name, *lines):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        client.put_object(Bucket="bucket", Key=f"runs/night/{name}", Body=text.encode())

    write.delete = lambda name: client.delete_object(Bucket="bucket", Key=f"runs/night/{name}")
    write("config.toml", "[train]", "steps = 4")
    return write


def steps(*numbers):
    return [{"step": number, "step_s": 2.0} for number in numbers]


def asked(folder):
    """The parts of files that are asked for from now on: (name, first byte)."""
    calls = []
    call = folder._store.cat_file
    folder._store.cat_file = lambda path, **more: calls.append((path, more["start"])) or call(path, **more)
    return calls


def test_the_page_follows_a_run_on_s3_and_asks_for_new_lines_only(put):
    put("steps.jsonl", *steps(0, 1))
    put("trace/trainer-0.jsonl", {**SPAN, "step": 0})
    put("responses/step-000001.jsonl", {"step": 1, "response": "x"})
    put("checkpoints/step-000001/weights", "large")
    with copied_folder(ADDRESS, whole=False) as folder:
        view = RunView(folder.path, folder)
        told = view.state()
        assert (told["name"], told["folder"], told["state"], told["done"]) == ("night", ADDRESS, "running", 2)
        first = view.steps()
        assert view.rest()["sampled"] == [1]
        assert not (folder.path / "responses").exists()
        assert view.samples(1) == [{"step": 1, "response": "x"}]
        assert view.samples(2) == []
        assert len(view.timeline(whole=True)["spans"]) == 1

        calls = asked(folder)
        view.refresh()
        assert calls == []
        before = sum(len(json.dumps(row)) + 1 for row in steps(0, 1))
        put("steps.jsonl", *steps(0, 1, 2))
        view.refresh()
        assert calls == [(f"{ADDRESS}/steps.jsonl", 0)]  # its overlap is the whole small file
        assert view.steps(after=2, of=first["of"])["columns"]["step"] == [2]
        assert before < s3.OVERLAP
        put("failure.json", json.dumps({"error": "RewardError", "message": "no"}, indent=1))
        view.refresh()
        assert (view.state()["state"], view.state()["going"]) == ("failed", False)
        put.delete("failure.json")
        put("steps.jsonl", *steps(0, 1, 2, 3))
        view.refresh()
        assert view.state()["state"] == "finished"
        copies = folder.path
    assert not copies.exists()


def test_a_file_that_was_replaced_is_read_anew_and_of_a_long_one_the_end(put, monkeypatch):
    monkeypatch.setattr(s3, "PART", 1000)
    monkeypatch.setattr(s3, "OVERLAP", 100)
    put("steps.jsonl", *steps(*range(100)))
    with copied_folder(ADDRESS, whole=False) as folder:
        calls = asked(folder)
        rows = steps(*range(103))
        put("steps.jsonl", *rows)
        folder.refresh()
        size = sum(len(json.dumps(row)) + 1 for row in steps(*range(100)))
        assert calls == [(f"{ADDRESS}/steps.jsonl", size - 100)]
        assert list(RunView(folder.path).steps_file.read()) == rows
        other = [{"step": number, "step_s": 3.5} for number in range(110)]
        put("steps.jsonl", *other)
        folder.refresh()
        assert list(RunView(folder.path).steps_file.read()) == other
    monkeypatch.setattr(s3, "TAIL", 450)
    with copied_folder(ADDRESS, whole=False) as folder:
        found = list(RunView(folder.path).steps_file.read())
    assert found == other[-len(found) :]
    assert 5 < len(found) < 20


def test_a_run_that_nobody_writes_any_more_has_ended(put, monkeypatch):
    put("steps.jsonl", *steps(0))
    with copied_folder(ADDRESS, whole=False) as folder:
        folder.newest -= 601
        assert RunView(folder.path, folder).state()["state"] == "ended"


def test_the_trace_of_a_run_on_s3_is_written_here(put, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put("trace/trainer-0.jsonl", *({**SPAN, "step": step} for step in range(3)))
    done = CliRunner().invoke(app, ["trace", ADDRESS, "--steps", "1:2"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("night.trace.json.gz: 2 spans")
    assert "profiles are not read from S3" in done.output
    found = json.loads(gzip.decompress(Path("night.trace.json.gz").read_bytes()))
    assert found["otherData"]["run"] == "night"
    monkeypatch.setattr(s3, "MOST", 100)
    done = CliRunner().invoke(app, ["trace", ADDRESS])
    assert (done.exit_code, "copy the folder yourself" in done.stderr) == (2, True), done.output


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("s3://bucket/runs/other", "there is no run folder, because it has no config.toml"),
        ("s3://nowhere/runs/night", "there is no run folder, because it has no config.toml"),
        ("s3://bucket/..", "expected s3://bucket/…/NAME of a run"),
        ("s3://", "expected s3://bucket/…/NAME of a run"),
    ],
)
@pytest.mark.parametrize("command", ["watch", "trace"])
def test_an_address_without_a_run_is_bad_input(put, command, address, told):
    done = CliRunner().invoke(app, [command, address])
    assert (done.exit_code, told in done.stderr) == (2, True), done.output


def test_other_commands_say_which_read_s3():
    done = CliRunner().invoke(app, ["status", ADDRESS])
    assert (done.exit_code, "only metronome watch and metronome trace read s3://" in done.stderr) == (2, True)


def meanwhile(folder, monkeypatch, end, happens):
    """Just before a file with this end is read, something happens."""
    call = folder._store.cat_file

    def cat_file(path, **more):
        if path.endswith(end):
            monkeypatch.setattr(folder._store, "cat_file", call)
            happens()
        return call(path, **more)

    monkeypatch.setattr(folder._store, "cat_file", cat_file)


def test_what_changes_between_the_listing_and_the_reading_is_whole_or_not_there(put, monkeypatch):
    progress = "logs/progress.json"
    put("stages.json", "")
    put(progress, {"text": "step 9 of 12"})
    with copied_folder(ADDRESS, whole=False) as folder:
        put(progress, {"text": "step 10 of 12"})
        longer = {"text": "step 11 of 12, a longer text"}
        meanwhile(folder, monkeypatch, progress, lambda: put(progress, longer))
        folder.refresh()
        assert json.loads((folder.path / progress).read_text()) == longer
        put("failure.json", {"error": "Stopped"})
        meanwhile(folder, monkeypatch, "failure.json", lambda: put.delete("failure.json"))
        folder.refresh()
        assert not (folder.path / "failure.json").exists()
        put("responses/step-000001.jsonl", {"step": 1})
        folder.refresh()
        put.delete("responses/step-000001.jsonl")
        assert RunView(folder.path, folder).samples(1) == []
        assert RunView(folder.path, folder).rest()["sampled"] == []


def test_a_file_that_is_cut_between_the_listing_and_the_reading_is_read_as_it_is_then(put, monkeypatch):
    """A resume cuts steps.jsonl."""
    monkeypatch.setattr(s3, "OVERLAP", 10)
    put("steps.jsonl", *steps(*range(20)))
    with copied_folder(ADDRESS, whole=False) as folder:
        put("steps.jsonl", *steps(*range(30)))
        meanwhile(folder, monkeypatch, "steps.jsonl", lambda: put("steps.jsonl", *steps(0, 1)))
        folder.refresh()
        assert list(RunView(folder.path).steps_file.read()) == steps(0, 1)
        put("steps.jsonl", *steps(*range(30)))
        call = folder._store.cat_file

        def cut(path, **more):
            if path.endswith("steps.jsonl"):
                put("steps.jsonl", "")
                more |= {"start": 100, "end": 200}
            return call(path, **more)

        monkeypatch.setattr(folder._store, "cat_file", cut)
        with pytest.raises(BadInput, match="a file has become shorter each time it was read; try again"):
            folder.refresh()


def test_lines_of_which_some_were_copied_when_reading_failed_are_read_anew(put, monkeypatch):
    monkeypatch.setattr(s3, "PART", 100)
    put("steps.jsonl", *steps(0))
    with copied_folder(ADDRESS, whole=False) as folder:
        rows = steps(*range(200))
        put("steps.jsonl", *rows)
        calls = asked(folder)

        def fail():
            raise PermissionError("Access Denied")

        call = folder._store.cat_file
        monkeypatch.setattr(folder._store, "cat_file", lambda *a, **k: fail() if len(calls) > 50 else call(*a, **k))
        with pytest.raises(BadInput, match="Access Denied"):
            folder.refresh()
        monkeypatch.setattr(folder._store, "cat_file", call)
        folder.refresh()
        assert list(RunView(folder.path).steps_file.read()) == rows
        assert min(first for _, first in calls) >= 0


def test_the_deadline_is_that_of_all_parts_together(put, monkeypatch):
    monkeypatch.setattr(s3, "PART", 100)
    with copied_folder(ADDRESS, whole=False) as folder:
        put("steps.jsonl", *steps(*range(200)))
        calls = asked(folder)
        call = folder._store.cat_file

        def last_in_time(*a, **k):
            found = call(*a, **k)
            folder._deadline = 0.0
            return found

        monkeypatch.setattr(folder._store, "cat_file", last_in_time)
        with pytest.raises(BadInput, match=r"steps\.jsonl: S3 has not sent it within"):
            folder.refresh()
        assert len(calls) == 1


def test_an_s3_that_is_silent_has_a_deadline(put, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(s3, "FIRST_S", 1.0)
        with (
            pytest.raises(BadInput, match=r"s3://bucket/runs/night/: S3 has not sent it within"),
            copied_folder(ADDRESS, whole=False),
        ):
            pass


def test_an_s3_that_is_not_there_is_named(put, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(BadInput, match="S3 cannot be read"), copied_folder(ADDRESS, whole=False):
        pass
