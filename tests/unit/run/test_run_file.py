"""run.json: what is written is read, and damage is named with what to do."""

import json

import pytest

from engine.errors import BadInput
from engine.run.files import seal
from engine.run.run_file import ATTEMPTS, FILE, Fence, RunFile, RunStart, read_run, update_run

NIGHT = RunStart(start="nightly", continued_from="models:/nights/6")


def test_what_is_written_is_read(tmp_path):
    assert read_run(tmp_path) == RunFile()
    part = {"named": "", "hash": "a", "path": "base"}
    written = update_run(tmp_path, id="a", began=1.5, start=NIGHT, inputs={"weights": part}, stages={"train": 4})
    Fence(tmp_path).begin_attempt("flow", "started", (1, 2), by_hand=True)
    found = read_run(tmp_path)
    assert (found.attempt, found.attempts[0].progress, found.began_at.year) == (1, (1, 2), 1970)
    assert update_run(tmp_path, attempts=()) == written


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps(seal({"id": 1})), '{"id": "a", "checksum": "b"}'])
def test_damage_is_named_with_what_can_be_made_again(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    said = r"run\.json: .* can't be read, because the file is damaged .*id comes from its newest checkpoint, and its"
    with pytest.raises(BadInput, match=said):
        read_run(tmp_path)


def test_the_newest_attempts_are_kept_and_their_numbers_go_on(tmp_path):
    fence = Fence(tmp_path)
    for _ in range(ATTEMPTS + 3):
        fence.begin_attempt("training", "killed")
    kept = read_run(tmp_path).attempts
    assert (len(kept), kept[0].number, kept[-1].number) == (ATTEMPTS, 4, ATTEMPTS + 3)
