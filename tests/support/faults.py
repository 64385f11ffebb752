"""What tests do to the instances of a running job (elastic_job.py): stop, kill, answer with errors, cut off."""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from types import SimpleNamespace

import aiohttp
from aiohttp import web


@contextlib.contextmanager
def stopped(run, name):
    """One of its own instances is stopped (SIGSTOP) at work; the block begins when that was noticed.
    Gives when it was."""
    run.wait(lambda: run.works(name), f"work of {name}")
    processes = run.processes(name)
    for process in processes:
        process.suspend()
    began = time.monotonic()
    run.wait(lambda: run.is_(name, state="out", groups=0), "its silence to be noticed")
    yield began
    for process in reversed(processes):
        process.resume()


def sleep_until(moment):
    time.sleep(max(0.0, moment - time.monotonic()))


def kill(run, name):
    run.processes(name)[0].kill()


def kill_in_update(run, name):
    """One of its own instances, while it is given weights. rollout.heartbeat_s must be long enough for the step to end
    and the update to begin before it is taken for silent."""
    with run.held():
        run.wait_for_samples()
        processes = run.processes(name)
        for process in processes:
            process.suspend()  # else its update would be over in a moment
    run.wait(lambda: run.is_(name, state="updating"), "an update")
    processes[0].kill()
    run.wait(lambda: name not in run.instances(), "its end")
    return processes


def answer_500(run, proxy):
    """To all requests for responses, until it is left out: at the latest in the next step, whose first groups it fails
    at once."""
    run.wait(lambda: run.works("proxied"), "its work")
    proxy.mode = "500"
    run.wait(lambda: "3 failures in a row" in run.instances().get("proxied", {}).get("reason", ""), "its end for now")
    proxy.mode = "pass"
    with run.held():
        run.wait(lambda: run.is_("proxied", state="serving"), "its return")
    run.wait(lambda: run.works("proxied"), "its work again")


def drop_connections(run, proxy):
    """Until it is taken for silent, and back."""
    run.wait(lambda: run.works("proxied"), "its work")
    proxy.mode = "drop"
    with run.held():
        run.wait(lambda: proxy.faults["drop"] and run.is_("proxied", state="out", groups=0), "its silence")
        proxy.mode = "pass"
        run.wait(lambda: run.is_("proxied", state="serving"), "its return")


@contextlib.contextmanager
def proxy_to(target):
    """Runs in a thread of its own."""
    state = SimpleNamespace(mode="pass", url="", faults=Counter())
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def forward(request):
        if state.mode == "500":
            if request.path != "/v1/completions":
                return await ask(request, await request.read())
            state.faults["500"] += 1
            return web.Response(status=500, text="scripted")
        if state.mode == "drop":
            state.faults["drop"] += 1
            request.transport.close()
            return web.Response()
        return await ask(request, await request.read())

    async def ask(request, body):
        try:
            headers = {"Authorization": request.headers.get("Authorization", "")}
            async with state.session.request(
                request.method, target + str(request.rel_url), data=body, headers=headers
            ) as answer:
                status = answer.status
                kind = answer.content_type
                body = await answer.read()
        except aiohttp.ClientError:  # its instance is gone: so is the proxy, as far as a client can tell
            request.transport.close()
            return web.Response()
        if state.mode == "drop":
            request.transport.close()
        return web.Response(status=status, body=body, content_type=kind)

    async def serve():
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        state.session = aiohttp.ClientSession()
        started.set()

    async def end():
        await state.session.close()
        loop.stop()

    loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert started.wait(10)
    yield state
    asyncio.run_coroutine_threadsafe(end(), loop)
    thread.join(10)
