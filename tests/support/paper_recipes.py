"""The papers' recipes that ship, with the devices that each paper states.

NAME-paper is a variant of NAME: the paper's own layout, where it states one."""

DEVICES = {  # as the papers state them: training, rollouts
    "periodic-qwen3-8b-16npu": (8, 8),
    "periodic-qwen3-8b-16npu-paper": (8, 8),
    "periodic-qwen3-8b-32npu": (16, 16),
    "periodic-qwen3-8b-32npu-paper": (16, 16),
    "periodic-qwen3-8b-64npu": (32, 32),
    "periodic-qwen3-8b-64npu-paper": (32, 32),
    "periodic-r1-distill-32b-48npu": (32, 16),
    "periodic-r1-distill-32b-48npu-paper": (32, 16),
    "one-step-off-qwen2.5-math-7b": (12, 4),
    "one-step-off-qwen2.5-math-7b-paper": (12, 4),
    "gac-qwen3-1.7b": (4, 4),
    "gac-qwen3-4b": (4, 4),
    "gac-qwen3-8b": (4, 4),
    "gac-llama-3.2-3b": (4, 4),
    "asyncflow-qwen2.5-7b-32npu": (16, 16),
    "asyncflow-qwen2.5-32b-512npu": (256, 256),
}
