"""The files for a team's servers and images: what can be said about them without Docker."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from support.runs import ROOT
from tasks.cluster.watchdog import HEARTBEAT_S, SILENCE_S
from tasks.commands import doctor

COMPOSE = ROOT / "infra/compose/compose.yaml"
CONTAINERS = sorted((ROOT / "infra/containers").glob("*.Containerfile"))


def test_compose_services_wait_for_ones_that_can_tell():
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for name, service in services.items():
        assert service.get("image"), name
        for other, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in services[other], (name, other)
            else:
                assert services[other].get("restart") is None, f"{name} waits for the end of {other}, which starts anew"


def test_compose_is_reached_from_this_machine_only():
    ports = [port for one in yaml.safe_load(COMPOSE.read_text())["services"].values() for port in one.get("ports", ())]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_needs_what_the_example_lists():
    text = "\n".join(line for line in COMPOSE.read_text().splitlines() if not line.lstrip().startswith("#"))
    needed = set(re.findall(r"\$\{(\w+):\?", text))
    listed = set(re.findall(r"^(\w+)=$", (ROOT / "infra/compose/example.env").read_text(), re.M))
    assert needed == listed


def test_compose_passwords_are_made_once_for_their_owner_only_and_need_no_openssl(tmp_path):
    for name in ("passwords.sh", "example.env"):
        (tmp_path / name).write_text((COMPOSE.parent / name).read_text())
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dirname", "mv", "od", "tr"):
        (tools / name).symlink_to(shutil.which(name))
    command = ["sh", str(tmp_path / "passwords.sh")]
    (tools / "od").rename(tools / "other")
    without = subprocess.run(command, env={"PATH": str(tools)}, timeout=30, capture_output=True, text=True)
    assert (without.returncode, "no password" in without.stderr) == (1, True)
    assert not (tmp_path / ".env").exists()
    (tools / "other").rename(tools / "od")
    made = []
    for path in (str(tools), os.environ["PATH"]):
        subprocess.run(command, env={"PATH": path}, check=True, timeout=30, capture_output=True)
        made.append((tmp_path / ".env").read_text())
    assert made[0] == made[1]
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    values = re.findall(r"^\w+=(.*)$", made[0], re.M)
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in values)
    assert len(set(values)) == len(values) == 9
    ignored = subprocess.run(["git", "check-ignore", "-q", "infra/compose/.env"], cwd=ROOT, timeout=30)
    assert ignored.returncode == 0


def test_compose_asks_who_it_is():
    """Every server wants a password, no service but MinIO's own has its administrator's key."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    prefect = services["prefect"]["environment"]
    assert "PREFECT_SERVER_API_AUTH_STRING" in prefect
    assert "*" not in prefect["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
    for name in ("deploy", "watchdog", "worker"):
        assert services[name]["environment"]["PREFECT_API_AUTH_STRING"] == prefect["PREFECT_SERVER_API_AUTH_STRING"]
    assert "--app-name basic-auth" in (COMPOSE.parent / "mlflow.sh").read_text()
    keys = {name: one.get("environment", {}).get("AWS_ACCESS_KEY_ID") for name, one in services.items()}
    assert {name: key for name, key in keys.items() if key} == {"mlflow": "mlflow", "worker": "client"}
    root = [name for name, one in services.items() if "${MINIO_PASSWORD" in str(one)]
    assert root == ["minio", "bucket"]


def test_compose_volumes_and_mounts_are_there():
    tree = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text()))
    mounts = [volume.split(":")[0] for one in tree["services"].values() for volume in one.get("volumes", ())]
    for source in mounts:
        assert source in tree["volumes"] or (COMPOSE.parent / source).exists(), source


def test_compose_runs_prefect_with_its_database():
    """In the image of the worker, so that both have one version."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert services["prefect"]["image"] == services["worker"]["image"]
    packages = (ROOT / "infra/packages/images.txt").read_text()
    for name in ("prefect", services["prefect"]["environment"]["PREFECT_API_DATABASE_CONNECTION_URL"].split("+")[1]):
        name = name.partition(":")[0]
        pinned = re.search(rf"^{name}==.+$", (ROOT / "constraints.txt").read_text(), re.M).group()
        assert re.search(rf"^{re.escape(pinned)} ", packages, re.M), name


def test_compose_watches_over_runs():
    """The watchdog runs beside the server, and the worker's flows send the heartbeats by
    which their silence is noticed."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    watchdog = services["watchdog"]
    worker = services["worker"]
    assert watchdog["command"] == "python -m tasks.cluster.watchdog --alive /tmp/alive"
    assert watchdog["restart"] == "unless-stopped"
    assert watchdog["environment"]["PREFECT_API_URL"] == worker["environment"]["PREFECT_API_URL"]
    assert worker["environment"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_S)
    assert 2 * HEARTBEAT_S < SILENCE_S  # one lost heartbeat is not silence


def test_containers_use_files_and_extras_that_exist():
    extras = set(
        re.findall(r"^(\w+) = \[$", (ROOT / "pyproject.toml").read_text().split("optional-dependencies]")[1], re.M)
    )
    assert len(CONTAINERS) == 3
    for path in CONTAINERS:
        text = path.read_text()
        assert set(re.findall(r"'\.\[([\w,]+)\]'", text)[0].split(",")) <= extras
        assert all((ROOT / name).exists() for name in re.findall(r"\binfra/\S+?\.\w+", text)), path
        assert Path(ROOT / "constraints.txt").exists()
        assert "METRONOME_TOKEN" not in text
        assert not re.search(r"(?i)password|secret", text)


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.stem)
def test_containers_are_pinned_and_not_root(path):
    steps = re.sub(r"\\\n", " ", path.read_text()).splitlines()
    assert [line for line in steps if line.startswith("FROM ")] == ["FROM ${IMAGE}"]
    (base,) = [line.removeprefix("ARG IMAGE=") for line in steps if line.startswith("ARG IMAGE=")]
    assert re.search(r":\d+\.\d+\.\d+[-\w.{}$]*$|@sha256:[0-9a-f]{64}$", base), f"{base}: not a full version"
    assert not [line for line in steps if re.search(r"git clone|--branch", line)], "a branch names no version"
    user = steps.index("USER metronome")
    assert any("useradd" in line for line in steps[:user])
    assert not [line for line in steps[:user] if " pip " in line or "install.sh" in line], "packages are the user's"
    assert [line for line in steps[user:] if line.startswith("USER ")] == ["USER metronome"]


DOCKER = """#!/bin/sh
echo "$3" >> "$(dirname "$0")/asked"
[ "$1 $2 $4 $5" = "buildx imagetools inspect --format {{.Manifest.Digest}}" ] || [ "$2" = imagetools ] || exit 9
echo sha256:0123456789012345678901234567890123456789012345678901234567890123
"""
DIGEST = "@sha256:0123456789012345678901234567890123456789012345678901234567890123"


def digests(tmp_path, file, **env):
    """What infra/digests.sh prints, with a docker that knows every image."""
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["sh", str(ROOT / "infra/digests.sh"), str(file)]
    done = subprocess.run(command, env={"PATH": path, **env}, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines()


def test_one_command_pins_images_by_digest(tmp_path):
    services = yaml.safe_load(COMPOSE.read_text())["services"].values()
    built = {one["image"] for one in services if "build" in one}
    images = {one["image"] for one in services} - built
    named = dict(re.fullmatch(r"\$\{(\w+_IMAGE):-(\S+)\}", image).groups() for image in images)
    assert set(digests(tmp_path, COMPOSE)) == {f"{name}={named[name]}{DIGEST}" for name in named}
    assert len(named) == 1
    minio = COMPOSE.parent / "minio.Containerfile"
    bases = dict(line.removesuffix(DIGEST).split("=", 1) for line in digests(tmp_path, minio))
    assert set(bases) == {"GO_IMAGE", "IMAGE"}
    (release,) = {name.partition(":")[2] for name in built} - {"cpu"}
    assert f"--branch {release} https://github.com/minio/minio " in minio.read_text()
    assert release >= "RELEASE.2025-10-15T17-29-55Z"  # fixes CVE-2025-62506
    for image in (*named.values(), *bases.values()):
        assert re.search(r":[\w.]*\d+[.-]\d+\S*$", image), f"{image}: not a full version"
    for path in CONTAINERS:
        ((name, image),) = [line.split("=", 1) for line in digests(tmp_path, path)]
        assert name == "IMAGE"
        assert image.endswith(DIGEST)
        assert "$" not in image
    ascend = ROOT / "infra/containers/ascend.Containerfile"
    assert digests(tmp_path, ascend, DEVICE="a3") == [f"IMAGE=quay.io/ascend/cann:9.1.0-a3-ubuntu22.04-py3.12{DIGEST}"]


def test_commits_in_lists_are_whole():
    for path in (ROOT / "infra").glob("*/*.txt"):
        for line in path.read_text().splitlines():
            assert "git+" not in line or re.search(r"@[0-9a-f]{40}$", line), line


def test_both_environments_for_npus_come_from_one_script_each():
    """The Makefile and the container file install the same lists."""
    container = (ROOT / "infra/containers/ascend.Containerfile").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert "bash infra/trainer/install.sh .venv/bin/python" in container
    assert "bash infra/trainer/install.sh $(BIN)/python" in makefile
    assert "bash infra/vllm/install.sh npu" in container
    assert "vllm DEVICE=npu" in makefile
    cann = re.search(r"cann:(\d+\.\d+)", container).group(1)
    needed = [rule.needs["CANN"] for rule in doctor.VLLM_ASCEND if rule.versions == ">=0.23.0,<0.24"]
    assert needed == [f"=={cann}.*"]


@pytest.fixture
def pip_calls(tmp_path):
    """A python that installs nothing: runs a script with it and returns the options of each call of pip, with the
    lists that they name, and the python3 and cmake that it would find in another folder."""
    python = tmp_path / "python"
    python.write_text(
        "#!/usr/bin/env bash\n"
        '[ "$1 $2" = "-m venv" ] && { mkdir -p "$3/bin"; for one in python python3 cmake; do cp "$0" "$3/bin/$one"; '
        "done; }\n"
        'if [ "$1 $2" = "-m pip" ]; then\n'
        '    echo "CALL $VLLM_TARGET_DEVICE $TORCH_DEVICE_BACKEND_AUTOLOAD $*"\n'
        '    for one in python3 cmake; do (cd / && echo "finds $(command -v "$one")"); done\n'
        '    for one in "$@"; do case $one in *.txt) sed "s/^/$(basename "$one") /" "$one" ;; esac; done\n'
        "fi\n"
        "exit 0\n"
    )
    python.chmod(0o755)

    def run(script, *arguments, **env):
        done = subprocess.run(
            ["bash", str(ROOT / script), *[one.replace("PYTHON", str(python)) for one in arguments]],
            env={"PATH": os.environ["PATH"], **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.split("CALL ")[1:]

    return run


def test_the_trainer_for_npus_is_installed_with_its_own_torch(pip_calls):
    _, packages, mindspeed = pip_calls("infra/trainer/install.sh", "PYTHON", ".[team]")
    assert "--editable .[team]" in packages
    constraints = [line.split()[1] for line in packages.splitlines() if line.startswith("constraints.txt ")]
    assert not [line for line in constraints if line.startswith("torch==")]
    assert len(constraints) > 200
    assert "packages.txt torch-npu==2.10.0.post4" in packages
    assert "mindspeed" not in packages
    assert re.search(r"--no-deps mindspeed @ git\+https://\S+@[0-9a-f]{40}$", mindspeed.splitlines()[0])


@pytest.mark.parametrize(("soc", "compiled"), [("", False), ("ascend910b1", False), ("ascend910_9391", True)])
def test_instances_for_npus_are_installed_without_dependencies(pip_calls, tmp_path, soc, compiled):
    calls = pip_calls("infra/vllm/install.sh", "npu", "PYTHON", "venv", SOC_VERSION=soc)
    assert all("--no-deps" in call for call in calls)
    wheels, vllm, *rest = calls
    assert "wheels.txt vllm==" not in wheels
    assert ("wheels.txt vllm-ascend==" in wheels) != compiled
    built = [call.splitlines() for call in (vllm, *rest)]
    pinned = ["vllm==0.23.0"] + ["vllm-ascend==0.23.0"] * compiled
    assert [command.split("--no-build-isolation ")[1] for command, *_ in built] == [
        f"--no-binary {one.partition('==')[0]} {one}" for one in pinned
    ]
    assert vllm.startswith("empty ")
    # building imports torch, which would load torch-npu: that needs CANN's environment
    assert [command.split()[: 2 - number] for number, (command, *_) in enumerate(built)] == [["empty", "0"], ["0"]][
        : len(built)
    ]
    here = [f"finds {tmp_path}/venv/bin/{one}" for one in ("python3", "cmake")]  # vllm-ascend's setup.py starts both
    assert [found for _, *found in built] == [here] * len(pinned)


def test_the_makefile_finds_all_files_with_a_marker():
    """Its FILES looks for `mark.NAME` in test files, and for the ENGINES of support/served.py."""
    marked = re.compile(r"mark\.(slow|parallel|faults|stack|chaos|vllm|ascend)\b")
    tests = ROOT / "tests"
    found = {path.relative_to(tests) for path in tests.rglob("*.py") if marked.search(path.read_text())}
    assert {str(path) for path in found if not path.name.startswith("test_")} == {"support/served.py"}
    folders = re.search(r"foreach folder,([^,]+),", (ROOT / "Makefile").read_text())[1].split()
    assert {path.parts[0] for path in found} <= {*folders, "support"}
