"""The container files: what they copy and install, and the script that builds them. Nothing is built."""

import os
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

from support.runs import ROOT

SCRIPT = ROOT / "infra/containers/build.sh"
FILES = sorted([*(ROOT / "infra/containers").glob("*.Containerfile"), ROOT / "infra/compose/minio.Containerfile"])
SECRETS = (".env", "infra/compose/.env", "infra/kubernetes/base/.env", "infra/kubernetes/base/.env.partial")
LEFT_OUT = (*SECRETS, "runs/a/run.json", ".git/config", ".venv/bin/python", "data/smollm2/model.safetensors", "a.pem")


def steps(path):
    """The file's instructions: (name, rest)."""
    lines = re.sub(r"\\\n", " ", path.read_text()).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip() and not line.startswith("#")]


def test_what_is_copied_is_there_and_secrets_stay_out():
    for path in FILES:
        copied = [rest.split() for name, rest in steps(path) if name == "COPY"]
        for words in copied:
            own = [word for word in words if not word.startswith("--")]
            assert own[0] == "." or words[0].startswith("--from="), path
    ignored = [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()]
    for name in LEFT_OUT:
        parts = [name, Path(name).name, *(str(one) for one in Path(name).parents if str(one) != ".")]
        assert any(fnmatch(part, pattern) for part in parts for pattern in ignored), name
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.split()
    assert not {Path(name).name for name in tracked} & {".env", ".env.partial"}


def plain(pin):
    return re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower() + pin[pin.find("==") :]


def test_packages_come_from_the_lists_and_no_image_runs_as_root():
    versions = {plain(line) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for path in FILES:
        told = steps(path)
        users = [rest for name, rest in told if name == "USER"]
        assert users[-1] in ("metronome", "1000:1000")
        if "metronome" in users:
            text = " ".join(rest for name, rest in told if name == "RUN")
            assert "--require-hashes" in text
            lists = re.findall(r"infra/\S+?\.(?:txt|sh)|constraints\.txt", text)
            assert "infra/packages/images.txt" in lists
            pinned = re.findall(r"pip install [^&]*?(\b[\w-]+==[\w.]+)", text)
            assert pinned == []  # versions are in the lists only
    for line in (ROOT / "infra/packages/images.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            assert plain(line.split()[0]) in versions


def build(*names, **environment):
    command = ["sh", SCRIPT, *names]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=3000, cwd=ROOT
    )


def test_a_machine_without_a_builder_says_so(tmp_path):
    done = build("cpu", BUILDER="no-builder")
    assert (done.returncode, done.stderr) == (1, "error: no builder of images works here (no-builder)\n")


BUILDER = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$1 $2" in
  "image inspect") case $4 in *User*) echo metronome ;; *) echo sha256:12 ;; esac ;;
  "create "*) echo container ;;
  "export "*) cd "$TREE" && tar --create . ;;
esac
"""


def test_builds_take_arguments_from_the_environment_and_tell_user_digest_and_files(tmp_path):
    (tmp_path / "podman").write_text(BUILDER)
    (tmp_path / "podman").chmod(0o755)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BUILDER": "podman", "LISTS": str(tmp_path / "lists")}
    environment |= {"CALLS": str(tmp_path / "calls"), "TREE": str(tmp_path / "tree"), "DEVICE": "a3"}
    done = build("ascend", "minio", **environment)
    assert done.returncode == 0, done.stderr
    release = re.search(r"image: metronome-minio:(\S+)", (ROOT / "infra/compose/compose.yaml").read_text())[1]
    assert done.stdout.splitlines() == [
        f"metronome:ascend: user metronome, sha256:12, 2 files in {tmp_path}/lists/ascend.txt",
        f"metronome-minio:{release}: user metronome, sha256:12, 2 files in {tmp_path}/lists/minio.txt",
    ]
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("build")]
    file = "infra/containers/ascend.Containerfile"
    assert calls == [
        f"build --build-arg DEVICE=a3 --file {file} --tag metronome:ascend .",
        f"build --file infra/compose/minio.Containerfile --tag metronome-minio:{release} infra/compose",
    ]
