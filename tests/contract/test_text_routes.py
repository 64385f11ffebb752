"""The routes with text, asked by OpenAI's own client and by hand: one real server process of each engine."""

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
from transformers import AutoTokenizer

from engine.config import Config
from engine.data.tokenizer import Tokenizer
from engine.model.shape import end_of_sequence_ids
from engine.run.folder import dump_config
from support.runs import ROOT, byte_tokenizer, wait_for
from support.served import CONTEXT, DEADLINE_S, ENGINES, command, serving
from support.tiny_models import save

NAME = "tiny"
TOKEN = "a-secret"
PROMPT = "12+34="
ASKED = {"model": NAME, "max_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model over bytes, whose tokenizer has a chat template, and begins a text with a special token if it may."""
    made = Path(save(tmp_path_factory.mktemp("model") / NAME, vocab_size=272, max_position_embeddings=CONTEXT))
    tokenizer = byte_tokenizer(CONTEXT)
    first = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[first])
    tokenizer.save_pretrained(made)
    assert len(AutoTokenizer.from_pretrained(made).encode(PROMPT)) == len(PROMPT) + 1
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


def test_a_prompt_gets_the_text_of_the_training_routes_tokens(client, url, folder):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(PROMPT)
    expected = tokens_of(url, prompt=ids)
    reply = client.completions.create(prompt=PROMPT, **ASKED)
    (choice,) = reply.choices
    assert choice.text == tokenizer.decode(expected["token_ids"])
    assert (choice.finish_reason, reply.object, reply.model) == ("length", "text_completion", NAME)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), 12)


def test_a_chat_is_put_into_the_tokenizers_template(client, url, folder):
    tokenizer = Tokenizer(folder)
    text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    reply = chat(client)
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(tokens_of(url, prompt=ids)["token_ids"])
    assert reply.usage.prompt_tokens == len(ids)


def test_the_end_of_a_turn_ends_an_answer_as_in_training(client, url, folder):
    """Not a completion, whose prompt has no turns."""
    ids = Tokenizer(folder).encode(f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n")
    stops = {256, 258, *end_of_sequence_ids(folder)}
    ended = 0
    for seed in range(6):
        sampled = tokens_of(url, prompt=ids, max_tokens=CONTEXT - len(ids) - 1, seed=seed)["token_ids"]
        ends = [place for place, one in enumerate(sampled, 1) if one in stops]
        limits = {"seed": seed, "max_tokens": len(sampled)}
        assert chat(client, **limits).usage.completion_tokens == min(ends, default=len(sampled))
        ended += bool(ends) and sampled[ends[0] - 1] == 258
    assert ended


def test_a_stop_string_ends_the_text_before_it(client, url):
    text = client.completions.create(prompt=PROMPT, temperature=0, **(ASKED | {"max_tokens": 60})).choices[0].text
    stop = text[5:8]
    cut = text[: text.index(stop)]
    given = {"prompt": PROMPT, "temperature": 0, "stop": ["never so", stop]}
    (choice,) = client.completions.create(**given, **(ASKED | {"max_tokens": 60})).choices
    assert (choice.text, choice.finish_reason) == (cut, "stop")
    before = figures(url)["generated"]
    long = ASKED | {"prompt": PROMPT, "temperature": 0, "stop": stop, "max_tokens": CONTEXT - 10}
    with ThreadPoolExecutor(16) as threads:  # and not n = 16, which vLLM refuses of a greedy request
        replies = list(threads.map(lambda _: client.completions.create(**long), range(16)))
    assert sum(reply.usage.completion_tokens for reply in replies) < 16 * 60
    wait_for(lambda: not busy(url), "the slots to be free")
    assert figures(url)["generated"] - before < 16 * (CONTEXT - 10) / 2  # nothing is sampled after it


@pytest.mark.parametrize("engine", ["embedded"], indirect=True)
def test_an_end_of_sequence_is_no_part_of_the_text(client, url, folder):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(PROMPT)
    for seed in range(300):
        ended = tokens_of(url, prompt=ids, seed=seed, max_tokens=CONTEXT - 10, ignore_eos=False)
        if ended["finish_reason"] == "stop" and ended["token_ids"][-1] == tokenizer.stop_ids[0]:
            break
    (choice,) = client.completions.create(prompt=PROMPT, **(ASKED | {"seed": seed, "max_tokens": CONTEXT - 10})).choices
    assert (choice.text, choice.finish_reason) == (tokenizer.decode(ended["token_ids"][:-1]), "stop")


LONG = "x" * (CONTEXT + 1)
WRONG = [
    ({"prompt": LONG}, 400, "context"),
    ({"prompt": PROMPT, "model": "another"}, 404, "another"),
    ({"prompt": PROMPT, "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": PROMPT, "max_tokens": "many"}, 400, "max_tokens"),
    ({"prompt": PROMPT, "temperature": -1}, 400, "temperature"),
    ({"prompt": PROMPT, "top_p": 0}, 400, "top_p"),
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


@pytest.mark.parametrize("engine", ["embedded"], indirect=True)
@pytest.mark.parametrize(
    "more", [{"stream": True}, {"logprobs": 0}, {"n": 2}, {"prompt": [PROMPT, "x"]}, {"never_heard_of": 1}]
)
def test_what_the_embedded_engine_lacks_is_refused_by_name(url, more):
    (key,) = more
    status, reply = ask(url, "POST", "/v1/completions", {"model": NAME, "prompt": PROMPT} | more)
    assert status == 400
    assert key in reply["error"]["message"]


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
        about = subprocess.run([*command, "-sS"], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        assert "'mine'" in json.loads(about.stdout)["text"]
        base = re.search(r"http://[^ /]+", said)[0] + "/v1"
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


def test_a_tokenizer_that_an_engine_reads_otherwise_is_never_served_with_other_tokens(folder, tmp_path, engine):
    """transformers, which vLLM asks, builds this one anew from the name of its class and then puts no space first."""
    other = shutil.copytree(folder, tmp_path / "other")
    file = json.loads((other / "tokenizer.json").read_text())
    file["pre_tokenizer"]["add_prefix_space"] = True
    (other / "tokenizer.json").write_text(json.dumps(file))
    named = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(named | {"tokenizer_class": "GPT2Tokenizer"}))
    if engine == "vllm":
        started = command(other, tmp_path / "port.json", "--text", NAME, engine=engine)
        refused = subprocess.run(started, capture_output=True, text=True, cwd=ROOT, timeout=600)
        assert refused.returncode == 2
        assert f"--model {other}: vLLM reads 'If f(x) <= 3;" in refused.stderr
        assert "tokenizer.json as ['Ġ', 'I', 'f'" in refused.stderr
        return
    with serving(other, tmp_path, "--text", NAME, token=TOKEN, engine=engine) as (_, ready):
        url = f"http://{ready['host']}:{ready['port']}"
        _, reply = ask(url, "POST", "/v1/completions", {"model": NAME, "prompt": PROMPT, "max_tokens": 1})
        assert reply["usage"]["prompt_tokens"] == len(PROMPT) + 1
