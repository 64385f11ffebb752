"""Agents that are written against OpenAI's API, as rollout programs."""

import aiohttp
import openai

from engine.errors import OutOfRoom

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def with_tool(prompt, chat):
    """An agent with the client `openai`: calls a tool, then answers in a stream."""
    async with chat.openai() as (base_url, key):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=key)
        said = [{"role": "system", "content": "Add."}, {"role": "user", "content": prompt.problem}]
        reply = await client.chat.completions.create(model="policy", messages=said, tools=TOOLS, temperature=0.5)
        message = reply.choices[0].message
        (call,) = message.tool_calls
        assert (reply.choices[0].finish_reason, message.content) == ("tool_calls", "So")
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        said += [message, {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "2"}]}]
        stream = await client.chat.completions.create(
            model="policy", messages=said, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.total_tokens == chat.length
        assert reply.usage.total_tokens < chunks[-1].usage.prompt_tokens < chat.length
        said.append({"role": "assistant", "content": "".join(c.choices[0].delta.content or "" for c in chunks[:-1])})
        said.append({"role": "user", "content": "Sure?"})
        reply = await client.chat.completions.create(model="policy", messages=said, tools=TOOLS, stop="\n")
    return float(reply.choices[0].message.content == prompt.answer)


async def until_full(prompt, chat):
    """An agent that never ends by itself."""
    async with chat.openai() as (base_url, key):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=key)
        said = [{"role": "user", "content": prompt.problem}]
        while True:
            reply = await client.chat.completions.create(model="policy", messages=said, max_tokens=2)
            said += [reply.choices[0].message, {"role": "user", "content": "On."}]


async def refused(prompt, chat):
    """Asks for what is refused, and says which refusals it got."""
    user = {"role": "user", "content": prompt.problem}
    async with chat.openai() as (base_url, key), aiohttp.ClientSession() as session:
        trusted = {"Authorization": f"Bearer {key}"}

        async def ask(expected, said, messages=(user,), headers=trusted, **more):
            body = {"messages": list(messages), **more}
            async with session.post(f"{base_url}/chat/completions", json=body, headers=headers) as reply:
                text = await reply.text()
                assert reply.status == expected, (said, text)
                assert said in text, text

        await ask(401, "wrong API key", headers={})
        await ask(401, "wrong API key", headers={"Authorization": "Bearer no"})
        await ask(403, "web page", headers={**trusted, "Origin": "http://x.test"})
        await ask(403, "IP address", headers={**trusted, "Host": "x.test"})
        await ask(400, "which does not begin with the prompt", [{"role": "system", "content": "x"}, user])
        await ask(400, "n: 2; only 1", n=2)
        await ask(400, "message 0 is", [{"role": "user", "content": [{"type": "image_url"}]}])
        await ask(400, "no message", [])
        await ask(400, "stop 'no one token' is", stop="no one token")
        await ask(200, '"content": "1"')
        one = {"role": "assistant", "content": "1"}
        await ask(400, "no message after the last answer", [user, one])
        await ask(400, "message 1 is {'role': 'assistant', 'content': 'one'}", [user, {**one, "content": "one"}, user])
        await ask(400, "message 1 is None", [user])
        await ask(200, '"content": "2"', [user, {**one, "content": " 1 "}, user])
    try:
        await chat.complete()
    except OutOfRoom:
        return 0.5
    return 1.0
