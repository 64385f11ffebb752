"""What the pages share: frame, style, elements, numbers, colours and curves (parts.css, parts.js), and uPlot for the
curves (MIT, its licence is beside it; 51 KB). `assemble_page` makes one HTML file of these and a page's own, which
opens offline.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from engine.run.files import encode_for_page
from engine.types import JsonObject

HERE = Path(__file__).resolve().parent
PLACE = re.compile(r"\{([A-Z]+)\}")


def assemble_page(folder: Path, data: JsonObject | None) -> str:
    """The page of a folder with page.html, page.css and page.js. `data`: all that it shows; None: its script asks the
    server that it came from. The page's policy lets no other scripts run than these, so that nothing that a model wrote
    becomes one."""
    parts = _parts(folder) | {"DATA": "null" if data is None else encode_for_page(data)}
    return PLACE.sub(lambda found: parts[found[1]], _read(HERE / "frame.html"))


@cache
def _parts(folder: Path) -> dict[str, str]:
    plot = _read(HERE / "uplot/uPlot.iife.min.js")
    script = _read(HERE / "parts.js") + _read(folder / "page.js")
    styles = (HERE / "uplot/uPlot.min.css", HERE / "parts.css", folder / "page.css")
    return {
        "STYLE": "".join(map(_read, styles)),
        "BODY": _read(folder / "page.html"),
        "UPLOT": plot,
        "SCRIPT": script,
        "HASHES": " ".join(f"'sha256-{_digest(one)}'" for one in (plot, script)),
    }


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
