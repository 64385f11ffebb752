"""The container files: what they copy and install, and the image of the CPU built for real on a clean Debian.

The base images' registries need not be reached: debootstrap makes the base of Debian's packages. METRONOME_WHEELS names
a folder with torch's wheel for the CPU, where PyTorch's index is not reached.
"""

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def debian(tmp_path_factory):
    """The name of an image with a clean Debian and its Python; buildah has it."""
    missing = [name for name in ("debootstrap", "buildah") if shutil.which(name) is None]
    if not (3, 11, 3) <= sys.version_info < (3, 12):
        pytest.skip("needs Python 3.11.3 or a later 3.11, as the image has")
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, debootstrap and buildah, packages of Debian; missing: {missing}")
    tree = tmp_path_factory.mktemp("debian") / "tree"
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates,python3,python3-venv", "bookworm", tree]
    subprocess.run(command, check=True, capture_output=True, timeout=1200)
    add_python(tree)
    return base_image(tree)


def add_python(tree):
    """Put this Python, without packages, before Debian's 3.11.2: the real base image has a later one too."""
    own = Path(sys.base_prefix)
    here = tree / "usr/local"
    for name in ("lib/python3.11", "include/python3.11"):
        left = shutil.ignore_patterns("site-packages", "test", "__pycache__")
        shutil.copytree(own / name, here / name, ignore=left, dirs_exist_ok=True)
    for file in [*own.glob("bin/python3*"), *own.glob("lib/libpython3*")]:
        shutil.copy(file, here / file.parent.name, follow_symlinks=False)
    subprocess.run(["chroot", tree, "ldconfig"], check=True, timeout=60)


def base_image(tree):
    """The tree as an image, with this machine's certificates, and wheels where METRONOME_WHEELS names a folder."""
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", tree / "etc/ssl/certs/ca-certificates.crt")
    (tree / "etc/pip.conf").write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ntimeout = 180\n")
    if wheels := os.environ.get("METRONOME_WHEELS"):
        (tree / "wheels/torch").mkdir(parents=True)
        for file in Path(wheels).glob("torch-*.whl"):
            shutil.copy(file, tree / "wheels/torch")
        links = [f'<a href="{file.name}">{file.name}</a>' for file in (tree / "wheels/torch").glob("*.whl")]
        (tree / "wheels/torch/index.html").write_text("<!DOCTYPE html><html><body>" + "<br>".join(links))
    container = buildah("from", "scratch")
    buildah("add", container, str(tree), "/")
    buildah("commit", container, "localhost/metronome-base:12")
    buildah("rm", container)
    return "localhost/metronome-base:12"


def buildah(*words):
    done = subprocess.run(["buildah", *words], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


RUNS = ("metronome --help", "prefect version", "python -c 'import psycopg2, boto3, flask_wtf, torch'", "pip check")


@pytest.mark.nightly
@pytest.mark.timeout(4000)
def test_the_image_of_the_cpu_is_built_on_a_clean_debian(debian, tmp_path):
    environment = {"BUILDER": "buildah", "BUILDAH_ISOLATION": "chroot", "IMAGE": debian, "LISTS": str(tmp_path)}
    if os.environ.get("METRONOME_WHEELS"):
        environment["TORCH_INDEX"] = "file:///wheels"
    done = build("cpu", **environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert re.search(r"^metronome:cpu: user metronome, sha256:[0-9a-f]{64}, \d+ files in ", done.stdout, re.M)
    files = set((tmp_path / "cpu.txt").read_text().splitlines())
    assert "./opt/metronome/flows/main.py" in files
    assert [name for name in files if Path(name).name == ".env" or name.startswith("./opt/metronome/.git/")] == []
    container = buildah("from", "metronome:cpu")
    try:
        run = ("run", "--isolation", "chroot", container, "--", "sh", "-c")
        assert buildah(*run, "id -u; id -g; pwd").split() == ["10001", "10001", "/opt/metronome"]
        for command in RUNS:
            buildah(*run, command)
        assert buildah(*run, "touch /opt/metronome/runs/a && ! touch /etc/a 2>/dev/null && echo yes") == "yes"
    finally:
        buildah("rm", container)


@pytest.mark.nightly
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", ["cuda", "ascend"])
def test_the_other_images_get_their_system_packages_and_their_user_on_a_clean_debian(debian, tmp_path, name):
    """Their Python packages take gigabytes, and need CUDA's or CANN's base image."""
    text = (ROOT / f"infra/containers/{name}.Containerfile").read_text()
    before, _, _ = text.partition("USER metronome")
    file = tmp_path / "Containerfile"
    file.write_text(before + "USER metronome\nWORKDIR /opt/metronome\nCOPY --chown=metronome . .\n")
    tag = f"metronome-{name}:packages"
    context = ["--isolation", "chroot", "--build-arg", f"IMAGE={debian}", "--file", str(file), "--tag", tag, str(ROOT)]
    buildah("build", *context)
    container = buildah("from", tag)
    try:
        run = ("run", "--isolation", "chroot", container, "--", "sh", "-c")
        programs = "git g++ make python3" + (" clang clang++ cmake" if name == "ascend" else "")
        assert len(buildah(*run, f"for one in {programs}; do command -v $one; done").split()) == len(programs.split())
        assert buildah(*run, "id -u; stat -c %U pyproject.toml").split() == ["10001", "metronome"]
    finally:
        buildah("rm", container)
