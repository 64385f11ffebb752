"""How large the house is: `python benchmarks/house_size.py [CHECKOUT]`

Lines of the product (engine, flows, tasks), of the tests, words of the documentation (without its translation and the
generated configuration.md), configuration keys, time constants (module names that end in `_S`), `except` clauses,
`raise` statements, files and functions.
Last line: RESULT {json}.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
PRODUCT = ("engine", "flows", "tasks")


def main() -> int:
    checkout = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE
    listed = subprocess.run(["git", "ls-files"], cwd=checkout, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\n") if name and (checkout / name).is_file()]
    product = python_files(checkout, names, PRODUCT)
    found = {
        "product_lines": sum(map(count_lines, product)),
        "test_lines": sum(map(count_lines, python_files(checkout, names, ("tests",)))),
        "documentation_words": sum(len((checkout / name).read_text().split()) for name in names if is_page(name)),
        "config_keys": len(re.findall(r"^\| `[a-z_.0-9]+` \|", reference(checkout), re.MULTILINE)),
        "product_files": len(product),
    } | count_nodes(product)
    for name, value in found.items():
        print(f"{name:20} {value:>7,}")
    print("RESULT " + json.dumps(found))
    return 0


def reference(checkout: Path) -> str:
    """The generated page of configuration keys."""
    return (checkout / "docs/configuration.md").read_text()


def python_files(checkout: Path, names: list[str], folders: tuple[str, ...]) -> list[Path]:
    """The Python files below some top-level folders."""
    return [checkout / name for name in names if name.endswith(".py") and name.split("/")[0] in folders]


def count_lines(file: Path) -> int:
    return file.read_text().count("\n")


def is_page(name: str) -> bool:
    """Whether a file is a page that people read and write."""
    written = name.startswith("docs/") and not name.startswith("docs/zh/") and name != "docs/configuration.md"
    return name.endswith(".md") and (written or name == "README.md")


def count_nodes(files: list[Path]) -> dict[str, int]:
    """Statements and definitions of some kinds."""
    counts = dict.fromkeys(("time_constants", "except_clauses", "raise_statements", "functions"), 0)
    for file in files:
        tree = ast.parse(file.read_text())
        targets = [target for node in tree.body for target in assigned(node)]
        counts["time_constants"] += sum(name == name.upper() and name.endswith("_S") for name in targets)
        for node in ast.walk(tree):
            counts["except_clauses"] += isinstance(node, ast.ExceptHandler)
            counts["raise_statements"] += isinstance(node, ast.Raise)
            counts["functions"] += isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return counts


def assigned(node: ast.stmt) -> list[str]:
    """Names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


if __name__ == "__main__":
    sys.exit(main())
