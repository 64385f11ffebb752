"""The page of a run, and the comparison of runs, in a real Chromium: the page follows a folder that grows, and what a
model or a person wrote is text."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from engine.config import Config
from engine.run.files import append_line
from engine.run.folder import RunFolder
from engine.run.lock import hold_lock
from engine.run.trace import Trace
from engine.tools.comparison.page import write_page
from engine.tools.watch.page import draw_page
from engine.tools.watch.server import WatchServer
from engine.types import Group, Prompt, Response, Score
from support.browser import chromium
from support.compared_runs import evaluation, run
from support.page import opened_page
from support.run_folders import EVALUATION, FIGURES

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
STEPS = 1000
EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
ASKED = "performance.getEntriesByType('resource').filter(one => one.name.includes('data?'))"
DRAWN = "for (const chart of charts) { chart.seen = true; chart.mark(); }"


def responses(text):
    tokens = [text[at : at + 4] for at in range(0, len(text), 4)]
    made = Response(
        token_ids=range(len(tokens)),
        logprobs=[-0.01 * at for at in range(len(tokens))],
        versions=((0, 3), (2, 4)),
        loss_mask=[at % 5 != 4 for at in range(len(tokens))],
        finish_reason="stop",
        text=text,
        seed=None,
        instance="instance-0",
    )
    return made, lambda ids: [tokens[one] for one in ids]


def add_step(folder, trace, step):
    start = 1e9 + 10.0 * step
    append_line(folder.steps, FIGURES | {"step": step, "versions_seen": [step], "reward_mean": 0.5 + step / 4000})
    for name, lane, first, last in (
        ("sync", "trainer-0", 0, 1),
        ("rollout", "instance-0", 1, 7),
        ("train", "trainer-0", 3, 9),
    ):
        trace.add_span(name, start + first, start + last, lane=lane, step=step)
    trace.add_span("serving", start, start + 10, lane="pool instance-0")
    trace.add_span("update", start + 9, start + 10, lane="trainer-0", step=step)


@pytest.fixture
def folder(tmp_path):
    """A run of a thousand steps."""
    folder = RunFolder(tmp_path / "run")
    folder.create(Config(), resume=False)
    folder.policy.mkdir()
    trace = Trace(folder.trace, "orchestrator")
    folder.steps.write_text("")
    for step in range(STEPS):
        add_step(folder, trace, step)
    trace.flush()
    made, pieces = responses(f"{EVIL} the answer is 4")
    scores = (Score(1.0, detail=EVIL), Score(0.0))
    group = Group(step=0, index=0, prompt=Prompt("p", EVIL, EVIL, ()), responses=(made, made), scores=scores)
    for step in range(0, STEPS, 10):
        texts = {"decode": lambda ids: "".join(pieces(ids)), "pieces": pieces}
        folder.add_samples(step, [group], advantages={0: {0: 0.7, 1: -0.7}}, **texts)
    append_line(folder.evaluations, EVALUATION | {"benchmark": EVIL, "weight_version": 0})
    append_line(folder.notices, {"stage": "rewards", "text": EVIL, "at": 1.0})
    return folder


async def served(stack, folder):
    runner = web.AppRunner(WatchServer(folder.path, "127.0.0.1").application())
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}/"


async def test_the_page_follows_a_run_and_a_models_script_is_text(folder, tmp_path):
    chromium()
    async with AsyncExitStack() as stack:
        url = await served(stack, folder)
        page = await stack.enter_async_context(opened_page(tmp_path / "profile"))
        with hold_lock(folder.lock, "it", 0.0):
            await page.open(url)
            await page.wait("run.timeline !== null && document.querySelector('.tokens') !== null")
            assert await page.evaluate("document.querySelector('#state').textContent") == "running"
            assert await page.evaluate("run.count") == STEPS

            # it goes on: only what is new is asked for, and the parts change
            size = f"{ASKED}.at(-1).encodedBodySize"
            await page.wait(f"{ASKED}.length > 2")
            assert await page.evaluate(size) < 4000
            trace = Trace(folder.trace, "orchestrator")
            add_step(folder, trace, STEPS)
            trace.flush()
            await page.wait(f"run.count === {STEPS + 1}", 20)
            await page.wait(f"run.timeline.steps.at(-1)[0] === {STEPS}", 20)
            assert f"{STEPS + 1} of" in await page.evaluate("document.querySelector('#facts').innerText")
        await page.wait("document.querySelector('#state').textContent === 'finished'", 30)

        # a thousand steps: all curves drawn anew, and the timeline
        spent = "(() => { const from = performance.now(); DRAWN; drawTimeline(); return performance.now() - from; })()"
        assert await page.evaluate(spent.replace("DRAWN", DRAWN)) < 1000
        assert await page.evaluate("charts.filter(chart => chart.plot).length") >= 9

        # what a model wrote
        for value in ("logprob", "trained", "version", ""):
            await page.evaluate(f"$('colour').value = '{value}'; $('colour').onchange()")
            shown = await page.evaluate("document.querySelector('.group details').innerText")
            assert EVIL in shown
            heads = await page.evaluate("document.querySelectorAll('.group details[open] .hint').length")
            assert heads == await page.evaluate("rowsShown[0].turns.length") > 1, value
            assert "model · 4 tokens · trained" in shown
            assert "environment · 1 token · not trained" in shown
        assert EVIL in await page.evaluate("document.querySelector('#notices').innerText")
        assert await page.evaluate("window.hacked === undefined && document.querySelector('img') === null")
        assert "advantage +0.7" in await page.evaluate("document.querySelector('.group summary').innerText")

        await keyboard(page)
        for dark in (False, True):
            for width in (1400, 360):
                await page.open(url, width=width, height=800, dark=dark)
                await page.wait("run.timeline !== null")
                await page.evaluate(DRAWN)
                assert await page.evaluate("document.documentElement.scrollWidth") <= width
                ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (ground == "rgb(255, 255, 255)") is not dark
        assert page.errors == []


async def keyboard(page):
    """Without a mouse: to a part, to another step, through the tokens, into the timeline."""
    await page.evaluate("$('colour').value = 'logprob'; $('colour').onchange()")
    await page.press("6")
    assert await page.evaluate("document.activeElement.id") == "conversations"
    before = await page.evaluate("Number($('step').value)")
    await page.press("ArrowLeft")
    await page.wait(f"rowsShown[0].step === {before - 10} && document.querySelector('.tokens') !== null")
    assert await page.evaluate("Number($('step').value)") == before - 10
    await page.evaluate("document.querySelector('.tokens').focus()")
    await page.press("ArrowRight")
    await page.press("ArrowRight")
    told = await page.evaluate("document.querySelector('.group details .details').textContent")
    assert told.startswith("token 1: ")
    assert "log-probability -0.01" in told
    assert "weight version 3" in told
    await page.evaluate("canvas.focus()")
    wide = await page.evaluate("to - from")
    await page.press("+")
    assert await page.evaluate("to - from") < wide


async def test_the_page_of_a_run_that_ended_opens_offline_with_all_of_it(folder, tmp_path):
    chromium()
    folder.failure.write_text(json.dumps({"error": "RewardError", "message": EVIL}))
    file = draw_page(folder.path)
    text = file.read_text()
    assert len(text) < 6_000_000
    async with opened_page(tmp_path / "profile") as page:
        await page.open(file.as_uri())
        await page.evaluate(DRAWN)
        await asyncio.sleep(0.5)
        assert await page.evaluate("document.querySelector('#state').textContent") == "failed"
        assert EVIL in await page.evaluate("document.querySelector('#failure').innerText")
        assert await page.evaluate("run.count") == STEPS
        assert await page.evaluate("run.timeline.steps.length") == STEPS
        assert await page.evaluate("$('step').options.length") == 16
        assert EVIL in await page.evaluate("document.querySelector('.group').innerText")
        assert await page.evaluate("window.hacked === undefined")
        assert await page.evaluate("performance.getEntriesByType('resource').length") == 0
        assert page.errors == []


async def test_the_comparison_of_runs_is_drawn_from_the_same_parts(tmp_path):
    chromium()
    seen = [evaluation(0.5, 0.4, 0.6), evaluation(0.7, 0.6, 0.8)]
    runs = [run("sync", noise=0.1, steps=200, evaluations=seen[:1])]
    runs += [run(f"{EVIL} {number}", seconds=5, steps=20 * number + 9, evaluations=seen[1:]) for number in range(1, 9)]
    file = tmp_path / "compare.html"
    write_page(runs, file)
    async with opened_page(tmp_path / "profile") as page:
        for dark in (False, True):
            for width in (1280, 360):
                await page.open(file.as_uri(), width=width, dark=dark)
                await page.evaluate(DRAWN)
                assert await page.evaluate("document.documentElement.scrollWidth") <= width
                ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (ground == "rgb(255, 255, 255)") is not dark
        assert await page.evaluate("charts.every(chart => chart.box.hidden || chart.plot.series.length > 9)")
        shown = await page.evaluate("document.body.innerText")
        assert EVIL in shown
        assert "Where a step's time goes" in shown
        strips = "[...document.querySelectorAll('.strip:not(.thin)')].map(one => one.lastChild.getBoundingClientRect())"
        ends = await page.evaluate(f"{strips}.map(one => one.right)")
        assert max(ends[1:]) < ends[0]
        assert await page.evaluate("document.querySelectorAll('.chart svg circle').length") == 9 + 8
        assert await page.evaluate("window.hacked === undefined && document.querySelector('img') === null")
        assert await page.evaluate("performance.getEntriesByType('resource').length") == 0
        assert page.errors == []
