"""`metronome conform`: an engine that breaks a rule is told by the rule's name. Both engines keep them all: that is in
test_rollout_routes.py, which has a server of each."""

import re
import subprocess
import sys

import pytest

from engine.errors import BadInput
from engine.tools.conformance.suite import RULES
from support import broken_engine as broken
from support.broken_engine import BrokenEngine, answered, reply_with, request_with, tried
from support.commands import metronome
from support.runs import ROOT
from support.served import save_model, serving

TOKEN = "a-secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv("METRONOME_TOKEN", TOKEN)


def failed(lines):
    return {name for name, line in lines.items() if line.split()[1] == "FAIL"}


FAULTS = {
    "no version for the tokens": (reply_with(broken.no_versions), {"versions"}),
    "no version for the first token": (reply_with(broken.one_version_too_few), {"versions"}),
    "a version that it does not hold": (reply_with(broken.stale_version), {"versions", "weight-update"}),
    "other log-probabilities": (reply_with(broken.wrong_logprobs), {"log-probabilities"}),
    "log-probabilities after top_p": (broken.logprobs_after_top_p, {"log-probabilities"}),
    "other log-probabilities of prompts": (
        reply_with(broken.wrong_prompt_logprobs),
        {"prompt-log-probabilities", "weight-update"},
    ),
    "tokens of another vocabulary": (reply_with(broken.foreign_tokens), {"tokens", "group"}),
    "another finish reason": (reply_with(broken.other_reason), {"finish-reason"}),
    "no stop tokens": (request_with("/v1/completions", broken.no_stop), {"finish-reason"}),
    "no seeds": (request_with("/v1/completions", broken.random_seed), {"seeds"}),
    "one seed for all": (request_with("/v1/completions", broken.one_seed), {"seeds", "group"}),
    "one seed for requests without": (request_with("/v1/completions", broken.one_stream), {"unseeded"}),
    "no health": (answered("/health", {"status": "ok"}), {"health"}),
    "no token asked for": (broken.ignores_the_token, {"token"}),
    "no limits": (broken.takes_any_body, {"limits"}),
    "a slow load": (broken.is_slow_to_say_its_load, {"load"}),
    "errors without a form": (
        answered("/pause", "no", 400, lambda request, _: "keep" in request.query_string),
        {"errors"},
    ),
    "a pause that does nothing": (
        answered("/pause", {"status": "paused"}, 200, lambda request, _: "wait" in request.query_string),
        {"pause"},
    ),
    "a pause that aborts": (broken.aborts_instead_of_letting_responses_finish, {"pause"}),
    "an abort that waits": (broken.lets_responses_finish_instead_of_aborting, {"abort"}),
    "requests of a client that left": (broken.keeps_what_its_client_left, {"disconnect"}),
    "no weight updates": (
        broken.ignores_updates,
        {"base-weights", "weight-update", "checksum", "whole-update", "update-order"},
    ),
    "no checksums": (request_with("/update_weights", broken.no_checksums), {"checksum"}),
    "a stale output layer": (request_with("/update_weights", broken.no_perturbation), {"base-weights"}),
    "no world size": (answered("/health", {"protocol": 3}), {"health"}),
}


WHOLE = {
    "no version for the tokens",
    "other log-probabilities",
    "a pause that does nothing",
    "no weight updates",
}
"""Faults for which every rule is tried, so that those of other names are seen to hold."""


@pytest.fixture(scope="module")
def embedded(model, tmp_path_factory):
    with serving(model, tmp_path_factory.mktemp("server"), token=TOKEN) as (_, ready):
        yield f"http://{ready['host']}:{ready['port']}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_an_engine_that_breaks_a_rule_is_told_by_the_rules_name(embedded, name):
    fault, expected = FAULTS[name]
    with BrokenEngine(embedded, TOKEN, fault).serving() as url:
        holds, lines, last = tried(url, only=() if name in WHOLE else {"tokens", "health", *expected})
    assert failed(lines) == expected
    assert not holds
    assert all(rule in last for rule in expected)
    assert tried(embedded, only=["health", "versions"])[0]


def test_a_reply_that_lacks_numbers_breaks_a_rule_and_does_not_end_the_command(embedded):
    with BrokenEngine(embedded, TOKEN, reply_with(broken.one_logprob_too_few)).serving() as url:
        holds, lines, _ = tried(url, only=["log-probabilities", "continued"])
    assert not holds
    assert [line.split()[1] for line in lines.values()] == ["FAIL", "no"]
    assert all("24 tokens, 23 log-probabilities" in line for line in lines.values())


def test_the_page_has_every_rule_and_no_other():
    text = (ROOT / "docs/protocol.md").read_text()
    _, required, optional = re.split("- Required: |- Not required: ", text.partition("- Not tested: ")[0])
    for listed, wanted in ((required, True), (optional, False)):
        named = re.findall("`([a-z-]+)`", listed)
        assert sorted(named) == sorted(rule.name for rule in RULES if rule.required is wanted)


def test_only_the_rules_that_were_asked_for_are_tried(embedded):
    assert tried(embedded, only=["seeds"])[1].keys() == {"seeds"}
    with pytest.raises(BadInput, match="--only nothing: no such rule; rules are health, token"):
        tried(embedded, only=["nothing"])


def test_the_exit_code_says_whether_it_conforms(embedded, model):
    fault, _ = FAULTS["no version for the tokens"]
    with BrokenEngine(embedded, TOKEN, fault).serving() as url:
        for place, only, code in ((embedded, "versions", 0), (url, "seeds", 0), (url, "none", 2)):
            line = ["conform", place, "--only", only, "--model", model]
            assert metronome(*line)[0] == code
        command = [sys.executable, "-m", "flows.cli", "conform", url, "--only", "versions", "--model", model]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1:1", "127.0.0.1:8000", "http://", "http://127.0.0.1:x", "http://a/b"]
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(BadInput, match="expected the address of an engine"):
        tried(url)


def test_no_engine_and_no_model_and_an_engine_in_use_are_named(embedded, tmp_path):
    with pytest.raises(BadInput, match="no engine answers there"):
        tried("http://127.0.0.1:1")
    with pytest.raises(BadInput, match="not a Hugging Face folder on this machine"):
        tried(embedded, model=str(tmp_path))
    with BrokenEngine(
        embedded, TOKEN, answered("/load", {"running": 0, "waiting": 0, "generated_tokens": 0, "weight_version": 4})
    ).serving() as url:
        with pytest.raises(BadInput, match="is in use: it has 0 requests and weight version 4"):
            tried(url)
