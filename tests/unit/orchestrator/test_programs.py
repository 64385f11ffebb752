"""Rollouts of several turns: real program processes, scripted instances."""

from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from engine.config import Config
from engine.data.loader import sampling_seed, turn_seed
from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput, RewardError
from engine.orchestrator.pool import health
from engine.orchestrator.producer import Producer
from engine.orchestrator.program_pool import ProgramPool
from engine.types import Prompt
from support.pool_world import PROMPTS, World
from support.runs import ROOT
from support.scripted import Scores, tokens_of

FILE = f"{ROOT}/tests/support/programs.py"


@asynccontextmanager
async def world(folder, tiny_model, program, reward=None, group_size=4, **rollout):
    """A world whose producer runs a program; its responses have up to 16 tokens."""
    rollout = {"program": f"{FILE}:{program}", **rollout}
    async with AsyncExitStack() as stack:
        made = World(folder, stack, synced=False, **rollout)
        config = made.pool.config.model_copy(update={"reward": Config(reward=reward or {}).reward})
        programs = ProgramPool(config)
        stack.callback(programs.close)
        await programs.start(Tokenizer(tiny_model).for_verifiers)
        made.producer = Producer(
            pool=made.pool,
            verifier=Scores(),
            sampling=made.producer._sampling,
            group_size=group_size,
            seed=0,
            trace=made.trace,
            programs=programs,
        )
        await stack.enter_async_context(health.HealthMonitor(made.pool))
        stack.push_async_callback(made.pool.close)
        await made.pool.connect_instances()
        await made.join("a")
        yield made


def expected(prompt, number):
    """(tokens, mask, score) of a response of `doubling`."""
    seed = sampling_seed(0, 0, prompt.id, number)
    first = tokens_of(list(prompt.token_ids), seed)[:3]
    between = list(f"[{len(first)}]".encode())
    second = tokens_of([*prompt.token_ids, *first, *between], turn_seed(seed, 1))[:4]
    return [*first, *between, *second], [1] * len(first) + [0] * len(between) + [1] * len(second), sum(second) % 2


async def test_every_turn_continues_the_sampled_tokens_and_what_was_appended_is_not_trained(tmp_path, tiny_model):
    async with world(tmp_path, tiny_model, "doubling") as w:
        await w.run()
    assert len(w.groups) == len(PROMPTS)
    for group in w.groups:
        for number, response in enumerate(group.responses):
            tokens, mask, value = expected(group.prompt, number)
            assert list(response.token_ids) == tokens
            assert list(map(int, response.loss_mask)) == mask
            assert [p for p, m in zip(response.logprobs, mask, strict=True) if not m] == [0.0] * mask.count(0)
            assert len(response.versions) == 1
            score = group.scores[number]
            assert score.value == value
            assert score.metrics["episode/turns"] == 2
            assert score.metrics["episode/environment_tokens"] == mask.count(0)
            assert score.metrics["calls"] == 1


async def test_a_program_of_one_turn_gives_the_responses_and_scores_of_no_program(tmp_path, tiny_model):
    async with world(tmp_path, tiny_model, "one_turn") as w:
        await w.run()
        w.check_complete()


async def test_a_response_ends_where_no_token_or_turn_is_left(tmp_path, tiny_model):
    async with world(tmp_path, tiny_model, "endless", max_turns=3) as w:
        await w.run(PROMPTS[:1])
    for response in w.groups[0].responses:
        assert len(response.token_ids) <= 16
        assert response.loss_mask[len(response.token_ids) - 1]  # nothing untrained follows the last turn
        assert response.finish_reason == "length"


async def test_a_program_that_misbehaves_fails_alone(tmp_path, tiny_model):
    kinds = ["raise", "sleep", "hang", "die", "nonsense", "wrong token", "well"]
    prompts = [Prompt(kind, kind, "", (1, 2, 3)) for kind in kinds]
    reward = {"on_error": "zero", "on_timeout": "exclude"}
    async with world(
        tmp_path, tiny_model, "misbehaves", reward, program_timeout_s=1.0, group_size=1, concurrency=8
    ) as w:
        await w.run(prompts, within_s=200)
    found = {group.prompt.id: group for group in w.groups}
    said = {kind: found[kind].scores[0].detail for kind in kinds}
    assert "ValueError: no such tool" in said["raise"]
    assert "programs.py:" in said["raise"]
    assert "not over within 1 s" in said["sleep"]
    assert "not over within 1 s" in said["hang"]
    assert "3 processes died of it" in said["die"]
    assert "returned 'much'" in said["nonsense"]
    assert "appended tokens: token 0 is 1000000" in said["wrong token"]
    assert [score.status for score in found["hang"].scores] == ["timeout"]
    assert all(score.excluded for score in found["sleep"].scores)
    assert [score.status for score in found["well"].scores] == ["ok"]


async def test_a_failure_stops_the_run_where_the_recipe_says_so(tmp_path, tiny_model):
    async with world(tmp_path, tiny_model, "misbehaves", {"on_error": "stop"}) as w:
        with pytest.raises(RewardError, match=r'rollout\.program = ".*:misbehaves", prompt raise: raised ValueError'):
            await w.run([Prompt("raise", "raise", "", (1, 2, 3))])


async def test_a_function_that_is_no_program_is_refused(tmp_path, tiny_model):
    pool = ProgramPool(Config(rollout={"program": f"{ROOT}/tests/support/rewards.py:even"}))
    try:
        with pytest.raises(BadInput, match=r"expected async def even\(prompt, chat\)"):
            await pool.start(Tokenizer(tiny_model).for_verifiers)
    finally:
        pool.close()
