"""The compose file against the Compose Specification's schema, and against what its services are given to run.

The schema is that of 2021, which lacks the key `name` at the top; all else is checked. Nothing is started.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import mlflow.environment_variables
import pytest
import yaml
from prefect.settings.legacy import _get_settings_fields
from prefect.settings.models.root import Settings

from support.runs import ROOT
from tasks.cluster.services import mlflow_server, prefect_server

FOLDER = ROOT / "infra/compose"
SCHEMA = json.loads((Path(__file__).parent / "compose_spec_1.29.json").read_text())
PORTS = {"postgres": 5432, "minio": 9000, "prefect": 4200, "mlflow": 5000}
"""Ports on which the servers listen: those of their images, or of their command."""
ELSEWHERE = {
    "postgres": "POSTGRES_USER POSTGRES_PASSWORD PREFECT_PASSWORD MLFLOW_PASSWORD",
    "minio": "MINIO_ROOT_USER MINIO_ROOT_PASSWORD MC_CONFIG_DIR",
    "bucket": "MC_HOST_store MLFLOW_KEY CLIENT_KEY MC_CONFIG_DIR",
    "mlflow": "DATABASE ADMIN_PASSWORD",
    "worker": "HF_HOME",
}
"""Variables that are the images' own, or are read by the scripts beside the compose file."""


def tree():
    """The file as compose reads it, with a password in each place."""
    text = (FOLDER / "compose.yaml").read_text()
    text = re.sub(r"\$\{\w+:\?[^}]*\}", "password", text)
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


SERVICES = tree()["services"]


def problems(given):
    return [f"{one.json_path}: {one.message}" for one in jsonschema.Draft201909Validator(SCHEMA).iter_errors(given)]


def test_the_file_is_as_the_specification_says():
    given = tree()
    del given["name"]
    assert problems(given) == []
    given["services"]["mlflow"]["helthcheck"] = {}
    given["services"]["worker"]["depends_on"]["mlflow"]["condition"] = "service_ready"
    assert len(problems(given)) == 2


def commands():
    """(service, command) of each that this project or a package of it runs."""
    for name, service in SERVICES.items():
        if "command" in service and name != "minio":
            yield name, shlex.split(service["command"])
    for unit in (ROOT / "infra/systemd").glob("*.service"):
        (command,) = re.findall(r"^ExecStart=/opt/metronome/.venv/bin/(.*)$", unit.read_text(), re.M)
        yield unit.name, shlex.split(command)
    script = (FOLDER / "mlflow.sh").read_text().replace("\\\n", "")
    (served,) = re.findall(r"^exec (mlflow server .*)$", script, re.M)
    yield "mlflow.sh", shlex.split(served)


def test_what_is_run_is_there_and_knows_its_options():
    seen = []
    helps: dict[tuple[str, ...], str] = {}
    for name, words in commands():
        seen.append(words[0])
        if words[0] == "sh":
            assert f"./{words[1].lstrip('/')}:{words[1]}:ro" in SERVICES[name]["volumes"]
        elif words[0] == "python":
            assert words[1] == "-m"
            assert find_spec(words[2]), words
        else:
            options = {word for word in words if word.startswith("--")}
            verbs = [word for word in words[1:3] if re.fullmatch(r"[a-z]+", word)]
            module = "flows.cli" if words[0] == "metronome" else words[0]
            call = (module, *verbs)
            if call not in helps:
                command = [sys.executable, "-m", *call, "--help"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
                helps[call] = done.stdout
            assert options <= set(re.findall(r"--[a-z][a-z-]*", helps[call])), words
    assert set(seen) == {"sh", "python", "prefect", "metronome", "mlflow"}


LASTING = {"postgres", "minio", "prefect", "mlflow", "watchdog", "worker"}


def test_each_server_restarts_by_itself_within_limits_and_tells_its_health():
    assert {name for name, service in SERVICES.items() if service.get("restart") == "unless-stopped"} == LASTING
    for name in LASTING:
        service = SERVICES[name]
        assert service["mem_limit"], name
        assert {"max-size", "max-file"} <= service["logging"]["options"].keys()
        assert service["healthcheck"]["test"], name


def test_units_of_systemd_are_valid_and_start_what_is_there(tmp_path):
    units = sorted((ROOT / "infra/systemd").glob("*.service"))
    known = {*_get_settings_fields(Settings), *vars(mlflow.environment_variables), "DO_NOT_TRACK"}
    for line in (ROOT / "infra/systemd/environment.example").read_text().splitlines():
        assert line.startswith("#") or line.partition("=")[0] in known, line
    for unit in units:
        text = unit.read_text()
        (command,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
        program = command.split()[0]
        assert program.startswith("/opt/metronome/.venv/bin/")
        here = text.replace("/opt/metronome/.venv/bin/", f"{Path(sys.executable).parent}/")
        (tmp_path / unit.name).write_text(here.replace("/opt/metronome", str(ROOT)))
        assert {"Restart=always", "User=metronome"} <= set(text.splitlines())
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    verify = ["systemd-analyze", "verify", *(str(tmp_path / unit.name) for unit in units)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert not [line for line in done.stderr.splitlines() if "metronome-" in line], done.stderr


def user(name):
    """The one that a service's processes have."""
    if "user" in SERVICES[name]:
        return SERVICES[name]["user"]
    assert SERVICES[name]["image"] == "metronome:cpu"  # made by this container file
    return re.findall(r"^USER (\w+)$", (ROOT / "infra/containers/cpu.Containerfile").read_text(), re.M)[-1]


def test_no_server_runs_as_root_and_what_gives_away_a_volume_can_do_nothing_else():
    users = {name: user(name) for name in SERVICES}
    assert [name for name, one in users.items() if one in ("root", "0", "0:0")] == ["minio-owner"]
    owner = SERVICES["minio-owner"]
    assert (owner["network_mode"], owner["cap_drop"]) == ("none", ["ALL"])
    assert set(owner["cap_add"]) == {"CHOWN", "DAC_READ_SEARCH"}
    assert owner["entrypoint"] == ["chown", "-R", users["minio"], "/data"]
    assert owner["volumes"] == SERVICES["minio"]["volumes"]
    assert SERVICES["minio"]["depends_on"] == {"minio-owner": {"condition": "service_completed_successfully"}}


def test_the_recipe_that_is_deployed_is_there():
    (recipe,) = [word for word in shlex.split(SERVICES["deploy"]["command"]) if word.endswith(".toml")]
    assert (ROOT / recipe).is_file()


@pytest.mark.parametrize("name", SERVICES)
def test_every_variable_is_one_that_its_service_reads(name):
    prefect = set(_get_settings_fields(Settings))
    for variable in SERVICES[name].get("environment", {}):
        if variable in ELSEWHERE.get(name, "").split() or variable == "DO_NOT_TRACK":
            continue
        known = (
            variable in prefect if variable.startswith("PREFECT_") else hasattr(mlflow.environment_variables, variable)
        )
        assert known or variable.startswith("AWS_"), variable
    for script in FOLDER.glob("*.sh"):
        if f"./{script.name}:" in str(SERVICES[name].get("volumes")):
            local = set(re.findall(r"^\s*(?:for )?(\w+)(?:=| in )|\) (\w+)=", script.read_text(), re.M))
            used = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", script.read_text()))
            assert used - {one for pair in local for one in pair} <= SERVICES[name]["environment"].keys()


def addresses():
    """(service, address) of each address in an environment or a health check."""
    for name, service in SERVICES.items():
        told = [*service.get("environment", {}).values(), *service.get("healthcheck", {}).get("test", ())]
        for address in re.findall(r"[a-z0-9+]+://[^\s'\",]+", " ".join(told)):
            yield name, urlsplit(address)


def test_addresses_name_services_and_their_ports():
    found = list(addresses())
    assert len(found) > 8
    for name, address in found:
        if address.hostname in ("127.0.0.1", "localhost"):  # the service itself, or a browser on this machine
            assert (
                f"127.0.0.1:{address.port}:{address.port}"
                in SERVICES["prefect" if name == "prefect" else name]["ports"]
            )
        else:
            assert PORTS[address.hostname] == address.port, address
            waits = {name} | SERVICES[name].get("depends_on", {}).keys()
            while more := {other for one in waits for other in SERVICES[one].get("depends_on", {})} - waits:
                waits |= more
            assert address.hostname in waits, f"{name} does not wait for {address.hostname}"
            if address.scheme.startswith("postgresql"):
                created = re.search(r"^for name in (.*); do$", (FOLDER / "databases.sh").read_text(), re.M)[1].split()
                assert address.username in created
                assert address.path == f"/{address.username}"


def test_health_is_asked_where_the_servers_of_make_services_answer(tmp_path):
    for name, server in (("prefect", prefect_server(tmp_path, 1, "")), ("mlflow", mlflow_server(tmp_path, 1))):
        (path,) = {address.path for one, address in addresses() if one == name and "health" in address.path}
        assert path == server.health
