"""The parent's side of the parallel tests: starts the ranks of a world once for all its cases, and compares.

The ranks meet through stores of ours, as under torch elastic: one for each layout, since each has process groups of its
own.
"""

import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

import torch
from torch.distributed import TCPStore

from support.parallel.cases import CONTEXT, VOCABULARY, Case
from support.parallel.reference import Expected, expect
from support.parallel.two_ranks import rank_environment
from support.tiny_models import LLAMA3_ROPE, save

RANK = Path(__file__).with_name("rank.py")
VARIANTS = {"llama": {"rope_parameters": LLAMA3_ROPE}}


class Worlds:
    """Results of cases, by name; `folder` holds models and results, `rank` is the command of a rank."""

    def __init__(self, folder: Path, rank: Sequence[str] = (sys.executable, "-W", "ignore", str(RANK))) -> None:
        self.folder = folder
        self._rank = rank
        self.expected = cache(self._expected)

    def _expected(self, model: str, groups: str, temperature: float, loss: str) -> Expected:
        return expect(self.folder / model, groups, temperature, loss)

    def models(self, cases: list[Case]) -> None:
        """Make the cases' models, each once."""
        for case in cases:
            folder = self.folder / case.model
            if case.kind != "logprobs" and not folder.exists():
                save(
                    folder,
                    case.kind,
                    vocab_size=VOCABULARY,
                    max_position_embeddings=CONTEXT,
                    tie_word_embeddings=case.tied,
                    **VARIANTS.get(case.kind, {}),
                    **case.sizes,
                )

    def run(self, cases: list[Case], timeout_s: float) -> dict[str, "Outcome"]:
        """Run cases of one world size, all in the same processes; layouts are put up in the order in which they come.

        After a case that ends a rank, or hangs, new processes go on with the next.
        """
        assert len({case.name for case in cases}) == len(cases)
        self.models(cases)
        deadline = time.monotonic() + timeout_s
        found: dict[str, Outcome] = {}
        while cases:
            place = self.folder / f"ranks-{len(list(self.folder.iterdir()))}"
            failure = self._start(place, cases, deadline)
            outcomes = [Outcome(place, number, case.world, failure) for number, case in enumerate(cases)]
            done = sum(outcome.finished for outcome in outcomes) + 1 if time.monotonic() < deadline else len(cases)
            found |= {case.name: outcome for case, outcome in zip(cases[:done], outcomes, strict=False)}
            cases = cases[done:]
        return found

    def _start(self, place: Path, cases: list[Case], deadline: float) -> str:
        (world,) = {case.world for case in cases}
        place.mkdir()
        for model in {case.model for case in cases}:
            (place / model).symlink_to(self.folder / model)
        layouts = [layout for layout, _ in groupby(cases, lambda case: case.layout)]
        stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in layouts]
        (place / "cases.pickle").write_bytes(pickle.dumps((cases, [store.port for store in stores])))
        ranks = [_start(self._rank, place, rank, world) for rank in range(world)]
        try:
            for case in cases:  # meanwhile
                if case.kind != "logprobs":
                    self.expected(case.model, case.groups, case.temperature, case.loss)
            return _wait(ranks, place, deadline)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


class Outcome:
    """What the ranks of one case found."""

    def __init__(self, place: Path, number: int, world: int, failure: str) -> None:
        self._paths = [place / f"{number}-{rank}.pt" for rank in range(world)]
        self._failure = failure

    @property
    def finished(self) -> bool:
        """On every rank."""
        return all(path.exists() for path in self._paths)

    def ranks(self) -> list[dict]:
        """Every rank's result. Fails with the ranks' last words where the case was not reached."""
        assert self.finished, f"this case was not finished\n{self._failure}"
        return [torch.load(path) for path in self._paths]


def check(case: Case, outcome: Outcome, expected: Expected) -> dict[str, float]:
    """Compare every rank's result with the reference's; the largest errors found."""
    ranks = outcome.ranks()
    figures = ranks[0]["figures"]
    assert all(rank["figures"] == figures for rank in ranks), f"{case.name}: the ranks report different figures"
    errors = {f"log-probabilities of {key}": error for key, error in _logprob_errors(ranks, expected).items()}
    errors |= {
        name: abs(figures[name] - value) / scale
        for name, value, scale in (
            ("loss", expected.loss, expected.scale),
            ("entropy", expected.entropy, expected.entropy),
        )
    }
    errors["gradient norm"] = max(abs(rank["norm"] - expected.norm) / expected.norm for rank in ranks)
    if case.loss == "full":
        errors["kl"] = abs(figures["kl"] - expected.kl) / expected.kl
    if case.loss != "plain":
        assert abs(figures["clip_fraction"] - expected.clipped) < 1e-6, f"{case.name}: share of clipped tokens"
    if not case.settings.get("train.distributed_optimizer"):  # there no rank has the whole gradient
        errors |= _gradient_errors(ranks, expected)
    bad = {name: error for name, error in errors.items() if not error <= case.tolerance}
    assert not bad, f"{case.name}: relative errors above {case.tolerance:g}: " + ", ".join(
        f"{name} {error:.2e}" for name, error in sorted(bad.items(), key=lambda item: -item[1])
    )
    return errors


def _logprob_errors(ranks: list[dict], expected: Expected) -> dict[tuple[int, int], float]:
    """Relative errors by (group, response), after putting parts together; every response must be there exactly once."""
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    rows: dict[tuple, list] = {}
    for rank in ranks:
        for members, kept, logprobs, old in rank["logprobs"]:
            rows.setdefault(tuple(members), []).append((kept, logprobs, old))
    for members, parts in rows.items():
        kept = torch.cat([part[0] for part in parts])
        assert torch.equal(kept.sort().values, torch.arange(sum(length for *_, length in members))), (
            f"tokens {kept.sort().values.tolist()} of the row of {members} were scored"
        )
        columns = [torch.cat([part[which] for part in parts])[kept.argsort()] for which in (1, 2)]
        lengths = [length for *_, length in members]
        for (group, number, _), *pair in zip(members, *(column.split(lengths) for column in columns), strict=True):
            assert (group, number) not in found, f"response {number} of group {group} was trained twice"
            found[group, number] = pair
    assert found.keys() == expected.logprobs.keys(), f"trained (group, response): {sorted(found)}"
    return {
        key: max(
            _error(mine, theirs) for mine, theirs in zip(pair, (expected.logprobs[key], expected.old[key]), strict=True)
        )
        for key, pair in found.items()
    }


def _gradient_errors(ranks: list[dict], expected: Expected) -> dict[str, float]:
    """Relative errors by tensor, the worst of all ranks that have it; together the stages must have every tensor."""
    errors: dict[str, float] = {}
    for rank in ranks:
        for name, grad in rank["gradients"].items():
            errors[name] = max(errors.get(name, 0.0), _error(grad, expected.gradients[name]))
    assert errors.keys() == expected.gradients.keys(), (
        f"gradients: {errors.keys() ^ expected.gradients.keys()} on one side only"
    )
    return errors


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over the reference's; where that is 0, of the difference."""
    assert ours.shape == theirs.shape, f"shapes {list(ours.shape)} and {list(theirs.shape)}"
    return float((ours.double() - theirs.double()).norm() / (theirs.double().norm() or 1.0))


def _start(command: Sequence[str], place: Path, rank: int, world: int) -> subprocess.Popen:
    return subprocess.Popen(
        [*command, str(place)],
        env=rank_environment(rank, world),
        stdout=(place / f"{rank}.log").open("w"),
        stderr=subprocess.STDOUT,
    )


def _wait(ranks: list[subprocess.Popen], place: Path, deadline: float) -> str:
    """Until all ranks have ended well: ""; until one ends otherwise, or the time is over: what they said last."""
    while (codes := [process.poll() for process in ranks]) != [0] * len(ranks):
        if any(codes) or time.monotonic() > deadline:
            time.sleep(0.5)  # the others' last words
            said = "\n".join(f"rank {path.stem}: {path.read_text()[-2500:]}" for path in sorted(place.glob("*.log")))
            return f"ranks ended with {codes}, None is still running\n{said}"
        time.sleep(0.05)
    return ""
