"""A taskset of the library `verifiers` with an agent of its own, which asks again after a wrong answer."""

import openai
import verifiers.v1 as vf

__all__ = ["AdditionTaskset", "AskTwice"]


class AdditionData(vf.TaskData):
    answer: str


class AdditionTask(vf.Task[AdditionData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class AdditionTaskset(vf.Taskset[AdditionTask, vf.TasksetConfig]):
    def load(self):
        return [AdditionTask(AdditionData(prompt=f"{n}+1=", answer=str(n + 1)), self.config.task) for n in range(2)]


class AskTwice(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        said = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            reply = await client.chat.completions.create(model=ctx.model, messages=said)
            said += [reply.choices[0].message, {"role": "user", "content": "Sure?"}]
        return vf.ProgramResult(0, "", "")
