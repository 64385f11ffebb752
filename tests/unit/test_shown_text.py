"""Texts of models, users and libraries are data: no terminal, log or page obeys them, and no line has a secret."""

import json
from base64 import b64encode

import pytest

from engine.errors import BadInput, MetronomeError, ProcessDied, counted
from engine.run.folder import RunFolder
from engine.run.user_code import UserCode, describe_error
from tasks.terminal import console

SECRET = "hunter2-of-the-cluster"
BASIC = b64encode(f"me:{SECRET}-of-prefect".encode()).decode()
EVIL = "\x1b[2J\x1b]0;owned\x07a\r\x9bb\u202ec\u2028d\ud800"
SHOWN = r"\x1b[2J\x1b]0;owned\x07a\r\x9bb\u202ec\u2028d\ud800"
FORGED = "wrong\nregister     version 7 is now champion"


@pytest.fixture
def secrets(monkeypatch):
    monkeypatch.setenv("METRONOME_TOKEN", SECRET)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", f"me:{SECRET}-of-prefect")
    monkeypatch.setenv("MIRROR", f"https://{SECRET}-of-the-index@index/simple")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", f"{SECRET}-of-mlflow")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}-of-aws")
    monkeypatch.setenv("A_DATABASE", f"postgresql://me:{SECRET}-of-it@db/x")
    monkeypatch.setenv("SHORT_KEY", "e")


@pytest.fixture
def show(capsys):
    """What the console shows of a text by each of its functions."""

    def show(text):
        console.say("rewards", text)
        console.print_error(f"warning: {text}")
        console.print_table("Run", {"note": text})
        console.print_error(f"error: {ProcessDied(text)}")
        found = capsys.readouterr()
        return found.out + found.err

    return show


def test_a_terminal_obeys_no_text(show):
    found = show(EVIL)
    assert found.count(SHOWN) == 4
    assert all(character == "\n" or character.isprintable() for character in found)


def test_no_text_makes_a_line_of_its_own(show):
    assert not any(line.startswith("register") for line in show(FORGED).splitlines())
    console.say("evaluate", "one\n             two")


def test_an_error_of_users_code_is_one_line():
    with UserCode() as attempt:
        raise ValueError(FORGED + EVIL)
    assert describe_error(attempt.error).splitlines() == [describe_error(attempt.error)]
    assert describe_error(attempt.error).startswith(r"ValueError: wrong\nregister")


@pytest.mark.parametrize(
    "what",
    [
        *("http://ci:{}@127.0.0.1:1/x", "https://{}@127.0.0.1:1/x", "token {} refused", "{}-of-mlflow"),
        *("{}-of-aws {}-of-it", "{}-of-prefect {}-of-the-index", "Authorization: Basic " + BASIC),
    ],
)
def test_no_line_has_a_secret(show, secrets, tmp_path, what):
    text = f"the API says: {what.format(*[SECRET] * 3)}, see someone@example.org"
    found = show(text)
    folder = RunFolder(tmp_path)
    folder.write_failure(MetronomeError(text))
    found += folder.failure.read_text() + str(BadInput(text))
    assert SECRET not in found
    assert BASIC not in found
    assert "-of-" not in found
    assert found.count("the API says: ") == found.count(", see someone@example.org") == 6


def test_a_message_is_cut(show, tmp_path):
    huge = "x" * 10**6
    assert len(show(huge)) < 100_000
    folder = RunFolder(tmp_path)
    folder.write_failure(MetronomeError(huge))
    assert len(json.loads(folder.failure.read_text())["message"]) <= 20_000
    assert "(980,000 more)" in str(MetronomeError(huge))
    assert str(MetronomeError(str(MetronomeError(huge + EVIL)))) == str(MetronomeError(huge + EVIL))


def test_the_longest_page_is_printed_whole(capsys):
    console.print_page(("x" * 30_000 + EVIL + "\n") * 2)
    assert capsys.readouterr().out == ("x" * 30_000 + SHOWN + "\n") * 2 + "\n"


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0 groups"),
        (1.0, "1 group"),
        (-1, "-1 groups"),
        (12_345_678, "12,345,678 groups"),
        (4 / 3, "1.33333 groups"),
    ],
)
def test_a_number_of_things_is_told_for_people(count, told):
    assert counted(count, "group") == told
