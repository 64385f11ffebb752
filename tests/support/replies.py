"""Replies to /v1/completions as an instance makes them, for instances of tests."""

import base64


def reply(tokens, logprobs, finish, versions, routes=None, **more):
    """A reply with one response; `routes`: an array of the experts of its tokens; `more`: further fields of its
    choice."""
    if routes is not None:
        data = base64.b64encode(routes.tobytes()).decode()
        more["routes"] = {"dtype": routes.dtype.name, "shape": list(routes.shape), "data": data}
    choice = {"token_ids": list(tokens), "logprobs": {"token_logprobs": list(logprobs)}, "finish_reason": finish}
    return {"choices": [choice | more], "weight_versions": [list(pair) for pair in versions]}
