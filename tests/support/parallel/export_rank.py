"""One rank of test_export.py: `python export_rank.py OVERRIDES FOLDER BUCKET_BYTES` publishes a model over gloo from
all ranks of a layout to one instance, and writes what it held of gathered weights at a time to $REPORT, as JSON."""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

sys.path[:0] = [str(Path(__file__).resolve().parents[3]), str(Path(__file__).resolve().parents[2])]

from engine import platform  # noqa: E402
from engine.client.publish.transports import open_transport  # noqa: E402
from engine.config import recipe  # noqa: E402
from engine.trainer.ranks.models import open_models  # noqa: E402
from engine.trainer.ranks.rank_group import RankGroup  # noqa: E402
from support.weights_double import TIMEOUT_S, Client, Orchestrator, Verifying  # noqa: E402


class Watched:
    """A model whose gathered tensors are counted for as long as anybody holds them."""

    def __init__(self, models):
        self.models = models
        self.own = {parameter.untyped_storage()._cdata for parameter in models.policy.parameters()}
        self.seen = {}
        self.peak = self.total = 0

    def tensors(self):
        for name, tensor in self.models.tensors():
            storage = tensor.untyped_storage()
            if storage._cdata not in self.own:
                ref = StorageWeakRef(storage)
                self.total += storage.nbytes() * (ref.cdata not in self.seen)
                self.seen[ref.cdata] = ref, storage.nbytes()
            del storage
            self.seen = {key: (ref, size) for key, (ref, size) in self.seen.items() if not ref.expired()}
            self.peak = max(self.peak, sum(size for _, size in self.seen.values()))
            yield name, tensor

    def probe(self, token_ids):
        return []


def main():
    config = recipe.load_config(None, json.loads(sys.argv[1]))
    folder = Path(sys.argv[2])
    bucket_bytes = int(sys.argv[3])
    base = Path(config.model.path)
    weights = load_file(base / "model.safetensors")
    sizes = {name: getattr(config.parallel, name) for name in ("tensor", "pipeline", "context", "expert")}
    with platform.parallel_session(platform.get_platform("cpu"), 0, **sizes):
        watched = Watched(open_models(config, platform.get_platform("cpu")))
        ranks = RankGroup()
        client = Client("a", base)
        client.held = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        orchestrator = Orchestrator([client], fixed=None)
        publisher = Verifying(
            connection=orchestrator,
            ranks=ranks,
            transport=open_transport("gloo", TIMEOUT_S, torch.device("cpu"), folder / "weights"),
            dtype=torch.float32,
            bucket_bytes=bucket_bytes,
            timeout_s=10 * TIMEOUT_S,
        )
        publisher.publish(watched, 1)
        publisher._end_last_attempt()
        orchestrator.close()
        equal = ranks.rank > 0 or all(torch.equal(client.held[name], tensor) for name, tensor in weights.items())
        buckets = client.calls.count("/update_weights")
    report = {"peak": watched.peak, "total": watched.total, "equal": equal, "buckets": buckets}
    Path(os.environ["REPORT"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
