"""Groups made by hand."""

from engine.types import Group, Prompt, Response, Score


def group(step, *versions, rewards=(1.0,), statuses=("ok",)):
    """A group of a step: one response of two tokens for each reward. Token i was sampled by `versions[i]`."""
    runs = tuple(enumerate(versions))
    responses = tuple(
        Response(
            token_ids=(1, 2),
            logprobs=(-1.0, -1.0),
            versions=runs,
            loss_mask=(True, True),
            finish_reason="length",
            text="",
            seed=0,
            instance="instance-3",
        )
        for _ in rewards
    )
    scores = tuple(Score(r, s) for r, s in zip(rewards, statuses, strict=True))
    return Group(step=step, index=0, prompt=Prompt("p7", "", "", (1, 2, 3)), responses=responses, scores=scores)


def numbered_group(index, step=0):
    """Group `index` of a step: one response of two tokens, one of them masked, and values that a codec could spoil."""
    response = Response(
        token_ids=(5, 6),
        logprobs=(-0.5, -1.25),
        versions=((0, step),),
        loss_mask=(True, False),
        finish_reason="stop",
        text="añ",
        seed=2**62,
        instance="instance-0",
    )
    return Group(
        step=step, index=index, prompt=Prompt("id", "1+1=", "2", (1, 2, 3)), responses=(response,), scores=(Score(1.0),)
    )
