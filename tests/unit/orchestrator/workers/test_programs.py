"""Rollouts of several turns: real program processes, scripted instances."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from engine.config import Config
from engine.data.loader import sampling_seed, turn_seed
from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput, RewardError
from engine.orchestrator.pool import health
from engine.orchestrator.producer import Producer
from engine.orchestrator.run_events import RunEvents
from engine.orchestrator.workers import program_pool
from engine.orchestrator.workers.program_pool import ProgramPool
from engine.types import Prompt
from support import scripted
from support.pool_world import PROMPTS, World
from support.runs import ROOT, wait_for
from support.scripted import Scores, tokens_of

FILE = f"{ROOT}/tests/support/programs.py"
STOPS = [49_999]
"""Tokens of rollout.stop. No instance samples them."""


@asynccontextmanager
async def world(folder, tiny_model, program, reward=None, group_size=4, room=16, verifier=None, mixed=False, **rollout):
    """A world whose producer runs a program; its responses have up to `room` tokens. `mixed`: as in mode "bounded"."""
    rollout = {"program": program if ":" in program else f"{FILE}:{program}", **rollout}
    async with AsyncExitStack() as stack:
        made = World(folder, stack, synced=False, **rollout)
        config = made.pool.config.model_copy(update={"reward": Config(reward=reward or {}).reward})
        programs = ProgramPool(config)
        stack.callback(programs.close)
        await programs.start(Tokenizer(tiny_model).for_verifiers)
        made.producer = Producer(
            pool=made.pool,
            verifier=verifier or Scores(),
            sampling=replace(
                made.producer._sampling,
                max_new_tokens=room,
                vocabulary=50_000,
                stop_token_ids=tuple(STOPS),
                mixed=mixed,
            ),
            group_size=group_size,
            seed=0,
            trace=made.trace,
            notices=RunEvents(lambda stage, text: made.told.append(text)),
            programs=programs,
        )
        made.told = []
        await stack.enter_async_context(health.HealthMonitor(made.pool))
        stack.push_async_callback(made.pool.close)
        await made.pool.connect_instances()
        made.instance, _ = await made.join("a")
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
            assert response.finish_reason == "stop"  # the limit of a turn is none of the response
            score = group.scores[number]
            assert score.value == value
            assert score.metrics["episode/turns"] == 2
            assert score.metrics["episode/environment_tokens"] == mask.count(0)
            assert score.metrics["calls"] == 1


@pytest.mark.parametrize(("mixed", "asked_times", "versions"), [(False, 4, ((0, 2),)), (True, 2, ((0, 1), (5, 2)))])
async def test_new_weights_between_two_turns_begin_a_response_again_but_in_bounded_mode(
    tmp_path, tiny_model, monkeypatch, mixed, asked_times, versions
):
    asked = []
    async with world(tmp_path, tiny_model, "doubling", group_size=1, mixed=mixed) as w:

        def answer(conversation, seed):
            asked.append(seed)
            w.instance.version = min(len(asked), 2)
            return [5, 6]

        monkeypatch.setattr(scripted, "tokens_of", answer)
        await w.run(PROMPTS[:1])
    assert list(w.groups[0].responses[0].token_ids) == [5, 6, *b"[2]", 5, 6]
    assert w.groups[0].responses[0].versions == versions
    assert asked == (asked[:2] * 2)[:asked_times]  # again with the same seeds


@pytest.mark.parametrize(
    ("program", "versions"),
    [
        ("doubling", ((0, 0), (1, 1), (6, 2))),
        ("prefilled", ((0, 0), (2, 1), (7, 2))),  # what stands before the first turn has the turn's version
    ],
)
async def test_each_token_keeps_the_version_that_it_was_sampled_under(
    tmp_path, tiny_model, monkeypatch, program, versions
):
    """New weights may come within a turn: here after the first token of each."""
    async with world(tmp_path, tiny_model, program, group_size=1) as w:

        def answer(*_):
            w.instance.version += 1
            return [5, 6]

        def spoil(reply):
            last = w.instance.version
            return reply | {"weight_versions": [[0, last - 1], [1, last]]}

        monkeypatch.setattr(scripted, "tokens_of", answer)
        w.instance.spoil = spoil
        await w.run(PROMPTS[:1])
    response = w.groups[0].responses[0]
    assert list(response.token_ids)[-7:] == [5, 6, *b"[2]", 5, 6]
    assert response.versions == versions


@pytest.mark.parametrize(("room", "context"), [(16, 64), (64, 16)])
async def test_a_turn_may_have_what_is_left_of_the_response_and_of_the_context(tmp_path, tiny_model, room, context):
    """And ends at rollout.stop besides its own."""
    limits = {"max_new_tokens": 8, "max_context": context}
    async with world(tmp_path, tiny_model, "greedy", group_size=1, room=room, **limits) as w:
        await w.run(PROMPTS[:1])
    first, last = w.instance.asked
    assert (first["max_tokens"], first["stop_token_ids"]) == (2, STOPS)
    assert last["stop_token_ids"] == [*STOPS, ord("x")]
    assert len(last["prompt"]) + last["max_tokens"] == min(len(PROMPTS[0].token_ids) + room, context)


@pytest.mark.parametrize("per_response", [True, False])
async def test_the_reward_scores_the_responses_that_the_program_does_not(tmp_path, tiny_model, per_response):
    async with world(tmp_path, tiny_model, "partly_scored", verifier=Scores(per_response)) as w:
        await w.run()
    counts = [len(response.token_ids) for group in w.groups for response in group.responses]
    scores = [score.value for group in w.groups for score in group.scores]
    assert scores == [0.25 if count % 2 else float(count) for count in counts]
    assert any({0.25} < {score.value for score in group.scores} for group in w.groups)


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


async def scores_of(w, *kinds):
    """The score of `misbehaves` by kind; all are run at once."""
    await w.run([Prompt(kind, kind.partition("#")[0], "", (1, 2, 3)) for kind in kinds], within_s=200)
    found = {group.prompt.id: group.scores[0] for group in w.groups}
    return {kind: found[kind] for kind in kinds}


def lenient(folder, tiny_model, **rollout):
    """A world with one process, in which a failure counts as 0 and a response that is too late is left out."""
    reward = {"on_error": "zero", "on_timeout": "exclude", "workers": 1, "environment": ["METRONOME_TEST_MARKS"]}
    return world(folder, tiny_model, "misbehaves", reward, group_size=1, concurrency=8, **rollout)


async def test_a_program_that_misbehaves_fails_alone(tmp_path, tiny_model):
    told = {
        "raise": ("error", r"raised ValueError: no such tool .*programs\.py"),
        "sleep": ("timeout", "not over within 3 s"),
        "nonsense": ("error", "returned 'much'"),
        "wrong token": ("error", "appended tokens: token 0 is 1000000"),
        "well": ("ok", "^$"),
    }
    async with lenient(tmp_path, tiny_model, program_timeout_s=3.0) as w:
        found = await scores_of(w, *told)
    for kind, (status, detail) in told.items():
        assert found[kind].status == status
        assert re.search(detail, found[kind].detail), found[kind]
        assert found[kind].excluded == (status == "timeout")


async def test_programs_whose_process_dies_begin_again_once_and_their_next_process_is_a_new_one(
    tmp_path, tiny_model, monkeypatch
):
    monkeypatch.setenv("METRONOME_TEST_MARKS", str(tmp_path))
    async with lenient(tmp_path, tiny_model, program_timeout_s=2.0) as w:
        once = await scores_of(w, "die once", "die once#2", "well", "well#2")
        assert {(one.status, one.metrics["episode/turns"]) for one in once.values()} == {("ok", 1.0)}
        assert "two processes died of it" in (await scores_of(w, "die"))["die"].detail
        monkeypatch.setattr(program_pool, "STOP_S", 0.5)
        hung = await scores_of(w, "hang", "raise")
        assert "not over within 2 s" in hung["hang"].detail
        assert (await scores_of(w, "well#3"))["well#3"].status == "ok"


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


THINKING = """\
{%- for m in messages -%}
{%- set kept = m.content.split('</think>')[-1].strip() if m.role == 'assistant' and not loop.last else m.content -%}
{{ '<' + m.role + '>' + (tools[0].name + ' ' if m.role == 'tool' else '') + kept + '</s>' }}
{%- endfor -%}
{{ '<assistant>' if add_generation_prompt }}"""
"""A template that leaves the thinking and the outer spaces out of earlier answers, as Qwen3's does."""
THOUGHT = b"<think>\xff</think> 2"


async def sampled_with_tool(folder, model, monkeypatch, *conversations, **rollout):
    """(tokens, mask) of a response of `with_tool` for each conversation of sampled turns, and what the run has said."""
    prompts = PROMPTS[: len(conversations)]
    left = {prompt.token_ids: list(turns) for prompt, turns in zip(prompts, conversations, strict=True)}
    asked = []

    def answer(conversation, _):
        asked.append(conversation)
        return left[tuple(conversation[:3])].pop(0)

    monkeypatch.setattr(scripted, "tokens_of", answer)
    async with world(folder, model, "with_tool", group_size=1, room=80, **rollout) as w:
        await w.run(prompts, within_s=60)
    responses = [group.responses[0] for group in sorted(w.groups, key=lambda group: group.index)]
    for prompt, response, turns in zip(prompts, responses, conversations, strict=True):
        assert [*prompt.token_ids, *response.token_ids][: -len(turns[-1])] in asked
    return [(list(one.token_ids), list(map(int, one.loss_mask))) for one in responses], w.told


@pytest.fixture
def thinking_model(tmp_path, tiny_model):
    folder = shutil.copytree(tiny_model, tmp_path / "thinking", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(THINKING)
    return folder


async def test_sampled_tokens_stay_where_the_template_rewrites_a_turn_and_the_run_says_so_once(
    tmp_path, thinking_model, monkeypatch
):
    between = b"</s><tool>calculator 4</s><assistant>"
    firsts = (b"2", THOUGHT, THOUGHT)
    found, told = await sampled_with_tool(
        tmp_path, thinking_model, monkeypatch, *([list(first), [50]] for first in firsts)
    )
    assert found == [([*first, *between, 50], [1] * len(first) + [0] * len(between) + [1]) for first in firsts]
    (line,) = [line for line in told if "would write an earlier turn" in line]
    assert "'<think>\ufffd</think> 2</s>" in line
    assert "as '2</s><tool>" in line


@pytest.mark.nightly
@pytest.mark.skipif(not (ROOT / "data/smollm2").exists(), reason="data/smollm2 is not made")
async def test_a_conversation_in_smollm2s_own_template(tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/smollm2")
    messages = [("user", "2+2"), ("assistant", "calculator: 2+2"), ("tool", "4"), ("assistant", "It is 4.")]
    text = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in messages], tokenize=False)
    whole = tokenizer.encode(text.split("<|im_start|>assistant\n", 1)[1].removesuffix("\n"))
    first = tokenizer.encode("calculator: 2+2<|im_end|>")
    last = tokenizer.encode("It is 4.<|im_end|>")
    (found,), told = await sampled_with_tool(tmp_path, ROOT / "data/smollm2", monkeypatch, [first, last])
    assert not any("would write an earlier turn" in line for line in told)
    between = [0] * (len(whole) - len(first) - len(last))
    assert found == (whole, [1] * len(first) + between + [1] * len(last))


def documented(folder):
    """A file with the examples of docs/programs.md."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/programs.md").read_text(), re.DOTALL)
    (folder / "examples.py").write_text("\n".join(blocks))
    return folder / "examples.py"


NUMBER = Random("p1").randrange(100)


@pytest.mark.parametrize(
    ("name", "problem", "answers", "environment", "score"),
    [
        ("program", "1+1=", ["3", "2"], [" Check it, then write the result again: "], 1.0),
        ("retry", "1+1=", ["3\n", "1\n", "2\n"], ["Wrong. Try again: "] * 2, 0.4),
        ("calculator", "237x682=", ["72", "38", "26", "634"], ["040;", "030;", "060#"], 1.0),
        ("game", "guess", ["-\n", f"{NUMBER - 1}\n", f"{NUMBER}\n"], ["less\n", "more\n"], 0.75),
    ],
)
async def test_the_examples_of_the_docs_and_the_calculator(
    tmp_path, tiny_model, monkeypatch, name, problem, answers, environment, score
):
    prompt = Prompt("p1", problem, answers[-1].strip(), (1, 2, 3))
    file = ROOT / "infra/recipes/calculator.py" if name == "calculator" else documented(tmp_path)

    def answer(conversation, _):
        text = bytes(conversation[3:]).decode()
        said = sum(text.count(one) for one in set(environment))
        return list(answers[said].encode())

    monkeypatch.setattr(scripted, "tokens_of", answer)
    async with world(tmp_path, tiny_model, f"{file}:{name}", group_size=1, room=80) as w:
        await w.run([prompt])
    (group,) = w.groups
    parts = [part for pair in zip(answers, [*environment, ""], strict=True) for part in pair]
    assert bytes(group.responses[0].token_ids).decode() == "".join(parts)
    mask = [place % 2 == 0 for place, part in enumerate(parts) for _ in part]
    assert list(map(bool, group.responses[0].loss_mask)) == mask
    assert group.scores[0].value == pytest.approx(score)


@pytest.mark.parametrize(
    ("failure", "version", "told"),
    [
        (web.HTTPInternalServerError, 0, "begun between "),
        (web.HTTPConflict, 0, "begun between "),  # paused, and then the same weights
        (web.HTTPConflict, 1, "begun between begun between "),
        (web.HTTPInternalServerError, 1, "begun between begun between "),  # another instance has other weights
    ],
)
async def test_an_instances_failure_repeats_its_turn_only(tmp_path, tiny_model, monkeypatch, failure, version, told):
    monkeypatch.setenv("METRONOME_TEST_MARKS", str(tmp_path))
    failed = []

    def fails_once(conversation, seed):
        if conversation[-1] == 7 and not failed:
            failed.append(1)
            w.instance.version = version
            raise failure
        return tokens_of(conversation, seed)

    monkeypatch.setattr(scripted, "tokens_of", fails_once)
    async with world(tmp_path, tiny_model, "counted", {"environment": ["METRONOME_TEST_MARKS"]}, group_size=1) as w:
        await w.run(PROMPTS[:1])
    prompt = PROMPTS[0]
    assert (tmp_path / prompt.id).read_text() == told
    seed = sampling_seed(0, 0, prompt.id, 0)
    first = tokens_of(list(prompt.token_ids), seed)[:1]
    second = tokens_of([*prompt.token_ids, *first, 7], turn_seed(seed, 1))
    assert list(w.groups[0].responses[0].token_ids) == [*first, 7, *second]
    assert w.groups[0].responses[0].versions == ((0, version),)


@pytest.mark.nightly
async def test_an_environment_of_gymnasium(tmp_path, tiny_model, monkeypatch):
    pytest.importorskip("gymnasium", reason="`pip install gymnasium` for the example in docs/examples")
    moves = [b"north\n", *(f"{move}\n".encode() for move in (1, 1, 2, 1, 2, 2))]

    def play(conversation, _):
        return list(moves[bytes(conversation[3:]).count(b"\n") // 2])

    monkeypatch.setattr(scripted, "tokens_of", play)
    lake = {"environment": "FrozenLake-v1", "arguments": {"is_slippery": False}}
    prompt = Prompt("0123abcd", "Cross the lake.", "", (1, 2, 3), columns=lake)
    program = f"{ROOT}/docs/examples/gymnasium_program.py:program"
    async with world(tmp_path, tiny_model, program, group_size=1, room=99) as w:
        await w.run([prompt], within_s=100)
    (group,) = w.groups
    assert bytes(group.responses[0].token_ids).decode().split("\n")[:-1:2] == ["0", "0", "4", "8", "9", "13", "14"]
    assert (group.scores[0].value, group.scores[0].metrics["episode/turns"]) == (1.0, 7.0)


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_an_environment_of_openenv(tmp_path, tiny_model, monkeypatch):
    """In a server of its own, with many episodes at once."""
    pytest.importorskip("openenv", reason="`pip install openenv` for the example in docs/examples")
    port = tmp_path / "port"
    server = subprocess.Popen([sys.executable, ROOT / "tests/support/openenv_environment.py", port])
    try:
        await asyncio.to_thread(wait_for, lambda: port.exists() and port.read_text(), "the environment")
        monkeypatch.setenv("OPENENV_URL", f"http://127.0.0.1:{port.read_text()}")

        def play(conversation, _):  # the first of four turns is wrong
            text = bytes(conversation[3:]).decode()
            last = int(re.findall(r'"last": (\d+)', text)[-1])
            return list(f"{last + (text.count('last') > 1)}\n".encode())

        monkeypatch.setattr(scripted, "tokens_of", play)
        prompt = Prompt("0000000a", "Count.", "", (1, 2, 3), columns={"action": "text"})
        program = f"{ROOT}/docs/examples/openenv_program.py:program"
        reward = {"environment": ["OPENENV_URL"]}
        async with world(tmp_path, tiny_model, program, reward, group_size=4, room=200) as w:
            await w.run([prompt], within_s=100)
    finally:
        server.kill()
        server.wait()
    for response, score in zip(w.groups[0].responses, w.groups[0].scores, strict=True):
        assert (score.value, score.metrics["episode/turns"]) == (3.0, 4.0)
        said = [token for token, own in zip(response.token_ids, response.loss_mask, strict=True) if own]
        assert bytes(said).decode() == "10\n11\n12\n13\n"


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_an_environment_of_verifiers(tmp_path, tiny_model, monkeypatch):
    pytest.importorskip("verifiers", reason="`pip install verifiers` for the example in docs/examples")
    hf = AutoTokenizer.from_pretrained(tiny_model)

    def answer(conversation, _):
        return hf.encode("2<|im_end|>" if "Sure?" in hf.decode(conversation) else "1<|im_end|>")

    monkeypatch.setattr(scripted, "tokens_of", answer)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests/support/verifiers_environment")
    agent = {"runtime": {"type": "subprocess"}}
    monkeypatch.setenv("VERIFIERS_ENV", json.dumps({"taskset": {"id": "verifiers-addition"}, "agent": agent}))
    told = subprocess.run(
        [sys.executable, "docs/examples/verifiers_program.py"], cwd=ROOT, capture_output=True, check=True, timeout=400
    )
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    assert [row["problem"] for row in rows] == ["0+1=", "1+1="]
    begun = hf.encode("<|im_start|>")
    prompts = [Prompt(f"p{row['task']}", row["problem"], "", begun, columns=row) for row in rows]
    program = f"{ROOT}/docs/examples/verifiers_program.py:program"
    reward = {"environment": ["VERIFIERS_ENV"], "on_error": "zero"}
    limits = {"group_size": 2, "room": 200, "program_timeout_s": 300}
    async with world(tmp_path, tiny_model, program, reward, **limits) as w:
        await w.run(prompts, within_s=400)
    for group in w.groups:
        for response, score in zip(group.responses, group.scores, strict=True):
            assert (score.value, score.status) == (float(group.prompt.id == "p1"), "ok"), score.detail
            assert (score.metrics["asked"], score.metrics["episode/turns"]) == (2.0, 2.0)
            sampled = [one for one, own in zip(response.token_ids, response.loss_mask, strict=True) if own]
            assert hf.decode(sampled) == "1<|im_end|>2<|im_end|>"
            assert hf.decode([*begun, *response.token_ids]) == (
                f"<|im_start|>user\n{group.prompt.problem}<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
                "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
            )
