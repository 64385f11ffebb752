"""Replies to /v1/completions as an instance makes them, for instances of tests."""

from engine.wire.reply_digest import digest


def reply(tokens, logprobs, finish, versions, **more):
    """A reply with one response; `more`: further fields of its choice."""
    choice = {"token_ids": list(tokens), "logprobs": {"token_logprobs": list(logprobs)}, "finish_reason": finish}
    return {
        "choices": [choice | more],
        "weight_versions": [list(pair) for pair in versions],
        "digest": digest(tokens, logprobs, versions, finish),
    }
