"""What lies and asks beside our own trainer: a store of bodies, and programs."""

import asyncio

import msgspec
import numpy as np
import pytest

from engine.client.service import ServiceClient
from engine.errors import BadInput, MetronomeError, ServiceConflict, StoreError
from engine.orchestrator.server import Server
from engine.wire.columns import Column, open_scores, pack_values
from engine.wire.messages import (
    Failure,
    Heartbeat,
    InitEngines,
    Lease,
    MayPublish,
    PutPrompts,
    ReplayProgress,
    Report,
    StageFailed,
    Window,
    WriteColumns,
    Written,
)
from support.planes import LIMIT_S, leased, ready, row, watch, work


class Bodies:
    """A store that keeps the rows, and can lose them."""

    def __init__(self):
        self.rows = {}

    async def put_columns(self, row):
        self.rows[row.step, row.index] = row
        return row.with_columns([Column(column.name, column.digest, b"") for column in row.columns])

    async def get_columns(self, rows):
        try:
            return [row.with_columns(self.rows[row.step, row.index].columns) for row in rows]
        except KeyError as lost:
            raise StoreError(f"unit 1 has lost {lost}") from None

    def clear_step(self, step):
        self.rows = {at: row for at, row in self.rows.items() if at[0] != step}


@pytest.mark.parametrize("record", [False, True])
async def test_a_lease_is_given_with_the_bodies_that_lie_in_a_store_which_forgets_them_with_the_step(conduct, record):
    bodies = Bodies()
    plane, come = await conduct(1, store=bodies, record=record, timeout_s=100)
    come.put_nowait(0)
    window = await leased(plane)
    assert window.rows == (row(0),)
    assert not any(column.body for column in plane.steps.rows(0)[0].columns)
    plane.steps.end(0)
    assert bodies.rows == {}


async def test_a_unit_that_has_lost_a_row_ends_the_run_by_name(conduct):
    bodies = Bodies()
    plane, come = await conduct(2, store=bodies, timeout_s=100)
    come.put_nowait(0)
    come.put_nowait(1)
    await leased(plane)
    bodies.rows.clear()
    with pytest.raises(StoreError, match="unit 1 has lost"):
        await leased(plane)
    assert isinstance(plane.failure, StoreError)


# programs beside a trainer of ours ------------------------------------------------------------------


async def test_a_program_gets_no_groups_of_our_trainer_and_begins_no_run_in_its_folder(conduct, tmp_path):
    plane, come = await conduct(1)
    come.put_nowait(0)
    (tmp_path / "steps.jsonl").write_text('{"step": 0}\n')
    for request in (ready(0), Heartbeat(), PutPrompts(step=1), Lease(budget=100), MayPublish(version=0)):
        with pytest.raises(ServiceConflict, match="^" + type(request).__name__ + ": the run has its own trainer"):
            await plane.answer(request, ours=False)
    assert (tmp_path / "steps.jsonl").read_text() == '{"step": 0}\n'
    assert await work(plane, 0) == [0]


OF_RANKS = [
    Lease(budget=100, replica_group=-1),
    Lease(budget=100, replica_group=2),
    PutPrompts(step=0, replica_group=2),
    ready(-1),
    msgspec.structs.replace(ready(0), replica_groups=0),
    msgspec.structs.replace(ready(0), replica_groups=1_000_000),
    msgspec.structs.replace(ready(0), prompt_position=-1),
    Report(step=0, figures={}),
    ReplayProgress(step=0, done=True),
    StageFailed(error=Failure.of(BadInput("no"))),
]


@pytest.mark.parametrize("request_", OF_RANKS)
async def test_a_program_can_not_name_what_only_ranks_have_and_changes_nothing_by_trying(conduct, request_, tmp_path):
    """A lease of the replica group -1 gave a later group's rows, then the same again, and never the first ones."""
    plane, come = await conduct(1, trains=False)
    come.put_nowait(0)
    with pytest.raises(
        BadInput, match=f"^{type(request_).__name__}.*(only the run's own|the trainer has 2|expected|negative)"
    ):
        await plane.answer(request_, ours=False)
    lease = await leased(plane)
    assert [row.index for row in lease.rows] == [0]
    assert plane.failure is None
    assert not (tmp_path / "steps.jsonl").exists()


async def test_a_program_acknowledges_no_lease_of_another_stage(conduct):
    plane, come = await conduct(1, stages={"judge": {"needs": ["responses"], "gives": ["mark"]}})
    come.put_nowait(0)
    own = await plane.answer(Lease(budget=100, stage="judge"), ours=False)
    marks = Written(0, (pack_values("mark", np.zeros(len(own.rows[0].lengths))),))
    await plane.answer(WriteColumns(stage="judge", lease=own.lease, rows=(marks,)), ours=False)
    window = await leased(plane)
    with pytest.raises(ServiceConflict, match=f"lease {window.lease} is one of the stage 'train', not of 'judge'"):
        await plane.answer(Lease(budget=0, stage="judge", done=(window.lease,)), ours=False)


async def test_what_programs_ask_hides_no_trainer_that_hangs(conduct):
    plane, _ = await conduct(2)

    async def ask():
        while True:
            await plane.answer(InitEngines())
            await asyncio.sleep(LIMIT_S / 10)

    asking = asyncio.create_task(ask())
    async with asyncio.timeout(LIMIT_S + 3):
        assert "no sign of life from the trainer" in str(await watch(plane))
    asking.cancel()


async def test_only_the_columns_that_values_are_read_from_travel(conduct, tmp_path):
    judge = {"needs": ["responses"], "gives": ["mark"], "reward_weight": 0.5}
    plane, come = await conduct(3, trains=False, stages={"judge": judge}, micro_batch_tokens=1)
    for index in range(3):
        come.put_nowait(index)
    server = Server(plane.config)
    async with server.listening(tmp_path):
        server.serve(plane)
        await asyncio.to_thread(judge_and_read, tmp_path)


def judge_and_read(folder):
    with ServiceClient.init_engines(folder) as client:
        for _ in range(3):
            lease = client.get_experience_data(0, "judge", stage="judge", columns=["responses"])
            assert [row.names for row in lease.rows] == [{"responses"}]
            client.write(lease, {"mark": [np.full(len(row.lengths), 2.0) for row in lease.rows]})
        lease = client.get_experience_data(0, columns=["scores"])
        assert [row.names for row in lease.rows] == [{"scores", "mark"}]
        (given,) = lease.groups
        (own,) = (open_scores(row) for row in lease.rows)
        assert [score.value for score in given.scores] == [score.value + 1.0 for score in own]
        given = []
        ask = client.connection.ask
        client.connection.ask = lambda request: given.append(ask(request)) or given[-1]
        client.get_experience_data(0, columns=["prompt"])
        client.get_experience_data(0, columns=["responses", "logprobs"])
        windows = [reply for reply in given if isinstance(reply, Window)]
        assert [one.names for window in windows for one in window.rows] == [{"prompt"}, {"responses", "logprobs"}]


async def test_an_unexpected_exception_in_a_step_of_a_service_ends_the_step_by_name_and_not_the_service(conduct):
    plane, come = await conduct(1, trains=False)
    come.put_nowait("no index")
    with pytest.raises(MetronomeError, match="step 0: its generation failed, unexpected TypeError: .*put its"):
        await leased(plane)
    await plane.check_run()
    assert (plane.failure, plane.steps.numbers) == (None, [])
    come.put_nowait(0)
    await plane.answer(PutPrompts(step=0), ours=False)
    assert [row.index for row in (await leased(plane)).rows] == [0]
