"""Samples tokens with vllm-ascend's own sampler on a CPU: `python sampler.py FOLDER`.

FOLDER has the files of vLLM and vllm-ascend that the sampler consists of; everything else of them is a stand-in. Prints
JSON: by "published" and "ours" (changed as in an instance) a row for each temperature and top_p, with what is reported
for the token, its log softmax(logits) and its log softmax(logits / temperature).
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

FILES = (
    "vllm/v1/sample/sampler.py",
    "vllm/v1/sample/ops/topk_topp_sampler.py",
    "vllm_ascend/sample/sampler.py",
)
Logprobs = namedtuple("Logprobs", "tokens logprobs ranks")
PACKAGES = ("vllm", "vllm_ascend", "torch_npu")


class Published(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the published files, and a stand-in for every other module of the packages."""

    def __init__(self, folder):
        self.files = {file.removesuffix(".py").replace("/", "."): Path(folder, file) for file in FILES}

    def find_spec(self, name, path=None, target=None):
        if name in self.files:
            return importlib.util.spec_from_file_location(name, self.files[name])
        if name.partition(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__ = []
        module.__spec__ = spec
        return module

    def exec_module(self, module):
        """There is nothing to run."""


def stand_in(name, **attributes):
    module = importlib.import_module(name)
    for key, value in attributes.items():
        setattr(module, key, value)


def load(folder):
    """vllm-ascend's class, and vLLM's from which it is derived."""
    sys.meta_path.insert(0, Published(folder))
    platform = MagicMock()
    for kind in ("is_cuda", "is_cpu", "is_rocm", "is_xpu"):
        getattr(platform, kind).return_value = False
    stand_in("vllm.platforms", current_platform=platform)
    stand_in("vllm.triton_utils", HAS_TRITON=False)
    stand_in("vllm.envs", VLLM_BATCH_INVARIANT=False)
    stand_in("vllm.config.model", LogprobsMode=str, PROCESSED_LOGPROBS_MODES=("processed_logits", "processed_logprobs"))
    stand_in("vllm.v1.outputs", LogprobsTensors=Logprobs, SamplerOutput=SimpleNamespace)
    stand_in("vllm.v1.sample.ops.logprobs", batched_count_greater_than=lambda values, one: (values >= one).sum(-1))
    ascend = SimpleNamespace(enable_reduce_sample=False, enable_async_exponential=False)
    stand_in("vllm_ascend.ascend_config", get_ascend_config=lambda: ascend)
    stand_in("vllm_ascend.utils", npu_stream_switch=lambda _: contextlib.nullcontext(), global_stream=lambda: None)
    torch.npu = MagicMock()
    from vllm.v1.sample.sampler import Sampler
    from vllm_ascend.sample.sampler import AscendSampler

    return AscendSampler, Sampler


def metadata(temperature, top_p):
    """Of one request that wants the log-probability of what is sampled."""
    found = MagicMock(max_num_logprobs=0, logprob_token_ids=None, all_random=True, all_greedy=False, top_k=None)
    found.temperature = torch.tensor([temperature])
    found.top_p = torch.tensor([top_p]) if top_p < 1 else None
    found.generators = {}
    found.no_penalties = True
    found.logitsprocs = SimpleNamespace(argmax_invariant=[], non_argmax_invariant=[])
    found.bad_words_token_ids = found.allowed_token_ids_mask = found.thinking_budget_state_holder = None
    return found


def sampled(sampler, temperature, top_p):
    torch.manual_seed(0)
    logits = torch.randn(1, 50) * 3
    plain = logits.log_softmax(-1)
    scaled = (logits / temperature).log_softmax(-1)
    out = sampler(logits, metadata(temperature, top_p))
    token = int(out.sampled_token_ids)
    values = out.logprobs_tensors.logprobs[0, 0], plain[0, token], scaled[0, token]
    return [temperature, top_p, *map(float, values)]


def main():
    published, base = load(sys.argv[1])
    cases = [(temperature, top_p) for temperature in (1.0, 0.6) for top_p in (1.0, 0.9)]
    found = {"published": [sampled(published(), *case) for case in cases]}
    from engine.instance.vllm.sampled_logprobs import change_sampler

    change_sampler(base)
    print(json.dumps(found | {"ours": [sampled(published(), *case) for case in cases]}))


if __name__ == "__main__":
    main()
