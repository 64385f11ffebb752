"""Agents with the client `openai` over the conversation of a rollout program."""

import asyncio
import json
import re
import shutil

import aiohttp
import msgspec
import openai
import pytest

from engine.data.tokenizer import Tokenizer, TokenizerFile
from engine.errors import BadInput, OutOfRoom
from engine.types import Prompt
from engine.verifier.program import Chat
from engine.wire.columns import open_ids, pack_ids
from engine.wire.verifier_messages import TurnSampled
from support.runs import byte_tokenizer

TEMPLATE = """{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{% if enable_thinking is false %}<think></think>{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "1+1="}


class Orchestrator:
    """Samples what a test says, and keeps what the program appended before each turn."""

    def __init__(self, turns):
        self.turns = list(turns)
        self.appended = []
        self.limits = []
        self.chat = None

    def send(self, asked):
        self.appended.append(list(open_ids(asked.appended)))
        self.limits.append(asked.max_new_tokens)
        turn = self.turns.pop(0) if self.turns else []
        sampled = TurnSampled(asked.number, pack_ids(turn), "stop")
        asyncio.get_running_loop().call_later(0.05, self.chat.receive_turn, sampled)


@pytest.fixture(scope="module")
def tokenizer(tiny_model, tmp_path_factory):
    model = shutil.copytree(tiny_model, tmp_path_factory.mktemp("tools") / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return TokenizerFile(Tokenizer(model).for_verifiers)


def begin_chat(tokenizer, prompt, turns):
    """A chat, and the orchestrator that samples its turns."""
    orchestrator = Orchestrator(turns)
    orchestrator.chat = Chat(0, Prompt("p", "1+1=", "", tokenizer.encode(prompt)), orchestrator, tokenizer)
    return orchestrator.chat, orchestrator


@pytest.fixture
async def connect():
    """Make clients of OpenAI's, which are closed at the end: one that is not closes itself in the loop of a later
    test."""
    clients = []

    def begin(base_url, key):
        clients.append(openai.AsyncOpenAI(base_url=base_url, api_key=key))
        return clients[-1]

    yield begin
    for client in clients:
        await client.close()


async def test_the_limit_and_the_variables_of_a_request_are_those_of_its_turn(connect, tokenizer):
    chat, orchestrator = begin_chat(tokenizer, "<|im_start|>", [tokenizer.encode("2")] * 2)
    async with chat.openai() as (base_url, key):
        ask = connect(base_url, key).chat.completions.create
        quick = {"chat_template_kwargs": {"enable_thinking": False}}
        first = await ask(model="policy", messages=[USER], max_completion_tokens=5, extra_body=quick)
        await ask(model="policy", messages=[USER, first.choices[0].message, USER], max_tokens=7)
    assert orchestrator.limits == [5, 7]
    texts = list(map(byte_tokenizer(512).decode, orchestrator.appended))
    assert [text.endswith("<think></think>") for text in texts] == [True, False]


async def test_calls_of_two_turns_have_their_own_ids(connect, tokenizer):
    """By which an agent keeps their results."""
    call = tokenizer.encode('<tool_call>{"name": "add"}</tool_call><|im_end|>')
    chat, _ = begin_chat(tokenizer, "<|im_start|>", [call, call])
    said = [USER]
    made = []
    async with chat.openai() as (base_url, key):
        for _ in range(2):
            answer = await connect(base_url, key).chat.completions.create(model="policy", messages=said, tools=TOOLS)
            message = answer.choices[0].message
            made += [one.id for one in message.tool_calls]
            said += [message, {"role": "tool", "tool_call_id": made[-1], "content": "2"}]
    assert len(set(made)) == 2


async def test_a_request_is_a_turn_and_what_was_sampled_is_never_tokenized_again(connect, tokenizer):
    """What the agent repeats has other tokens than what was sampled: a space less, and no half character."""
    call = 'So <tool_call>{"name":  "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    turns = [tokenizer.encode(call), [*b"It is 2", 255], [*b"Yes\n"]]
    chat, orchestrator = begin_chat(tokenizer, "<|im_start|>", turns)
    async with chat.openai() as (base_url, key):
        ask = connect(base_url, key).chat.completions.create
        said = [{"role": "system", "content": "Add."}, USER]
        first = await ask(model="policy", messages=said, tools=TOOLS, temperature=0.5)
        message = first.choices[0].message
        (made,) = message.tool_calls
        assert (first.choices[0].finish_reason, message.content) == ("tool_calls", "So")
        assert (made.function.name, made.function.arguments) == ("add", '{"a": 1}')
        said += [message, {"role": "tool", "tool_call_id": made.id, "content": [{"type": "text", "text": "2"}]}]
        stream = await ask(
            model="policy", messages=said, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert first.usage.total_tokens < chunks[-1].usage.prompt_tokens < chunks[-1].usage.total_tokens == chat.length
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        said += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
        last = await ask(model="policy", messages=said, tools=TOOLS, stop="\n")
        assert (text, last.choices[0].message.content) == ("It is 2\ufffd", "Yes")
    assert list(map(byte_tokenizer(512).decode, orchestrator.appended)) == [
        f"tools\n{json.dumps(TOOLS)}<|im_end|>\n<|im_start|>system\nAdd.<|im_end|>\n"
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
    ]
    with pytest.raises(aiohttp.ClientConnectionError):  # its server is gone
        async with aiohttp.ClientSession() as session:
            await session.get(base_url)


async def test_an_agent_ends_as_a_program_does_where_no_room_is_left(connect, tokenizer):
    chat, _ = begin_chat(tokenizer, "<|im_start|>user\n", [])
    with pytest.raises(OutOfRoom) as raised:
        async with chat.openai() as (base_url, key):
            await connect(base_url, key).chat.completions.create(model="", messages=[USER])
    assert raised.value.__cause__.code == "context_length_exceeded"


async def test_strangers_are_refused_and_so_is_what_does_not_continue_the_conversation(tokenizer):
    chat, orchestrator = begin_chat(tokenizer, "<|im_start|>user\n1", [[*b"1"], [*b"2"]])
    one = {"role": "assistant", "content": "1"}
    async with chat.openai() as (base_url, key), aiohttp.ClientSession() as session:
        trusted = {"Authorization": f"Bearer {key}"}

        async def ask(status, said, messages=(USER,), headers=trusted, **more):
            body = {"messages": list(messages), **more}
            async with session.post(f"{base_url}/chat/completions", json=body, headers=headers) as reply:
                text = await reply.text()
                assert (reply.status, bool(re.search(said, text))) == (status, True), text

        await ask(401, "wrong API key", headers={})
        await ask(401, "wrong API key", headers={"Authorization": "Bearer no"})
        await ask(403, "a web page sent this request", headers=trusted | {"Origin": "http://evil.test"})
        await ask(
            400, "does not begin with the prompt '<.im_start.>user.*1'", [{"role": "system", "content": "x"}, USER]
        )
        await ask(400, "n: 2; only 1", n=2)
        await ask(400, "message 0 is .*image_url", [{"role": "user", "content": [{"type": "image_url"}]}])
        await ask(400, "message 0 is .*expected a role and a text", [{"role": "user", "content": True}])
        await ask(400, "stop 'no one token' is 12 tokens", stop="no one token")
        await ask(400, "must be str", [{**USER, "content": "1\ud800"}])  # no tokenizer takes it
        await ask(400, "max_tokens: Expected `int` >= 1", max_tokens=-1, max_completion_tokens=5)
        await asyncio.gather(ask(200, '"content": "1"'), ask(400, "still being sampled", max_tokens=5))
        await ask(400, "no message after the last answer", [USER, one])
        await ask(400, "message 1 is .*'one'.*has .*'1'} there", [USER, {**one, "content": "one"}, USER])
        await ask(400, "message 1 is None", max_tokens=5)
        await ask(200, '"content": "2"', [USER, {**one, "content": " 1 "}, USER])
    assert len(orchestrator.appended) == 2


async def test_messages_one_by_one_are_appended_as_all_at_once(tokenizer):
    tools = [{"role": "tool", "content": "first"}, {"role": "tool", "content": "second"}]
    found = []
    for calls in ([tools], [[one] for one in tools]):
        chat, orchestrator = begin_chat(tokenizer, "<|im_start|>user\n1", [[*b"1"], [*b"2"]])
        await chat.complete()
        for messages in calls:
            chat.messages(messages)
        with pytest.raises(ValueError, match="invalid literal"):
            await chat.complete(max_new_tokens="many")  # loses nothing
        await chat.complete()
        chat.messages(tools)
        chat.append("so")
        with pytest.raises(BadInput, match="a text was appended after messages"):
            chat.append(tools[0])
        found.append(orchestrator.appended)
    assert found[0] == found[1]
    assert byte_tokenizer(512).decode(found[0][1]).count("first") == 1


async def test_a_conversation_begins_once_and_what_is_no_request_changes_nothing(connect, tokenizer):
    chat, orchestrator = begin_chat(tokenizer, "<|im_start|>user\n1", [[*b"1"]])
    wrong = {
        **{"max_tokens": [1], "stop": [5], "stream_options": 1, "chat_template_kwargs": ["x"], "tools": "add"},
        **{"n": True, "logprobs": 0, "stream": "false", "max_completion_tokens": True, "model": 1},
        **{"function_call": {"name": "add"}, "tool_choice": "required", "parallel_tool_calls": False},
        **{"ignore_eos": True, "min_tokens": 5, "guided_json": {}, "echo": True, "best_of": 2, "prompt_logprobs": 1},
        **{"modalities": ["audio"], "continue_final_message": True, "add_generation_prompt": False, "an_unknown": 0},
    }
    served = {"temperature": 0.1, "seed": 3, "user": "me", "n": 1, "tool_choice": "auto", "an_unknown": None}
    for said, refused in (([], [{key: value} for key, value in wrong.items()]), ([USER], [{}])):
        async with chat.openai() as (base_url, key):
            ask = connect(base_url, key).chat.completions.create
            for body in refused:
                why = "begun already" if said else next(iter(body))
                with pytest.raises(openai.BadRequestError, match=why):
                    await ask(model="", messages=[USER], extra_body=body)
            if not said:
                await ask(model="", messages=[USER], extra_body=served)
    assert len(orchestrator.appended) == 1


OTHER = [{"type": "function", "function": {"name": "other"}}]


@pytest.mark.parametrize(
    ("begins", "goes_on", "refused"),
    [
        ({}, {"tools": TOOLS}, "other tools than before: .* write 'user.* as 'tools"),
        ({"tools": TOOLS}, {"tools": OTHER}, "other tools than before"),
        ({"tools": TOOLS}, {}, "other tools than before"),
        ({"tools": TOOLS}, {"tools": TOOLS}, ""),
        ({}, {"chat_template_kwargs": {"tools": TOOLS}}, "other tools than before"),
        ({}, {"chat_template_kwargs": {"unused": 1}}, ""),
    ],
)
async def test_what_the_model_was_never_shown_is_refused(connect, tokenizer, begins, goes_on, refused):
    """The template writes tools before the turns, and what stands there can't change."""
    chat, orchestrator = begin_chat(tokenizer, "<|im_start|>", [[*b"1"], [*b"2"], [*b"3"]])
    said = [USER, {"role": "assistant", "content": "1"}, USER]
    async with chat.openai() as (base_url, key):
        ask = connect(base_url, key).chat.completions.create
        await ask(model="", messages=[USER], extra_body=begins)
        if refused:
            with pytest.raises(openai.BadRequestError, match=refused):
                await ask(model="", messages=said, extra_body=goes_on)
            goes_on = begins  # a refused request has changed nothing
        await ask(model="", messages=said, extra_body=goes_on)
        await ask(model="", messages=[*said, {"role": "assistant", "content": "2"}, USER], extra_body=goes_on)
    assert len(orchestrator.appended) == 3
    assert byte_tokenizer(512).decode(orchestrator.appended[0]).count('"add"') == ("tools" in begins)


async def test_a_request_that_is_sent_again_gets_the_same_turn(connect, tokenizer):
    """While the turn is sampled, after its client has given it up, and after the reply."""
    chat, orchestrator = begin_chat(tokenizer, "<|im_start|>user\n1", [[*b"1"], [*b"2"]])
    async with chat.openai() as (base_url, key):
        ask = connect(base_url, key).with_options(max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            await ask.with_options(timeout=0.02).chat.completions.create(model="", messages=[USER])
        again = [ask.chat.completions.create(model="", messages=[USER]) for _ in range(2)]
        replies = [*await asyncio.gather(*again), await ask.chat.completions.create(model="", messages=[USER])]
        assert [reply.choices[0].message.content for reply in replies] == ["1"] * 3
        with pytest.raises(openai.BadRequestError, match="begun already|must repeat"):
            await ask.chat.completions.create(model="", messages=[{"role": "user", "content": "2"}])
        last = [USER, replies[0].choices[0].message, USER]
        replies = [await ask.chat.completions.create(model="", messages=last) for _ in range(2)]
        assert [reply.choices[0].message.content for reply in replies] == ["2"] * 2
    assert len(orchestrator.appended) == 2


async def test_a_first_request_that_is_refused_leaves_the_conversation_to_the_next(connect, tokenizer):
    """Also while the program itself samples a turn."""
    chat, orchestrator = begin_chat(tokenizer, "<|im_start|>user\n1", [[*b"1"], [*b"2"]])
    async with chat.openai() as (base_url, key):
        ask = connect(base_url, key).with_options(max_retries=0).chat.completions.create
        with pytest.raises(openai.BadRequestError, match="12 tokens"):
            await ask(model="", messages=[USER], stop="no one token")
        more = [USER, {"role": "user", "content": "Add."}]
        assert (await ask(model="", messages=more)).choices[0].message.content == "1"
        own = asyncio.create_task(chat.complete())
        await asyncio.sleep(0)
        said = [*more, {"role": "assistant", "content": "1"}, USER]
        with pytest.raises(openai.BadRequestError, match="still being sampled"):
            await ask(model="", messages=said)
        await own
    assert byte_tokenizer(512).decode(orchestrator.appended[0]).count("Add.") == 1


async def test_what_a_tool_says_may_look_like_a_mark(tokenizer):
    said = " ".join(f"metronome-turn-{salt}-{place};" for salt in range(3) for place in range(4))
    chat, orchestrator = begin_chat(tokenizer, "<|im_start|>user\n1", [[*said.encode()], [*b"2"]])
    await chat.complete()
    chat.append({"role": "tool", "content": said})
    await chat.complete()
    assert byte_tokenizer(512).decode(orchestrator.appended[1]) == (
        f"<|im_end|>\n<|im_start|>tool\n{said}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not chat.rewritten


async def test_the_recipes_template_variables_are_those_of_every_turn(connect, tokenizer):
    """Its tools stand in the prompt; an agent need not name them, and may name others."""
    loaded = msgspec.structs.replace(tokenizer.for_verifiers, variables=json.dumps({"tools": TOOLS}).encode())
    described = f"<|im_start|>tools\n{json.dumps(TOOLS)}<|im_end|>\n"
    chat, orchestrator = begin_chat(TokenizerFile(loaded), described, [[*b"1"], [*b"2"]])
    async with chat.openai() as (base_url, key):
        ask = connect(base_url, key).chat.completions.create
        with pytest.raises(openai.BadRequestError, match="does not begin with the prompt"):
            await ask(model="", messages=[USER], tools=[{"type": "function", "function": {"name": "other"}}])
        await ask(model="", messages=[USER])
    assert (
        byte_tokenizer(512).decode(orchestrator.appended[0])
        == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    )
