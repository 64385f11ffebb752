"""Runs a script of real ranks as on a machine with NPUs, on the host: `python on_host.py ADAPTOR SCRIPT ARGUMENTS...`.

ADAPTOR is "mindspeed" for engine.platform.npu's own way to MindSpeed's adaptor, over the stand-ins of stand_ins.py, or
"plain" for Megatron as the cpu platform adapts it. All else is the same for both: models are built as for an NPU
(without oneDNN), and attention, norms, the rotation and SwiGLU are the NPU's operators with a CPU behind them. So what
differs between the two is what MindSpeed makes of Megatron.
"""

import os
import runpy
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

from engine import platform
from engine.platform import host_view
from engine.platform.cpu import Cpu
from engine.platform.npu import Npu
from support.ascend import stand_ins
from support.npu_operators import define

DEVICE = SimpleNamespace(type="npu")


class Plain(Cpu):
    """The cpu platform with the attention of an NPU."""

    attention = "npu"


class NpuOnHost(Npu):
    """The npu platform with the host as its device, and gloo between ranks."""

    backend = "gloo"
    device = set_device = lambda self, local_rank: torch.device("cpu")
    held_bytes = Cpu.held_bytes
    peak_bytes = Cpu.peak_bytes

    def adapt_megatron(self):
        """As on an NPU; then the modules of Megatron and MindSpeed find the host where they ask for a device."""
        super().adapt_megatron()
        host_view.install_host_view()
        for name, module in list(sys.modules.items()):
            if name.startswith("mindspeed.") and vars(module).get("torch") is torch:
                vars(module)["torch"] = host_view._view()


def main():
    adaptor, script, *arguments = sys.argv[1:]
    if adaptor == "mindspeed":
        sys.path.insert(1, os.environ["METRONOME_MINDSPEED"])
        stand_ins.install()
    ours = {"plain": Plain, "mindspeed": NpuOnHost}[adaptor]()
    # most scripts ask for the cpu platform, a run for the one that it finds
    platform.PLATFORMS.update({"cpu": ours, ours.name: ours})
    ours.adapt_megatron()
    build_for_a_device()
    operators = define()  # they last as long as their library
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    del operators


def build_for_a_device():
    """Have models built as for an NPU, computed by its operators, and left on the host."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from engine.model import build, npu_operators, tri_model

    npu_operators.on_npu = lambda x: True
    GPTModel.to = lambda self, device: self
    tri_model.build_model = lambda shape, computation: build.build_model(shape, replace(computation, device=DEVICE))


if __name__ == "__main__":
    main()
