"""The platforms: `get(name)` gives one, `session` makes this process a rank on it."""

from __future__ import annotations

from engine.errors import BadInput
from engine.platform.base import Platform
from engine.platform.cpu import Cpu
from engine.platform.cuda import Cuda
from engine.platform.npu import Npu
from engine.platform.parallel import session, single

__all__ = ["PLATFORMS", "Platform", "get", "session", "single"]

PLATFORMS: dict[str, Platform] = {platform.name: platform for platform in (Npu(), Cuda(), Cpu())}
"""By name, in the order in which "auto" tries them."""


def get(name: str = "auto") -> Platform:
    """The platform of that name ("auto": npu if it is there, else cuda, else cpu).
    Raises BadInput if it is not there."""
    if name == "auto":
        name = next(platform.name for platform in PLATFORMS.values() if platform.present())
    if name not in PLATFORMS:
        raise BadInput(f'platform.device: "{name}" is unknown, expected auto, {", ".join(sorted(PLATFORMS))}')
    if missing := PLATFORMS[name].missing():
        raise BadInput(f'platform.device = "{name}": {missing}')
    return PLATFORMS[name]
