import json
import os
import time
from dataclasses import replace

import pytest

from engine.config.recipe import load_config
from engine.data.prepared import (
    FILE,
    file_hashes,
    heldout_problems,
    prepare_problems,
    problems_version,
    training_problems,
    write_prepared,
)
from engine.data.problem_statistics import report_data
from engine.data.problems import ProblemRow, Problems
from engine.errors import BadInput

FILLER = "in the town of Euclid on the river Gauss where every child knows that numbers are beautiful and kind"


def problem(n):
    return f"Number {n} walks {n + 1} miles {FILLER}. How far?"


@pytest.fixture
def files(tmp_path):
    def write(name, *rows):
        path = tmp_path / name
        made = [{"problem": text, "answer": answer} for text, answer in rows]
        path.write_text(json.dumps(made))
        return str(path)

    return write


def config(**keys):
    return load_config(None, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in keys.items()])


def rows(*numbers):
    return [(problem(n), str(n)) for n in numbers]


def test_training_rows_of_an_evaluation_set_are_left_out_and_named(files):
    train = files("train.json", *rows(*range(10)))
    heldout = files("heldout.json", *rows(3, 50))
    benchmark = files("benchmark.json", *rows(5))
    other = files("other.json", *rows(7, 8))
    against = ["benchmark", other]
    made = config(data__train=train, data__heldout=heldout, evaluate__benchmark=benchmark, data__decontaminate=against)
    found = prepare_problems(made)
    assert [row.answer for row in found.train.rows] == ["0", "1", "2", "4", "6", "9"]
    assert found.train.skipped == {"in an evaluation set": 4}
    assert found.against == (heldout, benchmark, other)
    assert f"100% of it is {benchmark}, row 1" in str(found.train.rejected[1])
    assert training_problems(made).rows == found.train.rows
    assert len(heldout_problems(made).rows) == 2
    assert set(file_hashes(made)) == {train, heldout, benchmark, other}
    off = config(data__train=train, data__heldout=heldout, data__decontaminate=[])
    assert len(prepare_problems(off).train.rows) == 10


def test_a_share_is_held_out_where_no_file_is(files):
    train = files("train.json", *rows(*range(200)))
    made = config(data__train=train, data__heldout_fraction=0.1)
    assert made.data.heldout == ""
    found = prepare_problems(made)
    assert 8 < len(found.heldout.rows) < 35
    assert len(found.train.rows) + len(found.heldout.rows) == 200
    assert heldout_problems(made).rows == found.heldout.rows


def test_a_training_row_like_one_of_the_share_that_is_held_out_is_left_out(files):
    spelled = [(f"{text} Give the distance in miles.", answer) for text, answer in rows(*range(100))]
    found = prepare_problems(
        config(data__train=files("train.json", *rows(*range(100)), *spelled), data__heldout_fraction=0.2)
    )
    trained, held = ({row.answer for row in side.rows} for side in (found.train, found.heldout))
    assert len(held) > 20
    assert len(trained) > 20
    assert not trained & held
    assert found.notes == ()


def test_the_training_file_itself_as_the_evaluation_set_is_a_note_and_all_of_another_an_error(files):
    train = files("train.json", *rows(1, 2))
    twin = files("twin.json", *rows(2, 1))
    found = prepare_problems(config(data__train=train, data__heldout=train))
    assert len(found.train.rows) == 2
    assert "is the training set itself" in found.notes[0]
    with pytest.raises(BadInput, match="every row is also in an evaluation set.*data.decontaminate = "):
        prepare_problems(config(data__train=train, data__heldout=twin))


def test_answers_are_cleaned_for_the_math_verifier_alone(files):
    train = files("train.json", *rows(1), (problem(2), "![a]"), (problem(3), "3.0"))
    heldout = files("heldout.json", *rows(9))
    math = prepare_problems(config(data__train=train, data__heldout=heldout, reward__function="math"))
    assert [row.answer for row in math.train.rows] == ["1", "3"]
    exact = prepare_problems(config(data__train=train, data__heldout=heldout))
    assert [row.answer for row in exact.train.rows] == ["1", "![a]", "3.0"]


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "\U0001f600 2 + 2?"}]


@pytest.fixture
def own_run(tmp_path):
    """A config with rows of every kind, a share held out, in a run folder of its own."""
    columns = {"difficulty": 0.1, "large": 2**70, "none": None, "nested": {"a": [1, "\u00e9"]}, "nan": float("nan")}
    lines = [{"problem": text, "answer": answer, **columns} for text, answer in rows(*range(60))]
    lines += [{"prompt": MESSAGES, "answer": 4}, {"problem": "nothing", "answer": None}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def made(**keys):
        given = {"data__train": str(tmp_path / "train.jsonl"), "data__heldout": "", "data__heldout_fraction": 0.2}
        return config(**given | {"run__output": str(tmp_path), "run__name": "own", "reward__function": "math"} | keys)

    made().folder.mkdir()
    return made


def test_the_later_stages_of_a_run_read_what_was_prepared(own_run, monkeypatch):
    found = prepare_problems(own_run())
    write_prepared(own_run(), found)

    def refuse(*_):
        raise AssertionError("the problem sets are read again")

    monkeypatch.setattr("engine.data.prepared.read_problems", refuse)
    for read, whole in ((training_problems(own_run()), found.train), (heldout_problems(own_run()), found.heldout)):
        assert repr(read) == repr(whole)  # nan differs from itself
        assert [type(row.columns.get("large", 1)) for row in read.rows] == [int] * len(whole.rows)
    assert any(row.messages == tuple(MESSAGES) for row in [*found.train.rows, *found.heldout.rows])
    assert training_problems(own_run(train__steps=9, run__seed=3)).rejected == found.train.rejected
    with pytest.raises(AssertionError, match="read again"):
        training_problems(own_run(run__name="another"))


def test_what_was_prepared_of_other_files_or_settings_is_prepared_anew(own_run):
    old = prepare_problems(own_run())
    write_prepared(own_run(), old)
    other = own_run(data__heldout_fraction=0.5)
    assert training_problems(other) == prepare_problems(other).train
    with open(own_run().data.sets[0].path, "a") as file:
        file.write(json.dumps({"problem": "A new one?", "answer": "7"}) + "\n")
    for _ in range(2):
        sides = (training_problems(own_run()), heldout_problems(own_run()))
        assert "A new one?" in {row.problem for side in sides for row in side.rows}
        write_prepared(own_run(), old)  # of a file that changed while it was prepared
    write_prepared(own_run(), prepare_problems(own_run()))
    assert "A new one?" in (own_run().folder / FILE).read_text()


def test_a_run_keeps_its_rows_and_a_damaged_file_is_named(own_run):
    found = prepare_problems(own_run())
    write_prepared(own_run(), found)
    write_prepared(own_run(), replace(found, train=found.heldout))  # as a newer version might prepare them
    assert training_problems(own_run()).rows == found.train.rows
    file = own_run().folder / FILE
    file.write_text(file.read_text().replace("walks 31 miles", "walks 32 miles"))
    with pytest.raises(BadInput, match=r"problems\.json: the run's problems can't be read.*delete it"):
        training_problems(own_run())


def test_a_version_is_that_of_the_rows(files):
    def made(*pairs, source="a"):
        return Problems(tuple(ProblemRow(text, answer, {}) for text, answer in pairs), {}, source, source)

    assert problems_version(made(("a", "1"), ("b", "2"))) == problems_version(made(("a", "1"), ("b", "2"), source="b"))
    assert problems_version(made(("a", "1"), ("b", "2"))) != problems_version(made(("b", "2"), ("a", "1")))
    assert problems_version(made(("a", "1"))) != problems_version(made(("a", "2")))


def test_report(files):
    train = files("train.json", *rows(*range(6)), (problem(9), "\\frac{1}{2}"), ("p", None))
    heldout = files("heldout.json", *rows(2))
    found = report_data(prepare_problems(config(data__train=train, data__heldout=heldout)))
    assert json.loads(json.dumps(found)) == found
    assert found["train"]["rows"] == 6
    assert found["train"]["skipped"] == {"no answer": 1, "in an evaluation set": 1}
    assert found["overlaps"][0]["overlaps_with"] == f"{heldout}, row 1"
    assert f"{train}, row 8: answer: no answer (found null" in found["train"]["rejected"][0]


def test_many_rows_of_one_template_take_seconds(files):
    train = files("train.json", *rows(*range(10_000)))
    heldout = files("heldout.json", *rows(*range(9_990, 10_500)))
    started = time.process_time()
    found = prepare_problems(config(data__train=train, data__heldout=heldout, reward__function="math"))
    assert len(found.train.rows) == 9_990
    assert time.process_time() - started < 20  # seconds of computing; comparing each with each takes minutes


def test_real_overlaps():
    folder = os.environ.get("METRONOME_REAL_DATA")
    if not folder:
        pytest.skip("METRONOME_REAL_DATA is unset: the real problem sets are not part of the project")
    train = f"{folder}/math_train.json"
    heldout = f"{folder}/deepscaler_aime_1983_2023.json"
    found = prepare_problems(config(data__train=train, data__heldout=heldout, reward__function="math"))
    assert found.train.skipped["no answer"] == 4
    assert found.train.skipped["duplicate"] == 1
    assert 440 < found.train.skipped["in an evaluation set"] < 470  # AIME problems that MATH's training file has too
    copies = sum(overlap.share > 0.95 for overlap in found.overlaps)
    assert copies > 350
