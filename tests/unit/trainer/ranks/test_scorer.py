"""A scorer on one rank: what it computes is what the trainer's own reference gives, and how it goes through a stage."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from engine import platform
from engine.errors import MetronomeError, ServiceConflict
from engine.run.trace import Trace, read_spans
from engine.trainer.ranks.rank_group import RankGroup
from engine.wire.columns import REFERENCE, open_values, pack_group
from engine.wire.messages import EndOfRun, Lease, StillWaiting, Taken, Window, WriteColumns
from support import tiny_models
from support.policies import a_group, a_policy
from support.runs import config_of

pytestmark = pytest.mark.usefixtures("megatron")
STAGE = {"stages.reference.tensor": 1, "algorithm.kl_coef": 0.01}


@pytest.fixture
def made(settings, tmp_path, tiny_model):
    """Makes a scorer of the tiny model."""
    from engine.trainer.ranks.scorer import Scorer

    def make(column=REFERENCE, **changes):
        return Scorer(
            config=config_of(settings | STAGE | {key.replace("__", "."): value for key, value in changes.items()}),
            platform=platform.get_platform("cpu"),
            ranks=RankGroup(),
            model=tiny_model,
            stage="reference",
            column=column,
            trace=Trace(tmp_path / "trace", "scorer-reference-0"),
        )

    return make


class FakePlane:
    """Answers leases with what is given, and keeps what is written."""

    def __init__(self, *replies, refuses=()):
        self.replies = list(replies)
        self.refuses = refuses
        self.leases = []
        self.written = []

    def ask(self, request):
        if isinstance(request, Lease):
            self.leases.append(request)
            if isinstance(reply := self.replies.pop(0), MetronomeError):
                raise reply
            return reply
        assert isinstance(request, WriteColumns)
        if request.lease in self.refuses:
            raise ServiceConflict(f"lease {request.lease}: its rows were given to another")
        self.written.append(request)
        return Taken(new=True)


def window(lease, *groups):
    return Window(step=0, rows=tuple(pack_group(group).only(["prompt", "responses"]) for group in groups), lease=lease)


@pytest.mark.parametrize("budget", [4096, 60, 20])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_hugging_faces_laid_end_to_end(made, tiny_model, budget, temperature):
    """Also where a group is split into several rows, and with an empty response."""
    scorer = made(train__micro_batch_tokens=budget, rollout__temperature=temperature)
    groups = [a_group(seed=1), a_group((4, 0, 16, 1), index=3, seed=2), a_group((0, 0), index=1, seed=3)]
    found = scorer.score(groups)
    assert found.keys() == {0, 3, 1}
    model = tiny_models.reference(tiny_model)
    for group in groups:
        parts = [
            tiny_models.reference_logprobs(model, group.prompt.token_ids, one.token_ids, temperature)
            for one in group.responses
        ]
        assert found[group.index].dtype == np.float32
        assert found[group.index] == pytest.approx(torch.cat(parts).numpy(), abs=1e-5)


@pytest.mark.parametrize("budget", [4096, 60, 20])
def test_scores_are_bit_for_bit_those_of_the_trainers_own_reference(settings, made, budget):
    from engine.trainer.micro_batches import micro_batches

    groups = [a_group(index=i, seed=i, lengths=(5 + i, 3, 9, 2 + i)) for i in range(4)]
    policy = a_policy(settings, train__micro_batch_tokens=budget, algorithm__kl_coef=0.01)
    found = made(train__micro_batch_tokens=budget).score(groups)
    own = policy.frozen_logprobs("reference", micro_batches(groups, policy.packing, policy.group_advantages))
    scored = [replace(group, columns={REFERENCE: found[group.index]}) for group in groups]
    batches = micro_batches(scored, policy.packing, policy.group_advantages)
    assert [batch.reference.tolist() for batch in batches] == [scores.tolist() for scores in own]


def test_it_goes_through_its_stage_until_the_run_is_over(made, tmp_path):
    plane = FakePlane(StillWaiting(), window(7, a_group(), a_group(index=1)), window(9, a_group(index=2)), EndOfRun())
    scorer = made()
    scorer.serve(plane)
    assert {(lease.stage, lease.replica_group, lease.step) for lease in plane.leases} == {("reference", 0, None)}
    assert plane.leases[0].budget == config_of({}).train.micro_batch_tokens
    assert [(one.stage, one.lease, [row.index for row in one.rows]) for one in plane.written] == [
        ("reference", 7, [0, 1]),
        ("reference", 9, [2]),
    ]
    row = pack_group(a_group(index=2)).with_columns(plane.written[1].rows[0].columns)
    assert open_values(row, REFERENCE).tolist() == scorer.score([a_group(index=2)])[2].tolist()
    spans = read_spans(tmp_path / "trace")
    assert [(span["name"], span["lane"], span["groups"], span["tokens"]) for span in spans] == [
        ("score", "scorer-reference-0", [0, 1], 2 * (9 + 27)),
        ("score", "scorer-reference-0", [2], 9 + 27),
    ]


def test_the_column_and_the_budget_are_what_it_is_told(made):
    plane = FakePlane(window(1, a_group()), EndOfRun())
    made(column="teacher_logprobs", stages__reference__budget=50).serve(plane)
    assert [column.name for column in plane.written[0].rows[0].columns] == ["teacher_logprobs"]
    assert plane.leases[0].budget == 50


def test_it_leases_the_routes_where_they_are_replayed(made):
    for changes, columns in (
        ({}, ("prompt", "responses")),
        ({"algorithm__routing_replay": True, "rollout__engine": "vllm"}, ("prompt", "responses", "routes")),
    ):
        plane = FakePlane(EndOfRun())
        made(**changes).serve(plane)
        assert plane.leases[0].columns == columns


def test_what_another_lease_replaced_is_dropped(made, capsys):
    plane = FakePlane(window(1, a_group()), window(2, a_group(index=1)), EndOfRun(), refuses=[1])
    made().serve(plane)
    assert [one.lease for one in plane.written] == [2]
    assert "lease 1: its rows were given to another" in capsys.readouterr().err


def test_the_error_that_stops_the_run_ends_it_and_a_damaged_row_is_named(made):
    with pytest.raises(MetronomeError, match="the pool gave up"):
        made().serve(FakePlane(MetronomeError("the pool gave up")))
    given = window(1, a_group())
    damaged = [msgspec.structs.replace(column, body=column.body + b"x") for column in given.rows[0].columns]
    rows = (msgspec.structs.replace(given.rows[0], columns=tuple(damaged)),)
    with pytest.raises(MetronomeError, match="step 0, group 0"):
        made().serve(FakePlane(msgspec.structs.replace(given, rows=rows)))
