"""The sizes of a model, read from its Hugging Face folder and checked. An unsupported architecture is refused by
name. And the rules between these sizes and a parallel layout, checked before any process starts, without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.errors import BadInput

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures that can be trained, by their names in `architectures` of config.json."""

UNDECLARED_HEAD_DIM = {"Qwen3ForCausalLM": 128}
"""Architecture → transformers' default if config.json has no `head_dim`; for all others it is hidden // heads."""
UNDECLARED_ROPE_THETA = 10000.0
"""transformers' default if config.json has no `rope_theta`, for all of SUPPORTED."""

PLAIN: Mapping[str, object] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Settings of config.json → the only supported value, which is also the default of an absent setting."""
UNBIASED: Mapping[str, object] = {"attention_bias": False, "mlp_bias": False}
"""Further settings → the only supported value. Qwen2 is exempt: it always has a query, key and value bias."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretching of the rotary wavelengths as in Llama 3.1 (`rope_type` "llama3")."""

    factor: float
    """Factor by which long wavelengths are stretched."""
    low_freq_factor: float
    """Wavelengths above original_context / low_freq_factor are stretched by `factor`."""
    high_freq_factor: float
    """Wavelengths below original_context / high_freq_factor are unchanged; those in between are interpolated."""
    original_context: int
    """Number of positions in pre-training, before the stretching."""


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that replaces the MLP in some layers."""

    count: int
    """Number of experts in a layer."""
    per_token: int
    """Number of experts that compute each token."""
    intermediate: int
    """Hidden size inside each expert."""
    normalised: bool
    """Whether the chosen experts' probabilities are divided by their sum."""
    layers: tuple[int, ...]
    """Indices of the layers with experts, from 0; the others have a dense MLP."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with RMSNorm, rotary positions and gated SiLU MLPs (or experts of that kind)."""

    architecture: str
    """One of SUPPORTED."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    """Number of positions that the model supports."""
    rope_theta: float
    norm_eps: float
    tied: bool
    """Whether the output layer shares the embedding's weight."""
    rope_scaling: Llama3Scaling | None = None
    """Scaling of the rotary embedding; None if there is none."""
    experts: Experts | None = None
    """Mixture of experts; None: a dense model."""


def read_shape(folder: Path, weights: bool = True) -> ModelShape:
    """Read `config.json` of a Hugging Face folder. Raises BadInput if it is not such a folder, or the model is not
    supported.

    With `weights=False` the folder need not contain weights (for a dry run). A file of the folder that is a link out of
    it is refused: export, MLflow and S3 would get a copy of what it leads to.
    """
    path = folder / "config.json"
    if adapter := next((file.name for file in sorted(folder.glob("adapter_*"))), None):
        raise BadInput(
            f"model.path {folder}: it has an adapter ({adapter}), which is not loaded: merge it into the weights, or "
            "remove it to train the model without it"
        )
    if not path.is_file():
        raise BadInput(
            f"model.path {folder}: no config.json there; expected a Hugging Face folder with config.json, "
            "tokenizer files and *.safetensors, here or on s3://, or owner/name on the hub (where no folder `owner` is "
            "here)"
        )
    _check_links(folder)
    config = _read_object(path)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED:
        raise BadInput(f"{path}: architecture {architecture} is not supported; supported: {', '.join(SUPPORTED)}")
    _refuse_variants(path, architecture, config)
    if weights and not list(folder.glob("*.safetensors")):
        raise BadInput(
            f"model.path {folder}: no *.safetensors there; other weight formats are not read (pickle is unsafe)"
        )
    try:
        return _check_sizes(path, _shape(architecture, config))
    except KeyError as error:
        raise BadInput(f"{path}: key {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise BadInput(f"{path}: a size is not a number: {error}") from None


def _shape(architecture: str, config: Mapping[str, Any]) -> ModelShape:
    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    rope = _rope(config)
    theta = rope.get("rope_theta") or config.get("rope_theta") or UNDECLARED_ROPE_THETA
    declared = {"num_key_value_heads": None, **config} if architecture == "LlamaForCausalLM" else config
    return ModelShape(
        architecture=architecture,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(declared["num_key_value_heads"] or heads),
        head_dim=int(config.get("head_dim") or UNDECLARED_HEAD_DIM.get(architecture, hidden // max(heads, 1))),
        intermediate=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        context=int(config["max_position_embeddings"]),
        rope_theta=float(theta),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_scaling=_scaling(rope, config) if _rope_type(rope) == "llama3" else None,
        experts=_experts(config) if architecture == "Qwen3MoeForCausalLM" else None,
    )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the rotary embedding; {} if there are none. transformers 5 writes `rope_parameters` with
    rope_theta inside; 4 wrote rope_theta and a separate `rope_scaling` (or null), which 5 prefers where both are."""
    found: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return found


def _rope_type(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Llama3Scaling:
    first = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context=int(first or config["max_position_embeddings"]),
    )


def _experts(config: Mapping[str, Any]) -> Experts:
    """Return the mixture of experts. transformers 5 writes `num_local_experts`, 4 wrote `num_experts`."""
    step = int(config.get("decoder_sparse_step", 1))
    dense = config.get("mlp_only_layers") or ()
    return Experts(
        count=int(config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]),
        per_token=int(config["num_experts_per_tok"]),
        intermediate=int(config["moe_intermediate_size"]),
        normalised=bool(config.get("norm_topk_prob", False)),
        layers=tuple(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0),
    )


def _refuse_variants(path: Path, architecture: str, config: Mapping[str, Any]) -> None:
    """Raise BadInput for settings with which our computation would differ from that of the model's training."""
    wanted = dict(PLAIN) if architecture == "Qwen2ForCausalLM" else {**PLAIN, **UNBIASED}
    rope = _rope(config)
    if not isinstance(rope, dict) or any(isinstance(one, dict) for one in rope.values()):
        raise BadInput(f"{path}: rope_parameters (rope_scaling) = {rope!r}: expected one set of numbers for all layers")
    found = {**config, "partial_rotary_factor": rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))}
    for name, only in wanted.items():
        value = found.get(name)
        if value is not None and value != only:
            shown = value if isinstance(value, (bool, int, float, str)) else f"{str(value)[:60]}..."
            raise BadInput(f"{path}: {name} = {shown!r} is not supported for {architecture}, only {only!r}")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise BadInput(f"{path}: layer_types has 'sliding_attention', which is not supported, only 'full_attention'")
    if _rope_type(rope) not in ("default", "llama3"):
        raise BadInput(f"{path}: rope_type = {_rope_type(rope)!r} is not supported, only 'default' and 'llama3'")


def _check_sizes(path: Path, shape: ModelShape) -> ModelShape:
    """Return the shape. Raises BadInput for sizes that no model can have."""
    sizes = (
        shape.layers,
        shape.hidden,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.intermediate,
        shape.vocabulary,
    )
    if min(sizes) < 1:
        raise BadInput(f"{path}: sizes must be positive, found {shape}")
    if shape.heads % shape.kv_heads:
        raise BadInput(
            f"{path}: num_attention_heads {shape.heads} is not a multiple of num_key_value_heads {shape.kv_heads}"
        )
    experts = shape.experts
    if experts and not 1 <= experts.per_token <= experts.count:
        raise BadInput(
            f"{path}: num_experts_per_tok {experts.per_token} must be at least 1 and at most the number of experts, "
            f"{experts.count}"
        )
    if experts and experts.normalised and experts.per_token == 1:
        raise BadInput(
            f"{path}: norm_topk_prob with num_experts_per_tok = 1 leaves the router without a gradient; "
            "it is not supported, only two or more experts per token"
        )
    return shape


def _check_links(folder: Path) -> None:
    """Raise BadInput for a link out of the folder. In the hub's cache the files of a snapshot are links to those of the
    same repository."""
    root = folder.resolve()
    inside = root.parents[1] if root.parent.name == "snapshots" else root
    for path in root.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise BadInput(
                f"model.path {folder}: {path.relative_to(root)} is a link out of this folder, to "
                f"{path.readlink()}: put the file itself there"
            )


def content_hash(folder: Path) -> str:
    """Return a hash (hex) over config.json and the weights of a model folder, which identifies the model: SHA-256 of
    each file's name and of its SHA-256, in the order of the names."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def check_content(folder: Path, content: str) -> None:
    """Raise BadInput unless the model folder still has this hash. Call it before a process is started again that loads
    the folder."""
    if content_hash(folder) != content:
        raise BadInput(
            f"{folder}: the weights or the config.json changed since they were loaded first, and a process that has "
            "ended would load others now; put them back as they were"
        )


def end_of_sequence_ids(model: Path) -> frozenset[int]:
    """Return the end-of-sequence ids in generation_config.json and config.json of a Hugging Face folder.

    Raises BadInput for a damaged file, and for an id that is no token of the model.
    """
    found: set[int] = set()
    size: Any = None
    for path in (model / "config.json", model / "generation_config.json"):
        given = _read_object(path) if path.is_file() else {}
        size = given.get("vocab_size", size)
        ids = given.get("eos_token_id")
        for one in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if type(one) is not int or one < 0 or (isinstance(size, int) and one >= size):
                raise BadInput(f"{path}: eos_token_id = {ids!r}: {one!r} is no token id; vocab_size is {size}")
            found.add(one)
    return frozenset(found)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # also raised for text that is not UTF-8
        raise BadInput(f"{path}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: expected a JSON object, as transformers writes it")
    return found


class Sizes(Protocol):
    """The keys of the configuration table `parallel` that the rules read."""

    @property
    def tensor(self) -> int:
        """Number of ranks that share each layer's matrices."""

    @property
    def pipeline(self) -> int:
        """Number of stages that share the layers."""

    @property
    def expert(self) -> int:
        """Number of ranks that share the experts."""

    @property
    def sequence(self) -> bool:
        """Whether tensor ranks also share the norms' work."""


def check_layout(shape: ModelShape, parallel: Sizes, table: str = "parallel") -> None:
    """Raise BadInput, which names every rule that the layout breaks for this model, by key and number. `table`: the
    table of the keys.

    `engine.config.Parallel` checks the rules between the sizes themselves. There is no rule for the vocabulary or for
    tokens: the vocabulary is padded to a multiple of the tensor ranks, rows to the multiple that context and sequence
    parallelism need.
    """
    broken = [
        *_tensor_rules(shape, parallel.tensor, table),
        *_pipeline_rules(shape, parallel.pipeline, table),
        *_expert_rules(shape, parallel),
    ]
    if broken:
        raise BadInput(f"the layout does not fit the model ({shape.architecture}): " + "; ".join(broken))


def _tensor_rules(shape: ModelShape, tensor: int, table: str) -> Iterator[str]:
    """Rules of tensor parallelism. Attention is split by whole heads, MLPs by features. Experts are never split."""
    if shape.heads % tensor:
        yield f"{table}.tensor = {tensor} does not divide its {shape.heads} attention heads"
    elif shape.kv_heads % tensor and tensor % shape.kv_heads:
        yield (
            f"{table}.tensor = {tensor} and its {shape.kv_heads} key-value heads: one must divide the other "
            "(Megatron's rule: several ranks may share a head, but not a part of one)"
        )
    elif (rows := (shape.heads + 2 * shape.kv_heads) * shape.head_dim) % tensor:  # only where ranks share a head
        yield f"{table}.tensor = {tensor} does not divide the {rows} rows of its query, key and value weights"
    dense = shape.experts is None or len(shape.experts.layers) < shape.layers
    if dense and shape.intermediate % tensor:
        yield f"{table}.tensor = {tensor} does not divide its MLPs' intermediate size {shape.intermediate}"


def _pipeline_rules(shape: ModelShape, pipeline: int, table: str) -> Iterator[str]:
    if shape.layers % pipeline:
        yield f"{table}.pipeline = {pipeline} does not divide its {shape.layers} layers"


def _expert_rules(shape: ModelShape, parallel: Sizes) -> Iterator[str]:
    if shape.experts is None:
        if parallel.expert > 1:
            yield f"parallel.expert = {parallel.expert} shares experts, but the model has none: set it to 1"
        return
    if shape.experts.count % parallel.expert:
        yield f"parallel.expert = {parallel.expert} does not divide its {shape.experts.count} experts"
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"parallel.tensor = {parallel.tensor} on a model with experts needs parallel.sequence = true "
            "(Megatron's rule for training)"
        )
