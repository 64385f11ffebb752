"""Parser of requests with text, for the embedded engine: OpenAI's completions and chat completions.

A key that the engine can't serve as asked is refused by name.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as repr_short
from typing import Any

from engine.data.tokenizer import Tokenizer, render_chat
from engine.errors import BadInput
from engine.instance import protocol
from engine.instance.protocol import Completion, RequestLimits
from engine.instance.refusals import Refusal
from engine.types import JsonObject

MOST = 128
"""Most responses to one request: prompts times `n`."""
STOPS = 16
"""Most stop strings of a request."""
AS_OF_TOKENS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos")
"""Keys that mean the same as in a request with token ids."""
SHARED = frozenset({"model", "n", "stop", "stream", "stream_options", "logprobs", *AS_OF_TOKENS})
KEYS = {
    False: SHARED | {"prompt", "add_special_tokens"},
    True: SHARED | {"messages", "max_completion_tokens", "chat_template_kwargs"},
}
"""Keys that are served, by whether it is a chat."""
IGNORED = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key"})
"""Keys that mean nothing to a server without accounts."""
ONLY: Mapping[str, Sequence[object]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Keys whose other values this engine can't serve, and the values that ask for nothing. A key may also be null."""


@dataclass(frozen=True)
class TextRequest:
    """A checked request."""

    chat: bool
    completions: tuple[Completion, ...]
    """One for each response, in the order of the reply's choices."""
    prompt_tokens: int
    """Tokens of all prompts; each is counted once, however many responses it gets."""
    stop: tuple[str, ...]
    """Each of these strings ends a response, and is no part of it."""
    logprobs: bool
    """Whether the reply has the log-probabilities of the sampled tokens."""
    stream: bool
    usage: bool
    """Whether the last event of a stream counts the tokens."""


def parse(body: JsonObject, chat: bool, model: str, tokenizer: Tokenizer, limits: RequestLimits) -> TextRequest:
    """Return the checked body. Raise Refusal that names the first key that can't be served as asked."""
    _check_keys(body, chat)
    if body.get("model") not in (None, "", model):
        raise Refusal(404, f"there is no model {repr_short(body['model'])} here; this is {model!r}", param="model")
    count = _count(body)
    prompts = [_chat_prompt(body, tokenizer)] if chat else _text_prompts(body, tokenizer)
    if len(prompts) * count > MOST:
        raise _wrong("n", f"{len(prompts)} prompts with {count} responses each; at most {MOST} responses are served")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise _wrong("stream_options", f'{repr_short(options)}; it must be {{"include_usage": true}} or false')
    return TextRequest(
        chat=chat,
        completions=tuple(
            completion
            for prompt in prompts
            for completion in _responses(
                _completion(body=body, chat=chat, prompt=prompt, limits=limits, tokenizer=tokenizer), count
            )
        ),
        prompt_tokens=sum(map(len, prompts)),
        stop=_stop(body),
        logprobs=_logprobs(body, chat),
        stream=_flag(body, "stream"),
        usage=_flag(options, "include_usage"),
    )


def _wrong(key: str, message: str) -> Refusal:
    return Refusal(400, f"{key}: {message}", param=key)


def _check_keys(body: JsonObject, chat: bool) -> None:
    known = KEYS[chat]
    for key in sorted(body.keys() - known - IGNORED):
        if key not in ONLY:
            listed = ", ".join(sorted(known))
            raise _wrong(key, f"no such key is served here; known keys are {listed}")
        if body[key] is not None and not any(_same(body[key], one) for one in ONLY[key]):
            allowed = " or ".join(map(json.dumps, ONLY[key]))
            raise _wrong(key, f"{repr_short(body[key])}; the embedded engine serves only {allowed}")


def _same(given: object, wanted: object) -> bool:
    """Whether they are the same in JSON, where 0 is 0.0 but not false."""
    return given == wanted and isinstance(given, bool) == isinstance(wanted, bool)


def _flag(body: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(key, f"{repr_short(value)}; it must be true or false")
    return value


def _count(body: JsonObject) -> int:
    count = body.get("n")
    if count is None:
        return 1
    if type(count) is not int or not 1 <= count <= MOST:
        raise _wrong("n", f"{repr_short(count)}; it must be an integer from 1 to {MOST}")
    return count


def _stop(body: JsonObject) -> tuple[str, ...]:
    stop = body.get("stop")
    listed = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(listed, list) or len(listed) > STOPS or not all(isinstance(one, str) and one for one in listed):
        raise _wrong("stop", f"{repr_short(stop)}; it must be a text or a list of at most {STOPS} texts, none empty")
    return tuple(listed)


def _logprobs(body: JsonObject, chat: bool) -> bool:
    if chat:
        return _flag(body, "logprobs")
    given = body.get("logprobs")
    if given is not None and (type(given) is not int or given != 0):
        raise _wrong(
            "logprobs", f"{repr_short(given)}; the embedded engine has those of the sampled tokens only, which is 0"
        )
    return given is not None


def _text_prompts(body: JsonObject, tokenizer: Tokenizer) -> list[list[int]]:
    prompt = body["prompt"]
    texts = [prompt] if isinstance(prompt, str) else prompt
    if not all(isinstance(text, str) for text in texts):
        raise _wrong("prompt", "it must be a text, a list of texts, or a list of token ids")
    special = _flag(body, "add_special_tokens")
    return [list(tokenizer.hf.encode(text, add_special_tokens=special, verbose=False)) for text in texts]


def _chat_prompt(body: JsonObject, tokenizer: Tokenizer) -> list[int]:
    """Return the messages in the tokenizer's chat form, with the beginning of the answer."""
    if not tokenizer.hf.chat_template:
        raise _wrong(
            "messages",
            "the tokenizer of this model has no chat template; send a prompt to /v1/completions instead, "
            "or add a chat_template.jinja to the model's folder",
        )
    given = body.get("chat_template_kwargs") or {}
    taken = inspect.signature(tokenizer.hf.apply_chat_template).parameters
    if not isinstance(given, dict) or given.keys() & taken.keys():
        raise _wrong(
            "chat_template_kwargs", f"{repr_short(given)}; it must be an object of the template's own variables"
        )
    messages = _messages(body)
    try:
        text = render_chat(tokenizer.hf, messages, given)
    except BadInput as error:
        raise _wrong("messages", str(error)) from None
    return list(tokenizer.hf.encode(text, add_special_tokens=False, verbose=False))


def _messages(body: JsonObject) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", 'it must be a list with at least one {"role": …, "content": …}')
    return [_message(place, message) for place, message in enumerate(messages)]


def _message(place: int, message: Any) -> dict[str, str]:  # noqa: ANN401
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong("messages", f"message {place} is {repr_short(message)}; it must have a role and a content")
    content = message.get("content")
    if isinstance(content, list):  # parts, of which this engine takes text
        content = "\n".join(_part(place, part) for part in content)
    if not isinstance(content, str):
        raise _wrong("messages", f"message {place}: its content is {repr_short(content)}; it must be a text")
    return {"role": message["role"], "content": content}


def _part(place: int, part: Any) -> str:  # noqa: ANN401
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise _wrong("messages", f"message {place} has the part {repr_short(part)}; only text is served")
    return text


def _completion(
    body: JsonObject, chat: bool, prompt: list[int], limits: RequestLimits, tokenizer: Tokenizer
) -> Completion:
    """Return what is asked for one response to a prompt."""
    asked: JsonObject = {key: body[key] for key in AS_OF_TOKENS if key in body}
    longest = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    if chat:
        asked["max_tokens"] = 2**31 - 1 if body.get(longest) is None else body[longest]
    try:
        one = protocol.parse_completion(asked | {"prompt": prompt}, limits)
    except BadInput as error:
        key, _, rest = str(error).partition(" ")
        key = {"max_tokens": longest, "prompt": "messages" if chat else "prompt"}.get(key, key)
        raise Refusal(400, f"{key} {rest}", param=key) from None
    end = tokenizer.hf.eos_token_id
    if end is not None and not body.get("ignore_eos"):
        one = dataclasses.replace(one, stop_ids=one.stop_ids | {end})
    return one


def _responses(one: Completion, count: int) -> list[Completion]:
    """Return it for each response to its prompt, with a seed of its own."""
    if one.seed is None:
        return [one] * count
    after = protocol.SEEDS.stop
    seeds = [(one.seed + number + after) % (2 * after) - after for number in range(count)]
    return [dataclasses.replace(one, seed=seed) for seed in seeds]
