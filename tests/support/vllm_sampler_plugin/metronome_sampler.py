"""A plugin of vLLM for tests, found by its entry point where PYTHONPATH has this folder: vLLM's samplers stay as they
are published."""


def keep_samplers():
    """vLLM loads its plugins before it imports our worker extension, which would change them."""
    from engine.instance.vllm import sampled_logprobs

    sampled_logprobs.report_unrestricted = lambda: None
