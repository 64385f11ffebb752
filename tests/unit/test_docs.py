"""The documentation against the code: links, commands, keys, quoted messages, the generated reference."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer

from engine.config import Config
from engine.config.reference import reference_page
from engine.config.table import NAME, keys_in, tables_in

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "tests/README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CHINESE = sorted((ROOT / "docs/zh").glob("*.md"))
ALL_PAGES = [*PAGES, *CHINESE]
ALL_NAMES = [str(page.relative_to(ROOT)) for page in ALL_PAGES]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = ("engine", "tasks", "flows", "infra", "docs", "tests", "benchmarks", "data")
KEYS = {*keys_in(Config), *(name for name, _ in tables_in(Config))}


def known(key):
    """The key, with `NAME` for a name that a recipe has given a table, and without the name of an argument of vLLM or a
    variable of a chat template."""
    open_tables = r"^(rollout\.vllm|data\.chat_template_kwargs)\..*"
    return re.sub(open_tables, r"\1", re.sub(r"^stages\.\w+", f"stages.{NAME}", key))


def fences(page):
    """(language, text) of every code block."""
    return FENCE.findall(page.read_text())


def prose(page):
    """The page without its code blocks."""
    return FENCE.sub("", page.read_text())


def anchors(page):
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def command_lines(text):
    """Whole commands of a code block, continued lines joined and comments left out; none of a usage synopsis."""
    for line in [] if "[--" in text else text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an apostrophe in printed output
            continue
        if words and words[0].removeprefix(".venv/bin/") == "metronome":
            yield words[1:]


@pytest.mark.parametrize("page", ALL_PAGES, ids=ALL_NAMES)
def test_links_lead_somewhere(page):
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_those_of_the_command_line(page):
    from flows.cli import app

    group = typer.main.get_command(app)
    for _, text in fences(page):
        for name, *arguments in command_lines(text):
            assert name in group.commands, f"{page.name}: metronome {name}"
            group.commands[name].make_context(name, arguments)  # raises a usage error for what it does not take
            given = [value for flag, value in zip(arguments, arguments[1:], strict=False) if flag == "--set"]
            assert {known(one.partition("=")[0]) for one in given} <= KEYS, f"{page.name}: {given}"


def test_the_first_page_lists_every_command():
    from flows.cli import app

    [usage] = [text for _, text in fences(ROOT / "docs/README.md") if "[--resume]" in text]
    assert set(re.findall(r"^metronome ([a-z-]+)", usage, re.MULTILINE)) == set(typer.main.get_command(app).commands)


@pytest.mark.parametrize("page", CHINESE, ids=[page.name for page in CHINESE])
def test_a_translation_has_the_code_blocks_of_the_english_page(page):
    english = ROOT / "README.md" if page.name == "README.md" else ROOT / "docs" / page.name
    assert fences(page) == fences(english)


NEEDED = {
    "rollouts.md": ["rollout.engine=vllm"],
    "training.md": ["algorithm.kl_coef=0.001", "stages.reference.devices=[0]"],
}
"""What a page says around its TOML examples, or devices of this machine, without which they are refused."""
ELSEWHERE = {
    "concepts.md": "the paper's loop, in names of the paper",
    "serving.md": "asks a server that runs",
}
"""Pages whose Python can only be compiled, by the reason."""


@pytest.mark.parametrize("page", ALL_PAGES, ids=ALL_NAMES)
def test_code_blocks_run(page, tmp_path):
    """TOML is a recipe that the loader takes, Python runs, and the files that commands name are there."""
    from engine.config.recipe import load_config

    for number, (language, text) in enumerate(fences(page)):
        if language == "toml":
            recipe = tmp_path / f"{number}.toml"
            recipe.write_text(text)
            load_config(str(recipe), NEEDED.get(page.name, []))
        elif language == "python":
            code = compile(text, page.name, "exec")
            if page.name not in ELSEWHERE:
                exec(code, {"__name__": "example"})
        else:
            words = [word for arguments in command_lines(text) for word in arguments]
            paths = [one.rpartition("=")[2] for one in words]
            named = [one for one in paths if one.startswith(("infra/", "data/", "docs/"))]
            assert [one for one in named if not (ROOT / one).exists()] == []


def names(page):
    """(what, name) of every key, path and make target that the page's inline code names."""
    for code in re.findall(r"`([^`\n]+)`", ours(page)):
        if module := re.match(r"(?:\S*/)?python -m ((?:data|engine|tasks|flows)\.[\w.]+)", code):
            yield "path", f"{module[1].replace('.', '/')}.py"
            continue
        for name in re.findall(r"(?<![\w./<])([a-z_]+(?:\.[a-z_0-9]+)+)\b(?![./(])", code):
            if name.partition(".")[0] in Config.model_fields and not name.endswith((".json", ".md")):
                yield "key", known(name)
        yield from (("path", name) for name in re.findall(rf"(?<![\w/<.])(?:{'|'.join(FOLDERS)})/[\w./-]+", code))
        yield from (("target", name) for name in re.findall(r"^make ([a-z0-9-]+)", code))


def ours(page):
    """The page's prose without the columns of coming_from.md that have other projects' names, and without the
    changelog's lines of what is gone."""
    if page.name != "coming_from.md":
        return prose(page).partition("### Gone")[0]
    return "\n".join(line.split(" | ")[-1] for line in prose(page).splitlines() if line.startswith("|"))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_keys_paths_and_make_targets_in_the_text_exist(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    there = {"key": KEYS.__contains__, "path": lambda name: (ROOT / name).exists(), "target": targets.__contains__}
    assert not [name for what, name in names(page) if not there[what](name)]


def test_the_checks_above_look_at_something():
    assert len({name for page in PAGES for what, name in names(page) if what == "key"}) > 100
    assert len({name for page in PAGES for what, name in names(page) if what != "key"}) > 25
    assert sum(len(LINK.findall(prose(page))) for page in PAGES) > 60
    assert sum(1 for page in PAGES for _, text in fences(page) for _ in command_lines(text)) > 20


def test_the_configuration_reference_is_current():
    assert (ROOT / "docs/configuration.md").read_text() == reference_page(), (
        "docs/configuration.md is old: python -m engine.config.reference > docs/configuration.md"
    )


def strings():
    """Every text in the sources, with a gap for each value that is put in."""
    for folder in ("engine", "tasks", "flows"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_quoted_messages_exist():
    """First column of troubleshooting.md: the parts between "…" stand in one text of the sources, in this order."""
    table = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    known = [text for text in strings() if len(text) > 10]
    missing = []
    for message in table:
        parts = [part.strip() for part in message.replace("\\|", "|").split("…") if part.strip()]
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        if not any(parts[0] in text and pattern.search(text) for text in known):
            missing.append(message)
    assert len(table) > 10
    assert not missing
