"""Makes the quickstart's base model: `python data/make_quickstart_model.py FOLDER`, one to two minutes.

A tiny Qwen3 with random weights learns three-digit additions until it solves a third of them, as a start for GRPO. What
ships is data/quickstart_model, made by torch 2.13.0 and transformers 5.23.0 on an x86 CPU. The same versions on the
same CPU give the same bytes; others round otherwise and give a model that solves about as many.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from generate_addition import COLUMNS, TRAIN_ROWS, column_sums, rows, worked
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SHA256 = "4a10801b92964149ba259c15f794bbd3a1c827c8175ee98377ea2041db98562d"
"""Of data/quickstart_model/model.safetensors."""
SEED = 0
CONTEXT = 2048
END = "<|endoftext|>"
"""The token that ends a response (eos)."""
TURNS = ("<|im_start|>", "<|im_end|>")
PAD = "<|pad|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""
"""Qwen's chat form, without tools and thinking."""
INIT_STD = 0.06
"""Transformers' 0.02 suits a hidden size of thousands; at 128 it costs a fifth more steps."""
WRONG_SHARE = 0.5
"""Share of the rows with a wrong sum. It limits the accuracy to 0.5, even if the rest is learned perfectly. GRPO
runs from models made with 0.5 ended with a held-out accuracy of 0.94 to 0.98; from models made with 0.3 (and
another learning rate) with 0.89."""
BATCH = 64
"""Rows per step."""
LEARNING_RATE = 5e-3
"""Peak learning rate, reached by a linear rise over `RISE_STEPS`. Then it decays linearly to 0 at twice `MAX_STEPS`."""
RISE_STEPS = 30
MAX_STEPS = 600
"""Limit of the steps; a typical model takes 350."""
REPORT_EVERY = 10
"""Number of steps between progress lines, and, from `MEASURE_FROM` on, between measurements."""
MEASURE_FROM = 200
PROBLEMS = 192
"""Number of problems per measurement, with one response each. The standard error is 0.034."""
ENOUGH = 0.36
"""Accuracy that ends the training. Near it, the accuracy rises by about 0.04 between two measurements."""


def make(folder: Path) -> None:
    """Train a model and write its Hugging Face folder."""
    torch.set_num_threads(1)  # a model this small gains little from a second thread
    torch.manual_seed(SEED)
    tokenizer = byte_tokenizer()
    model = untrained(tokenizer)
    train(model, tokenizer, rows()[:TRAIN_ROWS])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0 … 255 are byte values; the ids above are the four special tokens.

    A text becomes its UTF-8 bytes and nothing else: no prefix space, no begin-of-sequence token, no clean-up on
    decoding.
    """
    core = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (END, *TURNS, PAD)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(TURNS),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def byte_vocabulary() -> dict[str, int]:
    """For each byte, the printable character that stands for it in the byte-level pre-tokenizer (GPT-2's table), with
    the byte as its id."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    standins = {chr(byte): byte for byte in printable}
    standins.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return standins


def untrained(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of 1 million parameters with random weights from the global generator."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=INIT_STD,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_p=1.0, top_k=0, **ends)
    return model


def lessons(problems: list[dict[str, str]], wrong_share: float, seed: int) -> list[tuple[str, str]]:
    """(problem, solution) of each row. A share `wrong_share` of the solutions has a wrong sum in one column."""
    draw = random.Random(seed)
    return [
        (row["problem"], wrongly_worked(row["problem"], draw) if draw.random() < wrong_share else row["solution"])
        for row in problems
    ]


def wrongly_worked(problem: str, draw: random.Random) -> str:
    """A worked solution of a problem such as "315+849=" with a wrong sum in one random column."""
    first, second = (int(number) for number in problem.rstrip("=").split("+"))
    column = draw.randrange(COLUMNS)
    right = column_sums(first, second)[column]
    return worked(first, second, slip=(column, draw.choice([total for total in range(20) if total != right])))


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[dict[str, str]]) -> None:
    """Train with supervision until the accuracy of sampled answers reaches `ENOUGH`. Changes `model` in place."""
    started = time.monotonic()
    ids, labels = tensors(lessons(problems, WRONG_SHARE, SEED), tokenizer)
    for step, loss in steps(model, ids, labels):
        if step % REPORT_EVERY:
            continue
        measured = step >= MEASURE_FROM
        reached = accuracy(model, tokenizer, problems, max_tokens=ids.shape[1]) if measured else 0.0
        print(
            f"step {step}, loss {loss:.3f}, accuracy {reached:.2f} (stops at {ENOUGH:.2f}), "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
        if reached >= ENOUGH:
            return
    sys.exit(f"the accuracy is below {ENOUGH:.2f} after {MAX_STEPS} steps: no model was written")


def tensors(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both [rows, longest]. Only the solution and the end token after it have labels."""
    ignored = -100  # the label of tokens without a loss, here prompt and padding
    prompts = tokenizer([problem for problem, _ in pairs])["input_ids"]
    texts = tokenizer([problem + solution + END for problem, solution in pairs])["input_ids"]
    ids = torch.full((len(pairs), max(map(len, texts))), tokenizer.pad_token_id)
    labels = torch.full_like(ids, ignored)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids[row, : len(text)] = torch.tensor(text)
        labels[row, len(prompt) : len(text)] = ids[row, len(prompt) : len(text)]
    return ids, labels


def steps(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> Iterator[tuple[int, float]]:
    """Train on random batches, each row once per pass. Yields (step from 1, mean token loss) after each update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / RISE_STEPS, 1 - step / (2 * MAX_STEPS))
    )
    order = torch.empty(0, dtype=torch.long)
    for step in range(1, MAX_STEPS + 1):
        if len(order) < BATCH:
            order = torch.randperm(len(ids))
        chosen = order[:BATCH]
        order = order[BATCH:]
        # Padding is on the right, where causal attention does not look, so no mask is needed.
        loss = model(input_ids=ids[chosen], labels=labels[chosen], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield step, loss.item()


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[dict[str, str]], max_tokens: int
) -> float:
    """Share of right answers (the text after "#") among one sampled response to each of `PROBLEMS` random rows."""
    chosen = [problems[place] for place in torch.randperm(len(problems))[:PROBLEMS].tolist()]
    prompts = tokenizer([row["problem"] for row in chosen], return_tensors="pt", padding=True)
    sampled = model.generate(**prompts, max_new_tokens=max_tokens)
    texts = tokenizer.batch_decode(sampled[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [text.rpartition("#")[2] == row["answer"] for text, row in zip(texts, chosen, strict=True)]
    return sum(right) / len(right)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python data/make_quickstart_model.py FOLDER")
    make(Path(sys.argv[1]))
