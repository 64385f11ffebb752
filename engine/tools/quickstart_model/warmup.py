"""Makes the quickstart's base model: a tiny Qwen3 that learns additions for a minute, as a start for GRPO."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from engine.errors import MetronomeError
from engine.run.files import sync_all, write_atomically
from engine.tools.quickstart_model import byte_tokenizer as byte_tokenizer
from engine.tools.quickstart_model.addition import lessons, read_rows

MARKER = "complete.json"
"""File that is written last: the size in bytes of every other file in the folder."""
IGNORED = -100
"""Label of tokens without a loss (prompt and padding)."""


@dataclass(frozen=True)
class WarmUp:
    """The settings of the warm-up. They are part of the cache key."""

    hidden: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    intermediate: int = 512
    context: int = 2048
    init_std: float = 0.06
    """Transformers' 0.02 suits a hidden size of thousands; at 128 it costs a fifth more steps."""
    wrong_share: float = 0.5
    """Share of the rows with a wrong sum. It limits the accuracy to 0.5, even if the rest is learned perfectly. GRPO
    runs from models made with 0.5 ended with a held-out accuracy of 0.94 to 0.98; from models made with 0.3 (and
    another learning rate) with 0.89."""
    batch: int = 64
    """Rows per step."""
    learning_rate: float = 5e-3
    """Peak learning rate, reached by a linear rise over `rise_steps`. Then it decays linearly to 0 at twice
    `max_steps`."""
    rise_steps: int = 30
    max_steps: int = 600
    """Limit of the warm-up steps; a typical warm-up takes 300."""
    report_every: int = 10
    """Number of steps between progress lines, and, from `measure_from` on, between measurements."""
    measure_from: int = 200
    problems: int = 192
    """Number of problems per measurement, with one response each. The standard error is 0.034."""
    enough: float = 0.36
    """Accuracy that ends the warm-up. Near it, the accuracy rises by about 0.04 between two measurements."""
    too_low: float = 0.25
    """With an accuracy below this, GRPO cannot improve the model."""


def ensure_quickstart_model(
    cache_root: Path,
    train_file: Path,
    seed: int = 0,
    report: Callable[[str], None] = print,
    settings: WarmUp = WarmUp(),  # noqa: B008  (frozen)
) -> Path:
    """The Hugging Face folder of the quickstart model, from the cache or by a warm-up on `train_file` (about a minute).

    The folder is `cache_root`/quickstart-<hash of rows, settings, seed, code, library versions>. Several processes may
    call this at the same time. Raises BadInput if the file has no additions, and MetronomeError if the model does not
    learn.
    """
    rows = read_rows(train_file)
    folder = cache_root / f"quickstart-{_key(rows, settings, seed)}"
    if is_complete(folder):
        return folder
    cache_root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_root, prefix=".quickstart-") as scratch:
        made = Path(scratch) / "model"
        with torch.random.fork_rng(devices=[]), _one_thread():
            torch.manual_seed(seed)
            _make(folder=made, rows=rows, seed=seed, report=report, how=settings)
        _publish(made, folder, Path(scratch) / "replaced")
    return folder


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread. A model this small gains little from a second thread, and is very slow if another process uses
    the second core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def is_complete(folder: Path) -> bool:
    """Whether every file of the folder exists with its full size."""
    try:
        sizes: dict[str, int] = json.loads((folder / MARKER).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False


def _key(rows: list[dict[str, str]], settings: WarmUp, seed: int) -> str:
    code = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    versions = [torch.__version__, transformers.__version__, tokenizers.__version__]
    everything = json.dumps([rows, asdict(settings), seed, code, versions])
    return hashlib.sha256(everything.encode()).hexdigest()[:12]


def _make(folder: Path, rows: list[dict[str, str]], seed: int, report: Callable[[str], None], how: WarmUp) -> None:
    """Warm up a model and write its folder, marker last."""
    tokenizer = byte_tokenizer.build(how.context)
    model = untrained(tokenizer, how)
    _warm_up(model=model, tokenizer=tokenizer, rows=rows, seed=seed, report=report, how=how)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    sync_all(folder)
    write_atomically(folder / MARKER, json.dumps(sizes))


def untrained(tokenizer: PreTrainedTokenizerFast, how: WarmUp) -> Qwen3ForCausalLM:
    """A Qwen3 of the quickstart's shape with random weights from the global generator."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=how.hidden,
        intermediate_size=how.intermediate,
        num_hidden_layers=how.layers,
        num_attention_heads=how.heads,
        num_key_value_heads=how.kv_heads,
        head_dim=how.head_dim,
        max_position_embeddings=how.context,
        initializer_range=how.init_std,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_p=1.0, top_k=0, **ends)
    return model


def _warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    seed: int,
    report: Callable[[str], None],
    how: WarmUp,
) -> None:
    """Train with supervision until the accuracy of sampled answers reaches `how.enough`. Changes `model` in place."""
    started = time.monotonic()
    ids, labels = _tensors(lessons(rows, how.wrong_share, seed), tokenizer)
    accuracy = 0.0
    for step, loss in _steps(model, ids, labels, how):
        if step % how.report_every:
            continue
        measured = step >= how.measure_from
        if measured:
            accuracy = _accuracy(model, tokenizer, rows, how.problems, max_tokens=ids.shape[1])
        report(
            f"base model: step {step}, loss {loss:.3f}, accuracy {accuracy:.2f} (stops at {how.enough:.2f}), "
            f"{time.monotonic() - started:.0f} s"
        )
        if measured and accuracy >= how.enough:
            return
    if accuracy < how.too_low:
        raise MetronomeError(
            f"the quickstart model reached accuracy {accuracy:.2f} in {how.max_steps} warm-up steps, "
            f"below the {how.too_low:.2f} that GRPO needs; set model.path to a model of your own"
        )


def _tensors(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both [rows, longest]. Only the solution and the end token after it have labels."""
    prompts = tokenizer([problem for problem, _ in pairs])["input_ids"]
    texts = tokenizer([problem + solution + byte_tokenizer.END for problem, solution in pairs])["input_ids"]
    ids = torch.full((len(pairs), max(map(len, texts))), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids[row, : len(text)] = torch.tensor(text)
        labels[row, len(prompt) : len(text)] = ids[row, len(prompt) : len(text)]
    return ids, labels


def _steps(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor, how: WarmUp) -> Iterator[tuple[int, float]]:
    """Train on random batches, each row once per pass. Yields (step from 1, mean token loss) after each update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, how))
    order = torch.empty(0, dtype=torch.long)
    for step in range(1, how.max_steps + 1):
        if len(order) < how.batch:
            order = torch.randperm(len(ids))
        chosen = order[: how.batch]
        order = order[how.batch :]
        # Padding is on the right, where causal attention does not look, so no mask is needed.
        loss = model(input_ids=ids[chosen], labels=labels[chosen], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield step, loss.item()


def _rate(step: int, how: WarmUp) -> float:
    """Share of the peak learning rate: a linear rise, then a linear decay that reaches half at `max_steps`."""
    return min((step + 1) / how.rise_steps, 1 - step / (2 * how.max_steps))


@torch.no_grad()
def _accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    problems: int,
    max_tokens: int,
) -> float:
    """Share of right answers (the text after "#") among one sampled response to each of `problems` random rows."""
    chosen = [rows[place] for place in torch.randperm(len(rows))[:problems].tolist()]
    prompts = tokenizer([row["problem"] for row in chosen], return_tensors="pt", padding=True)
    sampled = model.generate(**prompts, max_new_tokens=max_tokens)
    texts = tokenizer.batch_decode(sampled[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [text.rpartition("#")[2] == row["answer"] for text, row in zip(texts, chosen, strict=True)]
    return sum(right) / len(right)


def _publish(made: Path, folder: Path, aside: Path) -> None:
    """Move the finished folder to its place. If another process was faster, its folder stays; a damaged folder is moved
    aside."""
    while not is_complete(folder):
        try:
            made.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not is_complete(folder):
                with contextlib.suppress(FileNotFoundError):  # another process has just moved it
                    folder.rename(aside)
