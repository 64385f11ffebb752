"""The files for a team's servers and images: what can be said about them without Docker."""

import re
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
