"""The model that the engine serves, as transformers computes it: the expected log-probabilities, and changed
weights.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.model.shape import end_of_sequence_ids, read_shape
from engine.types import JsonObject
from engine.wire.weights import bucket_file
from engine.wire.weights.buckets import DTYPES, Buffers, pack_buckets
from engine.wire.weights.hf_folder import Reader, open_folder, write_sharded

PROMPT = 40
"""Largest number of prompt tokens. With blocks of 32 tokens, engines with a prefix cache keep part of it."""
PERTURBED = 8
"""Number of tokens in `Reference.perturb`."""
FACTORS = (0.9, 0.95, 1.05, 1.1)
"""Factors by which tensors are multiplied to get other weights."""
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
BUCKETS = 4
"""Approximate number of buckets in which the changed weights are sent."""


class Reference:
    """A Hugging Face folder, computed in float32 on the CPU, and the same model with changed weights."""

    def __init__(self, model: Path, dtype: str, scratch: Path) -> None:
        """`dtype`: the dtype of the engine's weights. `scratch`: a folder that the engine can read, for buckets of
        weights.
        """
        shape = read_shape(model)
        self.model = model
        self.dtype = dtype
        self.vocabulary = shape.vocabulary
        self.positions = shape.context
        self.ends = end_of_sequence_ids(model)
        length = min(PROMPT, self.vocabulary // 2, self.positions // 4)
        self.prompt = random.Random(0).sample(range(self.vocabulary), max(2, length))
        self._scratch = scratch
        self._changed = scratch / "changed"
        self._models: dict[bool, torch.nn.Module] = {}

    @property
    def perturb(self) -> list[int]:
        """Tokens whose output rows the self-test changes: the prompt's last token, and some that are not in the
        prompt.
        """
        others = [token for token in range(self.vocabulary) if token not in self.prompt]
        return [self.prompt[-1], *others[: PERTURBED - 1]]

    @torch.no_grad()
    def logprobs(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0, changed: bool = False
    ) -> list[float]:
        """log softmax(logits / temperature) of a response's tokens; `changed`: with the changed weights."""
        output = self._loaded(changed)(torch.tensor([[*prompt, *response]]))
        logits = output.logits[0, len(prompt) - 1 : -1].float() / temperature
        return list(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist())

    def buckets(self, version: int) -> list[JsonObject]:
        """Write the changed weights as buckets, and return the update_info of each."""
        folder = self._scratch / f"version-{version}"
        folder.mkdir(exist_ok=True)
        found: list[JsonObject] = []
        with open_folder(self._changed_folder()) as files:
            tensors = [(name, files.read_tensor(name).clone()) for name in sorted(files.names)]
        limit = max(1, sum(tensor.nbytes for _, tensor in tensors) // BUCKETS)
        for bucket in pack_buckets(tensors, DTYPES[self.dtype], limit, Buffers(len(tensors), 1.0)):
            wire = bucket.wire()
            path = folder / f"{bucket.number}.safetensors"
            bucket_file.write_bucket(path, bucket)
            place = {"transport": "file", "version": version, "stage": 0, "bucket": bucket.number, "path": str(path)}
            found.append({**place, **wire})
        return found

    def _loaded(self, changed: bool) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        if changed not in self._models:
            folder = self._changed_folder() if changed else self.model
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[self.dtype], local_files_only=True)
            self._models[changed] = model.float().eval()
        return self._models[changed]

    def _changed_folder(self) -> Path:
        """The model with every tensor multiplied by its own factor near 1."""
        if not self._changed.is_dir():
            with open_folder(self.model) as files:
                write_sharded(self._changed, self._tensors(files))
            for file in ("config.json", "generation_config.json"):
                if (self.model / file).is_file():
                    shutil.copy(self.model / file, self._changed)
        return self._changed

    def _tensors(self, files: Reader) -> Iterator[tuple[str, Tensor]]:
        for name in sorted(files.names):
            drawn = random.Random(EMBEDDING if name == OUTPUT else name)  # the two may be one tensor
            yield name, (files.read_tensor(name).float() * drawn.choice(FACTORS)).to(DTYPES[self.dtype])
