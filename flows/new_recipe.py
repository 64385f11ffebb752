"""The command `metronome init`, which writes a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from engine.errors import BadInput
from tasks.terminal import console

DeviceKind = Literal["cpu", "cuda", "npu"]


def init(
    file: Annotated[Path, typer.Argument(help="recipe to write; it must not be there")] = Path("recipe.toml"),
    model: Annotated[str, typer.Option(help="Hugging Face folder, here or on s3://, or owner/name of the hub")] = "",
    data: Annotated[str, typer.Option(help="problems to train on: file, folder, s3:// or dataset of the hub")] = "",
    heldout: Annotated[str, typer.Option(help="problems that are never trained on (default: a tenth of --data)")] = "",
    reward: Annotated[str, typer.Option(help="math, exact or file.py:function")] = "",
    device: Annotated[DeviceKind | None, typer.Option(help="what it runs on")] = None,
    devices: Annotated[int, typer.Option(min=0, help="accelerators of the node, training and rollouts together")] = 0,
    max_new_tokens: Annotated[
        int, typer.Option(min=0, help="longest response in tokens (default: 256 on a CPU, 2048 on accelerators)")
    ] = 0,
    memory_gib: Annotated[
        float, typer.Option(min=0, help="memory of an accelerator (default: 60.9 of an NPU, 79.1 of a CUDA device)")
    ] = 0.0,
) -> None:
    """Write a commented recipe that the dry run accepts. Asks for model, data, reward and devices that no option
    gives."""
    from tasks.commands.new_recipe import Wishes, write_recipe

    model = model or _ask("model", "Base model (folder, s3://bucket/folder or owner/name)")
    data = data or _ask("data", "Problems to train on (file, folder or owner/name)")
    reward = reward or _ask("reward", "Reward (math, exact or file.py:function)", "math")
    kind = device or _ask("device", "Device (cpu, cuda or npu)", "cpu")
    if kind not in get_args(DeviceKind):
        raise BadInput(f"--device {kind}: expected cpu, cuda or npu")
    count = devices or (1 if kind == "cpu" else _number(_ask("devices", "Number of devices of the node", "8")))
    wishes = Wishes(
        model=model,
        data=data,
        heldout=heldout,
        reward=reward,
        device=kind,
        devices=count,
        max_new_tokens=max_new_tokens,
        memory_gib=memory_gib,
    )
    time = write_recipe(file, wishes)
    console.print_page(
        f"{file} is written, and the dry run accepts it. Next:\n"
        f"  metronome try-reward {file}                    a few responses, scored\n"
        f"  metronome run {file} --set run.dry=true        layout, memory, time\n"
        f"  metronome run {file}{time}"
    )


def _ask(flag: str, question: str, default: str = "") -> str:
    """The answer of a person; the default if there is none to answer. Raises BadInput without a default."""
    try:
        return str(typer.prompt(question, default=default or None))
    except typer.Abort:
        if default and not sys.stdin.isatty():
            return default
        raise BadInput(f"metronome init: --{flag} is missing, and nobody answers the question") from None


def _number(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise BadInput(f"--devices {text}: expected a number above 0")
    return int(text)
