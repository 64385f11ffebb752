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
