"""The launcher's side of a rollout instance: one protocol for every engine (contract 5), token ids across it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp

from engine.errors import DeadlineError, MetronomeError
from engine.types import Prompt, Response


class InstanceGone(MetronomeError):
    """The instance did not answer: the connection failed or broke. Its requests go to another one."""


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...] = ()


class InstanceClient:
    """HTTP calls to one rollout instance; every call has a deadline."""

    def __init__(self, name: str, url: str, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self.name = name
        self.url = url
        self._session = session
        self._timeout_s = timeout_s

    async def complete(self, prompt: Prompt, sampling: Sampling, seed: int) -> Response:
        """Sample one response; its text is left empty (the caller has the tokenizer).

        Raises InstanceGone when the instance is gone, DeadlineError, or MetronomeError for a refused request.
        """
        reply = await self._call(
            "POST",
            "/v1/completions",
            {
                "prompt": list(prompt.token_ids),
                "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": seed,
                "stop_token_ids": list(sampling.stop_token_ids),
                "n": 1,
                "logprobs": 0,
                "return_token_ids": True,
            },
        )
        choice = reply["choices"][0]
        token_ids = tuple(choice["token_ids"])
        return Response(
            token_ids=token_ids,
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            versions=tuple((start, version) for start, version in reply["weight_versions"]),
            loss_mask=(True,) * len(token_ids),
            finish_reason=choice["finish_reason"],
            text="",
            seed=seed,
            instance=self.name,
        )

    async def update_weights(self, version: int, info: dict[str, Any]) -> None:
        """The whole sequence of a weight update: pause, load, finish, drop cached prompts, resume, check the version."""
        try:
            async with asyncio.timeout(self._timeout_s):
                holds = await self._load(version, info)
        except TimeoutError:
            raise DeadlineError(f"{self.name}: it does not hold weight version {version} after {self._timeout_s:.0f} s") from None
        if holds != version:
            raise MetronomeError(f"{self.name}: it holds weight version {holds} after an update to version {version}")

    async def _load(self, version: int, info: dict[str, Any]) -> int:
        await self._call("POST", "/pause?mode=wait", {})
        await self._call("POST", "/start_weight_update", {})
        await self._call("POST", "/update_weights", {"update_info": info})
        await self._call("POST", "/finish_weight_update", {"weight_version": version})
        await self._call("POST", "/reset_prefix_cache", {})
        await self._call("POST", "/resume", {})
        return int((await self._call("GET", "/weight_version", None))["weight_version"])

    async def _call(self, method: str, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._session.request(method, self.url + route, json=body) as answer:
                    if answer.status != 200:
                        raise MetronomeError(f"{self.name}: {method} {route} answered {answer.status}: "
                                             f"{(await answer.text())[:500]}")
                    return await answer.json()
        except TimeoutError:
            raise DeadlineError(f"{self.name}: no answer to {method} {route} in {self._timeout_s:.0f} s") from None
        except aiohttp.ClientError as error:
            raise InstanceGone(f"{self.name}: {method} {route}: {type(error).__name__} {error}") from None
