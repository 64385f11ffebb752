"""Passwords in addresses are refused in a recipe, and are not shown."""

import os

import pytest

from engine.config.recipe import load_config
from engine.errors import BadInput, has_password, without_password
from tasks.tracking.tracked_run import shown_uri, ui_address

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("tracking.uri", f"https://user:{SECRET}@mlflow.example:5000/x", "MLFLOW_TRACKING_PASSWORD"),
        ("tracking.uri", f"https://user:p@{SECRET}@mlflow.example", "MLFLOW_TRACKING_PASSWORD"),
        ("tracking.uri", f"postgresql://db/mlflow?user=a&password={SECRET}", "MLFLOW_TRACKING_URI"),
        ("tracking.uri", f"postgresql://db/mlflow?user=a&PassWord={SECRET}", "MLFLOW_TRACKING_URI"),
        ("tracking.uri", f"postgresql+psycopg2://mlflow:{SECRET}@db/mlflow", "MLFLOW_TRACKING_URI"),
        ("checkpoint.path", f"s3://AKIA:{SECRET}@bucket/path", "AWS_SECRET_ACCESS_KEY"),
        ("checkpoint.path", f"https://host/path?user=a&token={SECRET}", "AWS_SECRET_ACCESS_KEY"),
        ("model.path", f"https://host/path?secret={SECRET}#b", "in the environment"),
        ("data.heldout", f"https://host/path?passwd={SECRET}", "in the environment"),
        ("data.train", f"https://user:{SECRET}@host/problems.jsonl", "in the environment"),
        ("data.decontaminate", f'["benchmark", "https://user:{SECRET}@host/x.jsonl"]', "in the environment"),
        ("data.train", f"https://{SECRET}@host/problems.jsonl", "in the environment"),
        ("evaluate.benchmark", f"aime24,https://user:{SECRET}@host/x.jsonl", "in the environment"),
    ],
)
def test_a_password_in_an_address_is_refused_with_what_to_use_instead_and_not_repeated(key, value, instead):
    with pytest.raises(BadInput, match=key.replace(".", r"\.")) as refused:
        load_config(None, [f"{key}={value}"])
    assert instead in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "sqlite:////runs/mlflow.db",
        "http://127.0.0.1:5000",
        "postgresql://user@host/x",
        "ssh://git@host/x",
        "s3://bucket/a@b:c",
        "owner/name:split",
        "file.py:function",
        "http://host/x?user=a#b",
    ],
)
def test_other_addresses_are_taken_and_shown_as_they_are(uri):
    assert not has_password(uri)
    assert without_password(uri) == uri


def test_a_password_in_the_environment_is_used_but_not_shown(monkeypatch):
    monkeypatch.setitem(os.environ, "MLFLOW_TRACKING_URI", f"http://user:{SECRET}@host:5000/x?token={SECRET}&a=1")
    config = load_config(None)
    assert shown_uri(config) == ui_address(config) == "http://host:5000/x?token=***&a=1"
