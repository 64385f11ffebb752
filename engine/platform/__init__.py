"""The platforms. `get_platform(name)` returns one; `parallel_session` makes this process a rank on it."""

from __future__ import annotations

from engine.errors import BadInput
from engine.platform.base import Platform
from engine.platform.cpu import Cpu
from engine.platform.cuda import Cuda
from engine.platform.npu import Npu
from engine.platform.parallel import parallel_session, single_session

__all__ = ["PLATFORMS", "Platform", "get_platform", "parallel_session", "single_session"]

PLATFORMS: dict[str, Platform] = {platform.name: platform for platform in (Npu(), Cuda(), Cpu())}
"""The platforms by name, in the order in which "auto" tries them."""


def get_platform(name: str = "auto") -> Platform:
    """Return the platform `name`. "auto" means npu if present, else cuda, else cpu.

    Raises BadInput if the name is unknown or the platform lacks something that it needs.
    """
    if name == "auto":
        name = next(platform.name for platform in PLATFORMS.values() if platform.present())
    if name not in PLATFORMS:
        raise BadInput(f'platform.device: "{name}" is unknown, expected auto, {", ".join(sorted(PLATFORMS))}')
    if missing := PLATFORMS[name].missing():
        raise BadInput(f'platform.device = "{name}": {missing}')
    return PLATFORMS[name]
