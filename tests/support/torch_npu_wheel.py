"""The wheel of torch_npu that Metronome is written for, from the package index."""

import subprocess
import sys
import zipfile

import pytest

RELEASE = "2.10.0.post4"


def torch_npu_wheel(folder):
    """Download the wheel into the folder and open it. The test is skipped where the index can't be reached."""
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        f"torch-npu=={RELEASE}",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version=3.11",
        "--platform=manylinux_2_28_x86_64",
        f"--dest={folder}",
    ]
    done = subprocess.run(download, capture_output=True, text=True, timeout=200)
    if done.returncode:
        pytest.skip(f"torch-npu can't be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return zipfile.ZipFile(next(folder.glob("torch_npu-*.whl")))
