"""The routes with text, asked by OpenAI's own client and by hand: one real server process of each engine."""

import asyncio
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from tokenizers.processors import TemplateProcessing

from engine.config import Config
from engine.data.tokenizer import Tokenizer
from engine.run.folder import dump_config
from support.runs import ROOT, byte_tokenizer, wait_for
from support.served import CONTEXT, DEADLINE_S, ENGINES, serving
from support.tiny_models import save

NAME = "tiny"
TOKEN = "a-secret"
PROMPT = "12+34="
ASKED = {"model": NAME, "max_tokens": 12, "seed": 3, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model over bytes, whose tokenizer has a chat template, and begins a text with a special token if it may."""
    made = Path(save(tmp_path_factory.mktemp("model") / NAME, vocab_size=272, max_position_embeddings=CONTEXT))
    tokenizer = byte_tokenizer(CONTEXT)
    first = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[first])
    tokenizer.save_pretrained(made)
    assert len(Tokenizer(made).hf.encode(PROMPT)) == len(PROMPT) + 1
    return made


@pytest.fixture(scope="module", params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def url(engine, folder, tmp_path_factory):
    where = tmp_path_factory.mktemp("server")
    with serving(folder, where, "--text", NAME, token=TOKEN, engine=engine) as (_, ready):
        yield f"http://{ready['host']}:{ready['port']}"


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, timeout=DEADLINE_S, max_retries=0) as made:
        yield made


def ask(url, method, path, body=None, token=TOKEN):
    """(status, JSON) of a request by hand, with the content type of curl -d: that of a form."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def tokens_of(url, **body):
    """The choice of the training route, which takes token ids."""
    given = {"max_tokens": 12, "seed": 3, "ignore_eos": True} | body
    return ask(url, "POST", "/v1/completions", given)[1]["choices"][0]


def chat(client, **more):
    messages = [{"role": "user", "content": PROMPT}]
    return client.chat.completions.create(messages=messages, **(ASKED | more))


def test_the_root_says_what_this_is(url, folder):
    status, about = ask(url, "GET", "/")
    assert status == 200
    assert "Metronome" in about["what"]
    assert (about["model"], about["weight_version"], about["context"]) == (str(folder), 0, CONTEXT)
    assert NAME in about["text"]
    assert {"GET /health", "POST /v1/completions", "POST /v1/chat/completions"} <= set(about["routes"])


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == (NAME, "model", CONTEXT)


def test_a_prompt_gets_the_text_of_the_training_routes_tokens(client, url, folder):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.hf.encode(PROMPT, add_special_tokens=False)
    expected = tokens_of(url, prompt=ids)
    reply = client.completions.create(prompt=PROMPT, **ASKED)
    (choice,) = reply.choices
    assert choice.text == tokenizer.decode(expected["token_ids"])
    assert (choice.finish_reason, reply.object, reply.model) == ("length", "text_completion", NAME)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), 12)
    more = ASKED | {"extra_body": {"ignore_eos": True, "add_special_tokens": True}}
    assert client.completions.create(prompt=PROMPT, **more).usage.prompt_tokens == len(ids) + 1


def test_a_chat_is_put_into_the_tokenizers_template(client, url, folder):
    tokenizer = Tokenizer(folder)
    text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.hf.encode(text, add_special_tokens=False)
    reply = chat(client)
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(tokens_of(url, prompt=ids)["token_ids"])
    assert reply.usage.prompt_tokens == len(ids)
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    again = client.chat.completions.create(messages=parts, **ASKED)
    assert again.choices[0].message.content == choice.message.content


def test_a_stream_is_the_same_text_in_pieces(client):
    for seed in range(4):
        asked = ASKED | {"prompt": PROMPT, "seed": seed, "max_tokens": 60}
        whole = client.completions.create(**asked).choices[0]
        events = list(client.completions.create(stream=True, **asked))
        pieces = [event.choices[0] for event in events]
        assert len(pieces) > 3
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [whole.finish_reason]


def test_a_streamed_chat_begins_with_its_role_and_may_count(client):
    events = list(chat(client, stream=True, n=2, stream_options={"include_usage": True}))
    whole = chat(client, n=2)
    for index, choice in enumerate(whole.choices):
        pieces = [one for event in events for one in event.choices if one.index == index]
        assert pieces[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert pieces[-1].finish_reason == choice.finish_reason
    assert whole.choices[0].message.content != whole.choices[1].message.content
    assert events[-1].choices == []
    assert events[-1].usage == whole.usage
    assert all(event.usage is None for event in events[:-1])


def test_a_stop_string_ends_the_text_before_it(client, url):
    text = client.completions.create(prompt=PROMPT, temperature=0, **(ASKED | {"max_tokens": 60})).choices[0].text
    stop = text[5:8]
    cut = text[: text.index(stop)]
    for stream in (False, True):
        given = {"prompt": PROMPT, "temperature": 0, "stop": ["never so", stop], "stream": stream}
        reply = client.completions.create(**given, **(ASKED | {"max_tokens": 60}))
        choices = [event.choices[0] for event in reply] if stream else reply.choices
        assert "".join(choice.text for choice in choices) == cut
        assert choices[-1].finish_reason == "stop"
    before = figures(url)["generated"]
    long = ASKED | {"prompt": PROMPT, "temperature": 0, "stop": stop, "max_tokens": CONTEXT - 10}
    with ThreadPoolExecutor(16) as threads:  # and not n = 16, which vLLM refuses of a greedy request
        replies = list(threads.map(lambda _: client.completions.create(**long), range(16)))
    assert sum(reply.usage.completion_tokens for reply in replies) < 16 * 60
    wait_for(lambda: not busy(url), "the slots to be free")
    assert figures(url)["generated"] - before < 16 * (CONTEXT - 10) / 2  # nothing is sampled after it


def test_an_end_of_sequence_is_no_part_of_the_text(client, url, folder):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.hf.encode(PROMPT, add_special_tokens=False)
    greedy = tokens_of(url, prompt=ids, temperature=0)["token_ids"]
    body = {"ignore_eos": True, "stop_token_ids": [greedy[4]]}
    choice = client.completions.create(prompt=PROMPT, temperature=0, **(ASKED | {"extra_body": body})).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == tokenizer.decode(greedy[: greedy.index(greedy[4])])


def test_log_probabilities_are_those_of_the_training_route(client, url, folder):
    ids = Tokenizer(folder).hf.encode(PROMPT, add_special_tokens=False)
    expected = tokens_of(url, prompt=ids)["logprobs"]["token_logprobs"]
    found = client.completions.create(prompt=PROMPT, logprobs=0, **ASKED).choices[0].logprobs
    assert found.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert len(found.tokens) == len(found.text_offset) == 12
    pieces = list(chat(client, logprobs=True, stream=True))
    whole = chat(client, logprobs=True).choices[0].logprobs.content
    streamed = [one for event in pieces if event.choices[0].logprobs for one in event.choices[0].logprobs.content]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in whole], abs=1e-4)
    assert len(whole) == 12


def test_prompts_and_responses_are_many(client):
    reply = client.completions.create(prompt=[PROMPT, "x"], n=2, **ASKED)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in reply.choices}) == 4
    one = client.completions.create(prompt="x", **ASKED)
    assert reply.choices[2].text == one.choices[0].text


LONG = "x" * (CONTEXT + 1)
WRONG = [
    ({"prompt": LONG}, 400, "context"),
    ({"prompt": PROMPT, "model": "another"}, 404, "another"),
    ({"prompt": PROMPT, "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": PROMPT, "max_tokens": "many"}, 400, "max_tokens"),
    ({"prompt": PROMPT, "temperature": -1}, 400, "temperature"),
    ({"prompt": PROMPT, "top_p": 0}, 400, "top_p"),
    ({"prompt": PROMPT, "n": 0}, 400, "n"),
    ({"prompt": PROMPT, "stop": 5}, 400, "stop"),
    ({"messages": []}, 400, "message"),
    ({"messages": "hello"}, 400, "messages"),
    ({"messages": [{"role": "user", "content": LONG}]}, 400, "context"),
    (b'{"prompt": ', 400, "JSON"),
    (b'["prompt"]', 400, "object"),
]


@pytest.mark.parametrize(("body", "status", "named"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_request_is_refused_in_openais_form(url, body, status, named):
    route = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
    found, reply = ask(url, "POST", route, body)
    assert found == status, reply
    error = reply["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert error["code"] == status
    assert named in error["message"] or named == error["param"]


def test_the_client_raises_its_own_errors(client, url):
    with pytest.raises(openai.NotFoundError, match="another"):
        client.completions.create(model="another", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=NAME, prompt=LONG)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=NAME, prompt=LONG, stream=True)
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    for call in (stranger.models.list, lambda: stranger.completions.create(model=NAME, prompt=PROMPT)):
        with pytest.raises(openai.AuthenticationError, match="token"):
            call()


@pytest.mark.parametrize("engine", ["embedded"], indirect=True)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("echo", True),
        ("logprobs", 3),
        ("best_of", 2),
        ("never_heard_of", 1),
    ],
)
def test_what_the_embedded_engine_lacks_is_refused_by_name(url, key, value):
    status, reply = ask(url, "POST", "/v1/completions", {"model": NAME, "prompt": PROMPT, key: value})
    assert (status, reply["error"]["param"]) == (400, key)
    assert key in reply["error"]["message"]


@pytest.mark.parametrize("engine", ["embedded"], indirect=True)
def test_a_key_that_asks_for_nothing_is_taken(client):
    plain = client.completions.create(prompt=PROMPT, **ASKED).choices[0].text
    same = client.completions.create(
        prompt=PROMPT, frequency_penalty=0.0, presence_penalty=0, logit_bias={}, echo=False, user="me", **ASKED
    )
    assert same.choices[0].text == plain


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slots(url, stream):
    before = figures(url)["generated"]
    many = 64
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as client:
        given = ASKED | {"max_tokens": CONTEXT - 10, "n": many, "stream": stream}
        task = asyncio.create_task(client.completions.create(prompt=PROMPT, **given))
        if stream:
            events = await task
            await anext(aiter(events))
            await events.close()
        else:
            await asyncio.to_thread(wait_for, lambda: busy(url), "a response to be sampled")
            task.cancel()
    await asyncio.to_thread(wait_for, lambda: not busy(url), "the slots to be free")
    assert figures(url)["generated"] - before < many * (CONTEXT - 10) / 2


def busy(url):
    now = figures(url)
    return now["running"] + now["waiting"] > 0


def figures(url):
    """Responses that run and wait, and tokens sampled. vLLM's own, since /load counts the training route's only."""
    request = urllib.request.Request(url + "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
        samples = [line.rsplit(maxsplit=1) for line in reply.read().decode().splitlines() if line[:1] != "#"]
    values = {name.partition("{")[0]: float(value) for name, value in samples}
    ours = ("metronome_instance_running", "metronome_instance_waiting", "metronome_instance_generated_tokens_total")
    vllms = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total")
    names = vllms if vllms[0] in values else ours
    return dict(zip(("running", "waiting", "generated"), (values[name] for name in names), strict=True))


def test_a_pause_that_breaks_a_stream_off_says_so(client, url, engine):
    events = iter(client.completions.create(prompt=PROMPT, stream=True, **(ASKED | {"max_tokens": CONTEXT - 10})))
    next(events)
    assert ask(url, "POST", "/pause?mode=abort", {})[0] == 200
    assert ask(url, "POST", "/resume", {})[0] == 200
    if engine == "embedded":
        with pytest.raises(openai.APIError, match="pause"):
            list(events)
    else:
        assert [event.choices[0].finish_reason for event in events][-1] == "abort"


def test_a_model_without_a_chat_template_is_named(folder, tmp_path, engine):
    plain = Path(save(tmp_path / "plain", vocab_size=272, max_position_embeddings=CONTEXT))
    tokenizer = byte_tokenizer(CONTEXT)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(plain)
    (tmp_path / "server").mkdir()
    with serving(plain, tmp_path / "server", "--text", NAME, token=TOKEN, engine=engine) as (_, ready):
        url = f"http://{ready['host']}:{ready['port']}"
        body = {"model": NAME, "messages": [{"role": "user", "content": PROMPT}]}
        status, reply = ask(url, "POST", "/v1/chat/completions", body)
        assert status == 400
        assert "chat template" in reply["error"]["message"]
        assert ask(url, "POST", "/v1/completions", {"model": NAME, "prompt": PROMPT})[0] == 200


def test_the_command_serves_the_policy_of_a_run(folder, tmp_path):
    run = tmp_path / "mine"
    run.mkdir()
    small = {"max_context": CONTEXT, "max_new_tokens": 8, "concurrency": 1, "group_size": 2}
    dump_config(Config.model_validate({"run": {"name": "mine"}, "rollout": small}), run / "config.toml")
    shutil.copytree(folder, run / "policy")
    (run / "steps.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    command = [sys.executable, "-m", "flows.cli", "serve", "--model", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    try:
        said = next(line for line in process.stdout if "try it: curl" in line)
        command = shlex.split(said.partition("try it: ")[2])
        listed = subprocess.run([*command, "-sS"], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        assert json.loads(listed.stdout)["data"][0]["id"] == "mine"
        base = re.search(r"http://\S+/v1", said)[0]
        token = re.search("Bearer ([0-9a-f]{64})", said)[1]
        assert ask(base.removesuffix("/v1"), "GET", "/", token=token)[1]["weight_version"] == 4
        assert ask(base.removesuffix("/v1"), "GET", "/", token="none")[0] == 401
        with openai.OpenAI(base_url=base, api_key=token, timeout=DEADLINE_S, max_retries=0) as client:
            assert client.completions.create(model="mine", prompt=PROMPT).usage.completion_tokens <= 16
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
