import asyncio
import os
import re
import resource
import sys
import time
from pathlib import Path

import pytest

from engine.reward.math.answers import tidy_answer
from engine.reward.math.canonical import canonical_latex
from engine.reward.math.equality import same_answer
from engine.reward.math.quantities import read_number
from engine.reward.verifiers import math
from engine.types import Prompt, Response
from engine.verifier.reward_function import load_reward
from engine.verifier.worker import MEMORY
from support.changed_answers import changed, value
from support.hostile_strings import hostile
from support.spellings import SPELLINGS, bare
from support.verdicts import score
from support.verifier_calls import verifiers

ANSWERS = [
    "142",
    "142.0",
    "-4.0",
    "025",
    "1234567",
    "0.75",
    "2.50",
    "['9.6\\n']",
    r"\frac{14}{3}",
    r"-\frac{1}{2}",
    r"\frac 59",
    r"\dfrac{17}{50}",
    r"137 \frac{1}{2}",
    r"3\sqrt{13}",
    r"\frac{\sqrt{3}}{3}",
    r"8 \pi",
    "6-5i",
    "x^2+3x-5",
    "(a+5)(b+2)",
    r"90^\circ",
    r"\$42409",
    r"12\%",
    r"11,\! 111",
    r"5\text{ cm}",
    "52_8",
    r"4210_{5}",
    "(3,-1)",
    r"\left( 3, \frac{\pi}{2} \right)",
    r"[0,\infty)",
    "(3,4]",
    "-2,1",
    r"(-\infty, 2) \cup (3, \infty)",
    r"\{1\pm\sqrt{5},-2\}",
    r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}",
    "y = 2x + 3",
    r"x \in [-2,7]",
    r"-80\leq g(x)\leq 82",
    r"\text{Evelyn}",
    r"\text{(B)}",
    "CBAD",
    r"0.56 = 56\%",
    r"2 \sin b \cos a",
    r"2007 + \frac\pi 2",
    r"8\!:\!34 \text{ p.m.}",
    r"\text{two lines}",
    "p - q",
]
"""One of each shape that the public problem sets have."""


@pytest.mark.parametrize("answer", ANSWERS)
def test_every_spelling_matches_and_no_change_does(answer):
    given = tidy_answer(bare(answer))
    assert len(SPELLINGS) == 20
    assert [name for name, spell in SPELLINGS.items() if score(answer, spell(given)) != 1] == []
    changes = changed(given)
    assert changes
    assert [change for change in changes if score(answer, f"\\boxed{{{change[1]}}}") != 0] == []


@pytest.mark.parametrize(
    ("gold", "found"),
    [
        ("1,2,3", "3, 1, 2"),
        ("1,2,3", r"\{1,2,3\}"),
        ("1,2,3", r"1, 2 \text{ and } 3"),
        (r"1\pm\sqrt{2}", r"1-\sqrt2, 1+\sqrt2"),
        ("-2,1", "x = 1, -2"),
        (r"\frac{1}{3}", "0.333333"),
        ("0.5", r"50\%"),
        (r"50\%", "0.5"),
        (r"50\%", "50"),
        ("(1,2)", "1, 2"),
        ("x=5", "5"),
        ("5", "n=5"),
        (r"x \le 4", r"4 \ge x"),
        (r"x \le 4", r"(-\infty, 4]"),
        ("52_8", "52"),
        (r"\text{(B)}", "B"),
        (r"\text{B}", r"\text{(b)}"),
        ("10,000", "10000"),
        (r"10{,}000", r"10\,000"),
        (r"5\text{ cm}", r"5 \text{ centimeters}"),
        ("p - q", "-q + p"),
        (r"(x+1)^2", "x^2+2x+1"),
        (r"\sqrt{117}", r"3\sqrt{13}"),
        (r"2\cdot 3", "6"),
        (r"\cos^2 x", r"1-\sin^2 x"),
        (r"\frac{1}{60}", "0.016667"),
        ("0.0000003", r"3 \cdot 10^{-7}"),
        (r"5\text{ million}", "5000000"),
        ("5000000", r"\$5 million"),
        ("60", r"5\text{ dozen eggs}"),
        (r"50\text{ percent}", "50"),
        ("5000000", r"5\text{ million}=5000000"),
        ("1000000,2", r"2, 1\text{ million}"),
        ("5", "2+3=5"),
        ("5", r"x = \frac{10}{2} = 5"),
        ("x=5", "x=2+3=5"),
        (r"\frac{14}{3}", r"\frac{14}{3} \approx 4.67"),
    ],
)
def test_other_forms_of_the_same(gold, found):
    assert same_answer(gold, found)


@pytest.mark.parametrize(
    ("gold", "found"),
    [
        ("52_8", "52_{10}"),
        ("-37_8", "-37_{11}"),
        ("52_8", "42"),
        ("CBAD", "ABCD"),
        (r"\text{odd}", r"\text{ddo}"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("[1,2]", r"\{1,2\}"),
        ("1,2,3", "1,2"),
        ("1,2", "1,2,2"),
        ("1,1,2", "1,2,2"),
        (r"\frac{1}{3}", "0.33"),
        ("1234567", "1234568"),
        ("x=5", "y=5"),
        (r"5\text{ cm}", r"5\text{ km}"),
        (r"15\mbox{ cm}^2", r"15\mbox{ km}^2"),
        (r"5\text{ square feet}", r"5\text{ sq. inches}"),
        (r"8\!:\!34 \text{ p.m.}", r"8:34 \text{ a.m.}"),
        (r"0.56 = 56\%", r"3.56 = 56\%"),
        (r"-80\leq g(x)\leq 82", r"-80\geq g(x)\leq 82"),
        (r"2 \sin b \cos a", r"2 \sin q \cos q"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2)"),
        (r"1\pm\sqrt{2}", r"1+\sqrt2"),
        ("5", ""),
        ("5", "5, 6"),
        (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty, 2)"),
        ("x", "y"),
        ("10,000", "10.000"),
        ("0.0000003", "0"),
        ("0", "0.0000003"),
        ("0.0000003", "0.0000007"),
        (r"\frac{3}{10000000}", "0.0000004"),
        ("5", r"5\text{ million}"),
        (r"5\text{ million}", "5"),
        ("5", r"\$5\text{ hundred thousand dollars}"),
        ("5", "5 million"),
        ("5", r"5\text{ dozen}"),
        (r"2\pi", r"2\pi\text{ thousand}"),
        ("4.67", "4.66=4.67"),
        ("1,2", r"1, 2\text{ million}"),
        ("5", "3=5"),
        ("5", "x=3=5"),
        ("x=5", "3=5"),
        ("5", "3+3=5"),
        (r"\sqrt{2}", r"3=\sqrt{2}"),
        ("5", r"3=5\text{ cm}"),
    ],
)
def test_other_answers(gold, found):
    assert not same_answer(gold, found)


@pytest.mark.parametrize(
    ("chain", "backwards", "others"),
    [
        (r"1 < x \le 3", r"3 \ge x > 1", (r"3 \le x < 1", r"3 > x \ge 1", r"3 \ge x > 2")),
        ("1<x<3", "3 > x > 1", ("3 < x < 1", "1 > x > 3", "0 < x < 3")),
        ("a<b<c", "c > b > a", ("c<b<a", "a<c<b")),
        (r"-1 \ge y \ge -5", r"-5 \le y \le -1", (r"-5 \ge y \ge -1", r"-5 \le y < -1")),
    ],
)
def test_a_chain_of_relations_may_be_read_from_its_end_with_the_signs_turned(chain, backwards, others):
    assert same_answer(chain, backwards)
    assert same_answer(backwards, chain)
    assert [other for other in others if same_answer(chain, other)] == []


@pytest.mark.parametrize(
    ("gold", "found", "other"),
    [
        ("500000", r"5\text{ hundred thousand}", r"5\text{ thousand}"),
        ("3000000000", r"3\text{ thousand million}", r"3\text{ million}"),
        (r"-1\frac{1}{2}", "-1.5", "1.5"),
        (r"-\frac{3}{2}", r"-1\frac{1}{2}", r"1\frac{1}{2}"),
    ],
)
def test_number_words_multiply_and_mixed_numbers_keep_their_sign(gold, found, other):
    assert same_answer(gold, found)
    assert not same_answer(gold, other)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Since $x=3$, the answer is 42.", "42"),
        ("The answers are $1$ and $2$. Note that $7$ is none.", "1,2"),
        ("We see $a=4$. Answer: $5$, because $6>5$", "5"),
        ("It is \\(7\\).", "7"),
        ("The final answer is\n$$\\frac{1}{2}$$", "0.5"),
        ("ANSWER: 12", "12"),
        ("so there are 1,234 of them", "1234"),
    ],
)
def test_answers_that_are_not_boxed(text, found):
    assert score(found, text) == 1
    assert score("987654", text) == 0


def test_a_formula_far_behind_the_word_answer_is_not_the_answer():
    text = f"The answer is 42. {'We have looked at every case. ' * 5}Note that $7$ is prime."
    assert score("42", text) == 1
    assert score("7", text) == 0


def test_canonical_and_number():
    assert canonical_latex(r"\left( \dfrac12 ,\; \sqrt 3 \right) .") == r"(\frac{1}{2},\sqrt{3})"
    assert canonical_latex(r"\pi r^{2}") == r"\pi r^2"
    assert canonical_latex(r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}") == r"\begin{pmatrix}1\\2\end{pmatrix}"
    assert read_number("-3.50") == -7 / 2
    assert read_number("1/0") is read_number("x") is read_number("") is read_number("9" * 10_000) is None


def test_the_value_that_checks_changes_is_right():
    assert value(r"\frac{14}{3}", 0) == pytest.approx(14 / 3)
    assert value(r"3\sqrt{13}", 0) == pytest.approx(10.816653826)
    assert value(r"2\pi", 0) == pytest.approx(6.283185307)
    assert value("6-5i", 0) == 6 - 5j
    assert value(r"\text{odd}", 0) is None


@pytest.mark.parametrize("text", hostile(64, seed=3))
def test_hostile_strings_are_scored_in_time(text):
    started = time.process_time()
    assert score(r"\frac{1}{7}", text) == 0
    assert time.process_time() - started < 10


async def test_built_in_verifiers_have_a_limit_of_memory_and_a_users_reward_has_none(tmp_path):
    (tmp_path / "reward.py").write_text(
        "import resource\nfrom engine.types import Score\n"
        "def reward(prompt, responses): return [float(resource.getrlimit(resource.RLIMIT_AS)[0]) for _ in responses]\n"
    )
    response = Response(
        token_ids=(),
        logprobs=(),
        versions=(),
        loss_mask=(),
        finish_reason="stop",
        text="\\boxed{x}",
        seed=0,
        instance="",
    )
    async with verifiers(f"{tmp_path / 'reward.py'}:reward") as pool:
        assert (await pool.score(Prompt("id", "", "x", ()), [response]))[0].value == resource.getrlimit(
            resource.RLIMIT_AS
        )[0]
    async with verifiers("math") as pool:
        # the process that the pool knows guards the one that computes, which has the limit
        guards = [worker._child.pid for worker in pool._workers]
        computing = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in guards]
        processes = [Path("/proc", each[0]) for each in computing]
        limits = [re.search(r"Max address space +(\d+)", (one / "limits").read_text())[1] for one in processes]
        peaks = [re.search(r"VmPeak:\s+(\d+) kB", (one / "status").read_text())[1] for one in processes]
    for limit, peak in zip(limits, peaks, strict=True):  # of what is taken after the libraries are loaded
        assert MEMORY + 2**20 < int(limit) <= MEMORY + int(peak) * 1024


def test_a_response_that_takes_all_memory_scores_zero(monkeypatch):
    def fill(gold, found):
        raise MemoryError

    monkeypatch.setattr("engine.reward.verifiers.same_answer", fill)
    found = load_reward("exact") and math(
        Prompt("id", "", "7", ()),
        Response(
            token_ids=(),
            logprobs=(),
            versions=(),
            loss_mask=(),
            finish_reason="stop",
            text="\\boxed{8}",
            seed=0,
            instance="",
        ),
    )
    assert found.value == 0
    assert found.detail.startswith("MemoryError")


@pytest.mark.slow
def test_a_sample_of_real_answers():
    folder = os.environ.get("METRONOME_REAL_DATA")
    if not folder:
        pytest.skip("METRONOME_REAL_DATA is unset: the real problem sets are not part of the project")
    sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "benchmarks"))
    from verifier import run

    found = asyncio.run(run(sorted(Path(folder).glob("*.json")), rows=40, strings=96, show=0))
    for name in ("aime24", "amc", "deepscaler_aime_1983_2023", "math500", "math_train"):
        assert found[name]["all_spellings"] >= 0.99, found[name]
        assert found[name]["changes_matched"] == 0, found[name]
        assert found[name]["changes"] > 3 * found[name]["rows"]
    assert found["hostile"]["strings"] == 96
    assert "error" not in found["hostile"]
    assert found["hostile"]["timeouts"] == 0, found["hostile"]  # none hangs: the limit of ten seconds ended no call
    assert found["worker_peak_mib"] < 512
