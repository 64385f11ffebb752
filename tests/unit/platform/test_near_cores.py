"""The CPU cores near a device, from a tree like sysfs and a table like npu-smi's, and how devices share them."""

import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.platform import npu
from engine.platform.base import Platform
from engine.platform.cpu import Cpu
from engine.platform.cuda import Cuda
from engine.platform.near_cores import choose_cores, cores_near_npus, cores_near_pci, cores_of
from engine.platform.npu import Npu
from engine.trainer.ranks import rank_process

CORES = st.sets(st.integers(0, 200), max_size=60)
HYPERTHREADS = [[*range(16), *range(32, 48)]] * 2 + [[*range(16, 32), *range(48, 64)]] * 2
"""Two nodes of 16 cores and their second threads, each with two devices."""


@given(CORES)
def test_a_list_of_cores_is_read_as_linux_writes_it(cores):
    ordered = sorted(cores)
    ranges = []
    for core in ordered:
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    text = ",".join(f"{a}-{b}" if b > a else str(a) for a, b in ranges)
    assert cores_of(f"{text}\n") == ordered


@given(st.lists(CORES, min_size=1, max_size=3), st.integers(1, 8), CORES, st.integers(0, 12))
def test_a_share_is_near_allowed_and_large_enough(nodes, devices, allowed, least):
    near = [nodes[device % len(nodes)] for device in range(devices)]
    for device in range(devices):
        mine = near[device] & allowed
        found = choose_cores(device, near, allowed, least)
        assert set(found) <= mine
        assert len(set(found)) == len(found)
        assert not found or len(found) >= least
        assert found or len(mine) < max(1, least) or mine == allowed


def test_where_a_part_is_too_small_all_near_cores_are_taken_or_none():
    assert choose_cores(0, HYPERTHREADS, range(64), 17) == HYPERTHREADS[0]
    assert choose_cores(0, HYPERTHREADS, range(64), 33) == []
    assert choose_cores(0, [{0}, {0}], [0, 1], 0) == [0]  # two devices, one core: its share of it is none
    assert choose_cores(0, HYPERTHREADS, range(16, 32), 4) == []  # a user's binding to the other node
    assert choose_cores(0, HYPERTHREADS, range(16), 4) == []  # one to this node
    assert choose_cores(9, HYPERTHREADS, range(64), 4) == []
    assert choose_cores(0, [], range(64), 4) == []


def gpus(monkeypatch, *properties):
    api = SimpleNamespace(device_count=lambda: len(properties), get_device_properties=lambda one: properties[one])
    monkeypatch.setattr(Cuda, "api", lambda self: api)


def test_gpus_are_found_by_their_pci_address(tmp_path, monkeypatch):
    for address, cores in (("0000:3b:00.0", "0-15,32-47"), ("0001:af:00.0", "16-31,48-63")):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(f"{cores}\n")
    assert cores_near_pci("0000:3b:00.0", tmp_path) == HYPERTHREADS[0]
    assert cores_near_pci("0000:00:00.0", tmp_path) == []
    known, other = (SimpleNamespace(pci_domain_id=n, pci_bus_id=bus, pci_device_id=0) for n, bus in ((0, 59), (1, 175)))
    gpus(monkeypatch, known, SimpleNamespace(name="of an older torch"), other)
    assert Cuda().near_cores(sysfs=tmp_path) == [HYPERTHREADS[0], [], HYPERTHREADS[2]]


TABLE = """\
           NPU0       NPU1       NPU2       NPU3       CPU Affinity
NPU0       X          HCCS       HCCS       HCCS       144-167
NPU1       HCCS       X          HCCS       HCCS       144-167
NPU2       HCCS       HCCS       X          HCCS       96-119
NPU3       HCCS       HCCS       HCCS       X          0-23,192

Legend:

  X    = Self
  HCCS = Connection traversing HCCS.
"""
NEAR = [[*range(144, 168)]] * 2 + [[*range(96, 120)], [*range(24), 192]]


def test_npus_are_found_in_the_table_of_npu_smi():
    assert cores_near_npus(TABLE) == NEAR
    for other in ("", "command not found", TABLE.replace("96-119", "NA"), TABLE.replace("NPU1  ", "NPU7  ")):
        assert cores_near_npus(other) == []


def test_visible_npus_are_counted_from_0(tmp_path, monkeypatch):
    program = tmp_path / "npu-smi"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = 'info -t topo' ] && cat <<'END'\n{TABLE}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert Npu().near_cores() == NEAR
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,1,8")
    assert Npu().near_cores() == [NEAR[3], NEAR[1], []]
    monkeypatch.setattr(npu, "TOPOLOGY", ("no-such-program",))
    assert Npu().near_cores() == []


@pytest.fixture
def bound(monkeypatch):
    """What a rank of device 1, of 64 cores, is bound to."""
    found = []
    monkeypatch.setattr(rank_process, "bind_cores", found.append)
    monkeypatch.setattr(rank_process, "usable_cores", lambda: set(range(64)))
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name in rank_process.OWN_BINDING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Platform, "near_cores", lambda self: HYPERTHREADS)
    return found


def test_a_rank_is_bound_and_says_so(bound, capsys):
    rank_process.bind_near_device(Cpu())
    assert bound == [[*range(8, 16), *range(40, 48)]]
    assert "bound to the CPU cores [8, 9," in capsys.readouterr().out


def test_a_users_own_binding_stays(bound, monkeypatch, capsys):
    monkeypatch.setenv("CPU_AFFINITY_CONF", "1")
    rank_process.bind_near_device(Cpu())
    assert bound == []
    assert capsys.readouterr().out == ""
