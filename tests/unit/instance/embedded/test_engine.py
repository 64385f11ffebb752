"""The engine of an instance: what it generates, for whom and when."""

from pathlib import Path

import pytest
import torch

from engine.config import Config
from engine.instance.embedded.engine import Conflict, SamplingRequest
from engine.instance.protocol import Sampling
from engine.model.shape import read_shape
from engine.run.memory import instance_need
from support.sent import BF16, PROMPT, Sent, engine_of
from support.tiny_models import EOS, VOCABULARY, reference, reference_logprobs, save

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("a"))


@pytest.fixture
def engine(folder):
    return engine_of(folder)


def mixed(count, seed=0):
    """Prompts and settings of many shapes."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        length = int(torch.randint(1, 12, (1,), generator=generator))
        prompt = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        yield (
            prompt,
            {
                "seed": number,
                "max_tokens": 1 + number * 7 % 30,
                "temperature": (1.0, 0.7, 0.0)[number % 3],
                "top_k": (0, 0, 5, 0)[number % 4],
                "top_p": (1.0, 0.8)[number // 2 % 2],
            },
        )


def test_greedy_is_the_greedy_of_transformers(folder):
    sent = Sent(engine_of(folder))
    prompts = [[3, 4, 5], [60, 2], [11, 12, 13, 14, 15, 16, 17], [9], [8, 8, 8]]
    for prompt in prompts:
        sent.send(prompt, max_tokens=24, temperature=0.0)
    hf = reference(folder)
    for prompt, result in zip(prompts, sent.finish(), strict=True):
        expected = hf.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert result.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_are_those_of_transformers_however_responses_are_batched(folder, deterministic):
    sent = Sent(engine_of(folder, deterministic=deterministic))
    requests = list(mixed(23))
    for prompt, settings in requests:
        sent.send(prompt, **settings)
    hf = reference(folder)
    for (prompt, settings), result in zip(requests, sent.finish(), strict=True):
        assert len(result.token_ids) == len(result.logprobs) == settings["max_tokens"]
        expected = reference_logprobs(hf, prompt, result.token_ids, settings["temperature"] or 1.0)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-4, rtol=0)


def test_a_stop_token_ends_the_response_and_belongs_to_it(engine):
    sent = Sent(engine)
    for seed in range(12):
        sent.send(max_tokens=40, seed=seed, stop_ids=frozenset({EOS, 2, 3, 4, 5, 6, 7, 8, 9, 10}))
    for result in sent.finish():
        assert not set(result.token_ids[:-1]) & set(range(1, 11))
        stopped = result.token_ids[-1] in range(1, 11)
        assert result.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(result.token_ids) == 40


def test_equal_prompts_share_one_prefill(engine):
    sent = Sent(engine)
    for _ in range(6):
        sent.send()
    for _ in range(3):
        sent.send([*PROMPT, 2])
    sent.finish()
    assert engine.load() == {"running": 0, "waiting": 0, "prefills": 2, "generated_tokens": 9 * 8, "weight_version": 0}
    engine.prompts.drop_prompts()
    sent.send()
    sent.finish()
    assert engine.load()["prefills"] == 3


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_turn_computes_only_what_is_new_and_has_the_bits_of_the_whole_computed_again(folder, dtype):
    """With two conversations at once. They share their first piece."""

    def engine():
        return engine_of(folder, max_context=256, deterministic=True, dtype=dtype, conversations=True)

    kept = engine()
    computed = []
    compute = kept.prompts.compute
    kept.prompts.compute = lambda pieces: computed.extend(len(one) for one, _ in pieces) or compute(pieces)
    conversations = [[*PROMPT] * 14 for _ in range(2)]
    for turn in range(3):
        results = []
        for one in (kept, engine()):
            sent = Sent(one)
            for seed, conversation in enumerate(conversations):
                sent.send(conversation, seed=10 * turn + seed)
            results.append(sent.finish())
        assert results[0] == results[1]  # floats: bit for bit
        for conversation, result in zip(conversations, results[0], strict=True):
            conversation += [*result.token_ids, *range(2, 34)]
    assert len(conversations[0]) == 70 + 3 * 40
    assert sum(computed) == 64 + 6 + 2 * ((110 - 64) + (128 - 64) + (150 - 128))


def test_a_turn_computes_only_what_was_not_decoded_before_it(folder):
    """Whatever the turn's log-probabilities are computed from, they are those of transformers."""
    engine = engine_of(folder, max_context=256, conversations=True)
    computed = []
    compute = engine.prompts.compute
    engine.prompts.compute = lambda pieces: computed.extend(len(one) for one, _ in pieces) or compute(pieces)
    system = [*range(20, 40)]
    conversations = [[*system, *ask] for ask in ([5, 6, 7], [5, 6, 7], [8, 9])]
    expected = [23, 2, 9, 11, 13, 9, 11, 13]
    hf = reference(folder)
    for turn in range(3):
        sent = Sent(engine)
        for seed, conversation in enumerate(conversations):
            sent.send(conversation, seed=10 * turn + seed)
        for number, (conversation, result) in enumerate(zip(conversations, sent.finish(), strict=True)):
            wanted = reference_logprobs(hf, conversation, result.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(result.logprobs), wanted, atol=1e-4, rtol=0)
            conversation += [*result.token_ids, *range(2, 10 + 2 * number)]
    assert computed == expected
    for number, prompt in enumerate(([*conversations[0][:30], 1, 1], conversations[0][:40], conversations[1][:40])):
        if number == 2:
            engine.prompts.drop_prompts()
        sent = Sent(engine)
        sent.send(prompt)  # gone on otherwise; a part of what was decoded; after new weights
        sent.finish()
    assert computed[len(expected) :] == [2, 1, 40]
    assert engine.load()["prefills"] == 2


def test_what_is_kept_of_prompts_that_were_computed_together_is_their_own(folder):
    """Memory that a kept prompt shares with others is not freed with them."""
    engine = engine_of(folder, max_context=256, conversations=True)
    begin = [*range(20, 40)]
    engine.prompts.get_prefills([(*begin, *rest) for rest in ((5,), (6, 7), (8, 9, 10), (11,))])
    kept = [*engine.prompts._kept.values()]
    assert [piece.length for piece in kept] == [21, 22, 23, 21]
    for piece in kept:
        assert piece.logits.untyped_storage().nbytes() == piece.logits.nbytes
        assert piece.keys.untyped_storage().nbytes() == piece.keys.nbytes


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("conversations", [False, True])
@pytest.mark.parametrize("concurrency", [1, 6])
def test_the_dry_run_counts_what_an_instance_keeps(folder, deterministic, conversations, concurrency):
    """Of more long conversations than it can keep."""
    rollout = {"concurrency": concurrency, "group_size": 2, "max_context": 128, "max_new_tokens": 8}
    program = "programs.py:doubling" if conversations else ""
    config = Config(rollout={**rollout, "deterministic": deterministic, "program": program})
    engine = engine_of(
        folder, slots=config.slots, max_context=128, deterministic=deterministic, conversations=conversations
    )
    for turn in range(4):
        sent = Sent(engine)
        for number in range(config.slots + 3):
            sent.send([*range(2, 32)] * 4 + [2 + number, 2 + turn], max_tokens=6)
        sent.finish()
    held = {tensor.untyped_storage() for tensor in (engine.cache.keys, engine.cache.values)}
    held |= {tensor.untyped_storage() for one in engine.prompts._kept.values() for tensor in (one.keys, one.values)}
    need, _ = instance_need(read_shape(Path(folder)), config)
    (counted,) = [term.bytes for term in need.terms if term.name == "key-value cache"]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())
    assert 0.8 * counted < held <= counted


@pytest.mark.parametrize("conversations", [False, True])
def test_what_is_computed_at_once_is_bounded_however_many_requests_wait(folder, conversations):
    engine = engine_of(folder, slots=12, max_context=48, conversations=conversations)
    together = []
    get = engine.prompts.get_prefills
    engine.prompts.get_prefills = lambda prompts: together.append([*map(len, prompts)]) or get(prompts)
    sent = Sent(engine)
    lengths = [46] * 9 + [20] * 3
    for number, length in enumerate(lengths):
        sent.send([number + 5] * length, max_tokens=2)
    assert all(len(result.token_ids) == 2 for result in sent.finish())
    assert together == [[46] * 8, [46, 20, 20, 20]]


def test_recent_prompts_are_kept_within_their_limit(engine):
    engine.prompts.limit = 12
    for first in (1, 2, 3, 1, 3, 2):  # two prompts of five tokens fit; 1 is the least recent when 3 comes
        engine.prompts.get_prefills([(first, 0, 0, 0, 0)])
    assert engine.prompts.computed == 5
    for first in (4, 5, 4, 6, 4):  # 5 goes when 6 comes: 4 was used after it
        engine.prompts.get_prefills([(first, 0, 0, 0, 0)])
    assert engine.prompts.computed == 5 + 3


def test_requests_start_in_order_of_arrival(engine):
    order = []
    for number in range(9):
        engine.submit(
            SamplingRequest(PROMPT, Sampling(3, seed=number), lambda result, number=number: order.append(number))
        )
    engine.step()
    assert engine.load() == {"running": 4, "waiting": 5, "prefills": 1, "generated_tokens": 4, "weight_version": 0}
    while engine.busy:
        engine.step()
    assert [sorted(order[:4]), sorted(order[4:8]), order[8:]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_cancelling_frees_the_slot_and_leaves_the_others_alone(folder):
    def responses(cancel):
        sent = Sent(engine_of(folder, deterministic=True))
        for _ in range(4):
            sent.send(max_tokens=20)
        waiting = sent.send(max_tokens=20)
        sent.engine.step()
        if cancel:
            sent.engine.cancel(sent.requests[1])
            sent.engine.cancel(waiting)
            assert sent.engine.load()["running"] == 3
            assert sent.engine.load()["waiting"] == 0
        while sent.engine.busy:
            sent.engine.step()
        sent.engine.cancel(sent.requests[0])  # has ended: nothing happens
        return sent.results

    all_of_them = responses(cancel=False)
    rest = responses(cancel=True)
    assert sorted(rest) == [0, 2, 3]
    assert all(rest[number] == all_of_them[number] for number in rest)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_deterministic_responses_do_not_depend_on_their_company(folder, threads, dtype):
    requests = list(mixed(15))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = []
        for prompt, settings in requests:
            sent = Sent(engine_of(folder, slots=5, deterministic=True, dtype=dtype))
            sent.send(prompt, **settings)
            alone += sent.finish()
        for mix in range(4):
            order = torch.randperm(15, generator=torch.Generator().manual_seed(mix)).tolist()
            sent = Sent(engine_of(folder, slots=5, deterministic=True, dtype=dtype))
            for place, number in enumerate(order):
                sent.send(requests[number][0], **requests[number][1])
                if place % (mix + 1) == 0:  # others are at other positions by now
                    sent.engine.step()
            together = sent.finish()
            for place, number in enumerate(order):  # equality of floats: bit for bit
                assert together[place] == alone[number], (mix, number)
    finally:
        torch.set_num_threads(before)


def test_a_response_that_was_cut_goes_on_in_its_stream(folder):
    """Prompt and tokens so far as the prompt, `continued` of them:
    with the same weights the response is the uncut one."""
    whole = Sent(engine_of(folder))
    whole.send(max_tokens=20, seed=3)
    (uncut,) = whole.finish()
    assert len(uncut.token_ids) == 20
    for begun in (1, 7, 19):
        cut = Sent(engine_of(folder))
        cut.send(max_tokens=20, seed=3)
        for _ in range(begun):
            cut.engine.step()
        cut.engine.pause(abort=True, done=lambda: None)
        first = cut.results[0]
        assert (first.finish_reason, first.token_ids) == ("abort", uncut.token_ids[:begun])
        cut.engine.resume()
        cut.send((*PROMPT, *first.token_ids), max_tokens=20 - begun, seed=3, continued=begun)
        second = cut.finish()[1]
        assert (second.finish_reason, first.token_ids + second.token_ids) == ("length", uncut.token_ids)
        assert first.logprobs + second.logprobs == pytest.approx(uncut.logprobs, abs=1e-5)


def test_a_response_may_fill_the_context(engine):
    sent = Sent(engine)
    sent.send(max_tokens=48 - len(PROMPT))
    sent.send(range(47), max_tokens=1)
    first, second = sent.finish()
    assert (len(first.token_ids), first.finish_reason) == (43, "length")
    assert (len(second.token_ids), second.finish_reason) == (1, "length")


def test_pause_and_wait_drains_but_admits_nothing(engine):
    sent = Sent(engine)
    idle = []
    for _ in range(6):
        sent.send(max_tokens=5)
    engine.step()
    engine.pause(abort=False, done=lambda: idle.append(True))
    with pytest.raises(Conflict, match="4 responses are still draining"):
        engine.resume()
    while engine.busy:
        assert idle == []
        engine.step()
    assert idle == [True]
    assert engine.load()["waiting"] == 2
    engine.resume()
    assert [len(result.token_ids) for result in sent.finish()] == [5] * 6
