"""Benchmarks by name and by file: the published files' columns,
where they are looked for, what is said if they are missing."""

import json
import os
from pathlib import Path

import pytest

from engine.config import Config, Reward
from engine.data.benchmark_files import FORMATS, benchmark_paths
from engine.data.prepared import prepare_problems
from engine.data.prompts import encode_problems
from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput
from engine.evaluation.benchmarks import read_benchmarks

REAL = os.environ.get("METRONOME_REAL_DATA")
# One row of each published file, shortened.
ROWS = {
    "aime_2024.jsonl": {"id": 60, "problem": "Every morning Aya …", "solution": "…", "answer": "204", "year": "2024"},
    "aime25.jsonl": {"problem": "Find the sum of all integer bases …", "answer": "70", "id": "0"},
    "amc23.jsonl": {"id": 0, "question": "Cities $A$ and $B$ are $45$ miles apart …", "answer": 27.0, "url": "…"},
    "amc24.jsonl": {"problem": "What is the value of …", "answer": "E", "id": 0},
    "gsm8k.jsonl": {"question": "Janet’s ducks lay 16 eggs …", "answer": "Janet sells 16 - 3 - 4 = 9 …\n#### 18"},
    "math500/test.jsonl": {
        "problem": "Convert the point …",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "unique_id": "x",
    },
    "minerva_math/test.jsonl": {
        "problem": "Each of the two Magellan telescopes …",
        "type": "Astronomy",
        "idx": 0,
        "solution": "… $L = \\boxed{16}$ as the grating's \\textbf{normal} …",
    },
    "olympiadbench/test.jsonl": {
        "id": 1606,
        "question": "Let $T$ be rational …",
        "final_answer": ["$\\frac{1}{2}$", "3"],
        "solution": ["…"],
        "unit": None,
        "is_multiple_answer": True,
    },
}
ANSWERS = {
    "aime24": "204",
    "aime25": "70",
    "amc": "27.0",
    "amc24": "E",
    "gsm8k": "18",
    "math500": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "minerva": "16",
    "olympiadbench": "$\\frac{1}{2}$, 3",
}


def config(tmp_path, **evaluate):
    return Config.model_validate({"run": {"output": str(tmp_path / "runs")}, "evaluate": evaluate})


@pytest.fixture
def folder(tmp_path):
    for name, row in ROWS.items():
        path = tmp_path / "sets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row) + "\n")
    return tmp_path / "sets"


def test_every_named_benchmark_is_read_in_its_published_form(tmp_path, folder):
    found = read_benchmarks(config(tmp_path, benchmark=list(FORMATS), folder=str(folder)))
    assert {one.name: one.problems.rows[0].answer for one in found} == ANSWERS
    assert all(one.problems.rows[0].problem for one in found)
    assert not any(one.problems.skipped for one in found)
    assert found[0].notes == ("aime24 has 1 problem here, 30 on the hub (HuggingFaceH4/aime_2024)",)


def test_names_and_files_together_by_commas(tmp_path, folder):
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"question": "1+1?", "answer": 2}\n')
    found = read_benchmarks(config(tmp_path, benchmark=f"aime24, {mine}", folder=str(folder)))
    assert [(one.name, one.problems.rows[0].answer) for one in found] == [("aime24", "204"), ("mine", "2")]
    assert [one.name for one in read_benchmarks(config(tmp_path))] == ["addition_heldout"]


@pytest.mark.parametrize("column", ["answer", "final_answer"])
def test_zero_is_an_answer_and_an_empty_column_is_none(tmp_path, column):
    mine = tmp_path / "mine.jsonl"
    empty = {"question": "1+1?", "answer": "", "final_answer": [], "solution": "so \\boxed{2}"}
    rows = [{"question": "1-1?", "solution": "\\boxed{5}", column: 0}, empty]
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = read_benchmarks(config(tmp_path, benchmark=str(mine)))
    assert [row.answer for row in found.problems.rows] == ["0", "2"]


def test_a_repeated_problem_is_evaluated_once_and_said(tmp_path):
    """As BytedTsinghua-SIA/AIME-2024 has each of its problems 32 times, with another index."""
    mine = tmp_path / "mine.jsonl"
    asked = [[{"role": "user", "content": text}] for text in ("1+1=", "1+1= ", "2+2=", "2+2=")]
    golds = ["2", "2", "4", "4.0"]
    rows = [
        {"prompt": prompt, "reward_model": {"ground_truth": gold}, "extra_info": {"index": f"{number}-{copy}"}}
        for copy in range(32)
        for number, (prompt, gold) in enumerate(zip(asked, golds, strict=True))
    ]
    mine.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": asked[0]}]))
    skips = {"math": "126 × duplicate", "exact": "64 × contradicted, 63 × duplicate"}
    for function, skipped in skips.items():  # 4 and 4.0 are one answer for math only
        made = config(tmp_path, benchmark=str(mine)).model_copy(update={"reward": Reward(function=function)})
        (found,) = read_benchmarks(made)
        count = {"math": "2 problems", "exact": "1 problem"}[function]
        assert found.notes == (f"mine: {count}, each evaluated once; skipped rows: {skipped}, 1 × no answer",)


def test_a_question_about_another_text_is_another_problem(tmp_path):
    """The prompt template decides which columns make a problem."""
    mine = tmp_path / "mine.jsonl"
    texts = [("I have 5.", "5", 1), ("I have 7.", "7", 2), ("I have  5.", "5", 3)]
    rows = [{"problem": "How many?", "passage": text, "answer": gold, "n": n} for text, gold, n in texts]
    mine.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "problem": "So?"}]))
    for template, kept in (("{passage} {problem}", [0, 1, 3]), ("{problem}", [3]), ("{n} {problem}", [0, 1, 2, 3])):
        made = config(tmp_path, benchmark=str(mine))
        data = made.data.model_copy(update={"prompt_template": template, "train": str(mine), "decontaminate": []})
        made = made.model_copy(update={"data": data})
        (found,) = read_benchmarks(made)
        lines = [int(row.where.rpartition(" ")[2]) - 1 for row in found.problems.rows]
        assert lines == [int(row.where.rpartition(" ")[2]) - 1 for row in prepare_problems(made).train.rows] == kept
        prompts = encode_problems(found.problems, Tokenizer(Path(made.model.path)), made.data, 1024).prompts
        assert len({one.id for one in prompts}) == len(kept)


def test_beside_the_data_without_a_folder(tmp_path, folder):
    near = Config.model_validate(
        {
            "run": {"output": str(tmp_path)},
            "evaluate": {"benchmark": "amc"},
            "data": {"train": str(folder / "aime25.jsonl"), "heldout": str(folder / "aime25.jsonl")},
        }
    )
    assert list(benchmark_paths(near)) == ["amc"]


def test_what_is_missing_is_named_with_where_it_was_looked_for(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (folder / "aime25.jsonl").unlink()
    with pytest.raises(
        BadInput, match=r"benchmark 'aime25': .*/sets \(evaluate.folder\) has none of aime25, aime_2025"
    ):
        read_benchmarks(config(tmp_path, benchmark="aime25", folder=str(folder)))
    with pytest.raises(
        BadInput, match=r"evaluate.benchmark: aime2: .*no benchmark of this name; the names are aime24, "
    ):
        read_benchmarks(config(tmp_path, benchmark="aime2"))
    with pytest.raises(BadInput, match="names 'aime24' twice"):
        read_benchmarks(config(tmp_path, benchmark="aime24,AIME24", folder=str(folder)))


@pytest.mark.skipif(
    REAL is None, reason="METRONOME_REAL_DATA is unset: the real problem sets are not part of the project"
)
def test_the_real_files(tmp_path):
    found = read_benchmarks(config(tmp_path, benchmark="aime24,amc,math500", folder=REAL))
    assert [len(one.problems.rows) for one in found] == [30, 83, 500]
    assert [note for one in found for note in one.notes] == ["amc has 83 problems here, 40 on the hub (math-ai/amc23)"]
    assert {Path(one.problems.source).parent for one in found} == {Path(REAL)}  # read as they are, not copied


def test_a_benchmark_that_no_hub_has_is_asked_for_as_a_file(tmp_path):
    with pytest.raises(BadInput, match="amc24, amc_2024, amc2024 as .*no version there is known; put a file"):
        benchmark_paths(config(tmp_path, benchmark="amc24", folder=str(tmp_path)))
