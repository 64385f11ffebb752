"""The files for a team's servers and images: what can be said about them without Docker."""

import re
import subprocess
from pathlib import Path

import yaml

from support.runs import ROOT
from tasks.cluster.services import HEARTBEAT_S
from tasks.cluster.watchdog import SILENCE_S

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


def test_compose_passwords_are_made_once_for_their_owner_only(tmp_path):
    for name in ("passwords.sh", "example.env"):
        (tmp_path / name).write_text((COMPOSE.parent / name).read_text())
    made = []
    for _ in range(2):
        subprocess.run(["sh", str(tmp_path / "passwords.sh")], check=True, timeout=30, capture_output=True)
        made.append((tmp_path / ".env").read_text())
    assert made[0] == made[1]
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    values = dict(re.findall(r"^(\w+)=(.*)$", made[0], re.M))
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in values.values())
    assert len(set(values.values())) == len(values) == 9
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
    tree = yaml.safe_load(COMPOSE.read_text())
    mounts = [volume.split(":")[0] for one in tree["services"].values() for volume in one.get("volumes", ())]
    for source in mounts:
        assert source in tree["volumes"] or (COMPOSE.parent / source).exists(), source


def test_compose_runs_the_prefect_of_the_constraints():
    pinned = re.search(r"^prefect==(.+)$", (ROOT / "constraints.txt").read_text(), re.M).group(1)
    assert f"prefecthq/prefect:{pinned}-" in COMPOSE.read_text()


def test_compose_watches_over_runs():
    """The watchdog runs beside the server, and the worker's flows send the heartbeats by
    which their silence is noticed."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    watchdog = services["watchdog"]
    worker = services["worker"]
    assert watchdog["command"] == "python -m tasks.cluster.watchdog"
    assert watchdog["restart"] == "unless-stopped"
    assert watchdog["environment"]["PREFECT_API_URL"] == worker["environment"]["PREFECT_API_URL"]
    assert worker["environment"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_S)
    assert 2 * HEARTBEAT_S < SILENCE_S  # one lost heartbeat is not silence


def test_containers_use_files_and_extras_that_exist():
    extras = set(
        re.findall(r"^(\w+) = \[$", (ROOT / "pyproject.toml").read_text().split("optional-dependencies]")[1], re.M)
    )
    assert len(CONTAINERS) == 4
    for path in CONTAINERS:
        text = path.read_text()
        assert set(re.findall(r"'\.\[([\w,]+)\]'", text)[0].split(",")) <= extras
        assert all((ROOT / name).exists() for name in re.findall(r"\binfra/\S+?\.\w+", text)), path
        assert Path(ROOT / "constraints.txt").exists()
        assert "METRONOME_TOKEN" not in text
        assert not re.search(r"(?i)password|secret", text)
