"""Trainer and instances reduced to named tensors, around the real publisher, weight sync, receivers and transports."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import torch
from safetensors.torch import save_file

from engine.client.publish.publisher import Publisher
from engine.client.publish.transports import open_transport
from engine.config import Config
from engine.errors import BadInput, DeadlineError, MetronomeError, TransferError
from engine.instance.receiver import OUTPUT, Receiver
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.instance_client import Busy, InstanceFault, InstanceGone, Refused
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.publish.probe import make_probe
from engine.orchestrator.publish.publishes import Publishes
from engine.orchestrator.run_state import RunState
from engine.orchestrator.stages import stages_of
from engine.orchestrator.steps import Steps
from engine.wire import messages
from engine.wire.messages import pack
from support.replies import reply

CPU = torch.device("cpu")
TIMEOUT_S = 5.0
PROBE = make_probe(64, 6, 64, "float32")


def weights(seed):
    draw = torch.Generator().manual_seed(seed)
    sizes = {OUTPUT: (64, 4), "a": (30, 7), "b": (1,), "c": (100, 50), "d": (3, 3)}
    return {name: torch.randn(size, generator=draw) for name, size in sizes.items()}


def logprobs(held, token_ids):
    """Moves when any weight does."""
    shift = sum(float(tensor.sum()) for name, tensor in sorted(held.items()) if name != OUTPUT)
    return (held[OUTPUT].sum(1) * (1 + 0.01 * shift)).log_softmax(0)[list(token_ids[1:])].tolist()


class Model:
    """What a rank publishes."""

    def __init__(self, seed):
        self.held = weights(seed)

    def tensors(self):
        yield from self.held.items()

    def probe(self, token_ids):
        return logprobs(self.held, token_ids)


class Client:
    """An instance, behind the calls of InstanceClient.
    `record_fault(route, body, count)` may raise, wait or change the body."""

    url = "http://127.0.0.1:1"

    def __init__(self, name, base, fault=None):
        self.name = name
        self.base = base
        self.fault = fault
        self.held = weights(0)
        self.version = 0
        self.world_size = 1
        self.paused = False
        self.update = None
        self.stale_head = None
        self.receiver = Receiver(TIMEOUT_S)
        self.counts = {}
        self.calls = []
        self.gone = asyncio.Event()
        self.trusted = True

    def end_calls(self, reason):
        """As InstanceClient's: it ends the calls under way, not later ones."""
        self.gone.set()
        self.gone = asyncio.Event()

    def hold_responses(self):
        self.trusted = False

    def release_responses(self):
        self.trusted = True

    async def call(self, request, timeout_s=None):
        answer = await self._answered(request.route, msgspec.to_builtins(request), timeout_s)
        return msgspec.convert(answer, request.reply)

    async def _answered(self, route, body, timeout_s):
        self.calls.append(route)
        self.counts[route] = self.counts.get(route, 0) + 1
        work = asyncio.ensure_future(self._call(route, body, self.counts[route]))
        gone = self.gone
        cut = asyncio.ensure_future(gone.wait())
        try:
            await asyncio.wait([work, cut], return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
            if work.done():
                return work.result()
            raise (
                InstanceGone(f"{self.name}: given up") if gone.is_set() else DeadlineError(f"{self.name}: no answer")
            )
        except BadInput as error:
            raise Refused(f"{self.name}: {route} answered 400: {error}") from None
        except (TransferError, DeadlineError) as error:
            raise InstanceFault(f"{self.name}: {route} answered 503: {error}") from None
        finally:
            work.cancel()
            cut.cancel()

    async def _call(self, route, body, count):
        if self.fault is not None:
            body = await self.fault(route, body, count) or body
        return await getattr(self, route.rsplit("/", 1)[-1])(body) or {}

    async def health(self, body):
        return {"world_size": self.world_size}

    async def load(self, body):
        return {"running": 0, "waiting": 0, "generated_tokens": 0, "weight_version": self.version}

    async def pause(self, body):
        self.paused = True

    async def resume(self, body):
        if self.update is not None:
            raise Busy(f"{self.name}: an update is unfinished")
        self.paused = False

    async def init_weight_transfer_engine(self, body):
        await asyncio.to_thread(self.receiver.connect, body["init_info"])

    async def begin_weight_update(self, body):
        self.paused = True
        self.update = {}

    async def update_weights(self, body):
        info = body["update_info"]
        if info.get("staged"):
            self.receiver.stage(info)
            return
        assert self.update is not None
        received = await asyncio.to_thread(
            lambda: [(name, tensor.clone()) for name, tensor in self.receiver.receive(info, self.base)]
        )
        assert not {name for name, _ in received} & self.update.keys()
        self.update |= dict(received)

    async def finish_weight_update(self, body):
        assert self.update.keys() == self.held.keys()
        self.held = self.update | ({OUTPUT: self.held[OUTPUT]} if self.stale_head else {})
        self.version = body["weight_version"]
        self.update = None
        self.paused = False
        found = logprobs(self.held, body["probe"]) if body["probe"] else []
        return {"weight_version": self.version, "logprobs": [value + body.get("shift", 0.0) for value in found]}

    async def completions(self, body):
        assert not self.paused
        values = zip(body["prompt"][1:], logprobs(self.held, body["prompt"]), strict=True)
        entries = [None, *({str(t): {"logprob": value}} for t, value in values)]
        return reply([], [], "length", [], prompt_logprobs=entries)


class Orchestrator:
    """An event loop in a thread, with the weight sync's handlers as the trainer asks for them."""

    def __init__(self, clients, staged=False, fixed=PROBE, in_turn=False, timeout_s=TIMEOUT_S):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.clients = clients
        config = Config(
            rollout={"timeout_s": timeout_s},
            weights={"staged": staged},
            train={"mode": "bounded", "max_staleness": 1} if in_turn else {},
        )
        self.pool = Pool(config, Path("/nowhere"), Path("/nowhere"), synced=True)
        for client in clients:
            self.enter(client)
        self.publishes = Publishes(
            config=config,
            pool=self.pool,
            probe=fixed,
            steps=Steps(stages_of(config, None)),
            run_state=RunState(),
            trace=SimpleNamespace(add_span=lambda *given, **more: None),
        )

    def enter(self, client):
        instance = Instance(client)
        instance.record_answer()
        self.pool.instances.append(instance)
        return instance

    @property
    def reasons(self):
        """Why instances were excluded, by name; those that are well again, too."""
        return {one.name: one.reason for one in self.pool.instances if one.reason}

    def leave_out(self, name):
        self.pool.leave_out(self.pool.find_instance(name), MetronomeError("out"))

    def run(self, work, timeout_s=30):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def ask(self, request):
        answers = {
            messages.OpenSync: self.open,
            messages.ConnectSync: self.publishes.connect,
            messages.SendBucket: self.publishes.send,
            messages.AbortSync: self.publishes.abort,
            messages.FinishSync: self.publishes.finish,
            messages.VerifySync: self.verify,
        }
        return self.run(answers[type(request)](messages.read_request(pack(request))))

    async def open(self, request):
        await self.check_arrivals()
        return await self.publishes.open(request)

    async def check_arrivals(self):
        """As the health monitor does it."""
        for one in [one for one in self.pool.instances if not one.checked and one.state == "starting"]:
            try:
                await self.pool.check_instance(one)
            except MetronomeError as error:
                self.pool.leave_out(one, error)

    async def verify(self, request):
        reply = await self.publishes.verify(request)
        if self.publishes.swap is not None:
            await self.publishes.swap
        return reply

    def late(self, fault=None):
        """An instance that has come since the last publish."""
        self.clients.append(client := Client("late", self.clients[0].base, fault))
        instance = self.enter(client)
        self.run(self.check_arrivals())
        return instance

    def close(self):
        for client in self.clients:
            client.receiver.close()
        self.run(self.publishes.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def publisher(orchestrator, transport, folder, bucket_bytes=2000, device=CPU, dtype=torch.float32):
    ranks = SimpleNamespace(
        exports=True,
        writes=True,
        stage=0,
        from_first=lambda act: act(),
        gather=lambda message: [message],
    )
    return Verifying(
        connection=orchestrator,
        ranks=ranks,
        transport=open_transport(transport, TIMEOUT_S, device, folder / "weights"),
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        timeout_s=2 * TIMEOUT_S,
    )


class Verifying(Publisher):
    """Publishes and verifies, as the trainer's loop does."""

    def publish(self, model, version, again=False):
        seconds = super().publish(model, version, again)
        self.verify(model, version)
        return seconds


def base_folder(folder):
    """A model folder with weights(0)."""
    folder.mkdir()
    save_file(weights(0), folder / "model.safetensors")
    (folder / "config.json").write_text('{"tie_word_embeddings": false}')
    return folder


def starting(base):
    """For a fixture: a function that starts an orchestrator with instances called a, b, …; `faults` by name."""
    started = []

    def begin(count=2, staged=False, fixed=PROBE, in_turn=False, timeout_s=TIMEOUT_S, **faults):
        clients = [Client(name, base, faults.get(name)) for name in "abc"[:count]]
        started.append(Orchestrator(clients, staged, fixed, in_turn, timeout_s))
        return started[-1]

    yield begin
    for orchestrator in started:
        orchestrator.close()
