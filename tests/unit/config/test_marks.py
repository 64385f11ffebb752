"""What a resume may do with each key, by its mark."""

from engine.config import Config
from engine.config.keys import flatten_keys
from engine.config.marks import marked_keys
from engine.run.folder import FIXED, OWN_CODE
from engine.run.run_inputs import PARTS
from engine.wire.record import CODE, PLAN
from tasks.resume import PLACE
from tasks.resume_checks import TRAINED_WITH


def test_the_marks_are_the_lists():
    marks = dict(marked_keys(Config))
    flat = flatten_keys(Config().model_dump(mode="json"))

    def of(*rules):
        return {key for key, mark in marks.items() if mark.rule in rules}

    def expanded(names):
        return {key for key in flat if any(f"{key}.".startswith(f"{name}.") for name in names)}

    assert of("place") == set(PLACE)
    # a table that a key holds is one key
    assert of("fixed") - {"data.columns.problem", "data.columns.answer"} == set(FIXED) - {"data.columns"}
    further = {key for key in FIXED if key.partition(".")[0] in ("run", "data")}
    assert of("fixed", "plan") == expanded(TRAINED_WITH) | expanded(further)
    assert expanded(TRAINED_WITH) == expanded(PLAN) | {"train.mode"}
    code = {key for key, mark in marks.items() if mark.part == "algorithms"}
    assert (code, set(OWN_CODE)) == (set(CODE), code & of("fixed"))
    assert {mark.part for mark in marks.values()} - {""} == set(PARTS) - {"weights", "tokenizer"}
