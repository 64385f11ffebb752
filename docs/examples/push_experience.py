"""A program that pushes experience: it makes its own tasks, samples from the run's instances, scores on its own.

python docs/examples/push_experience.py RUN_FOLDER|HOST:PORT

Tokens go in and tokens come out, with the weight version of each; the trainer trains every group once. The recipe has
data.pushed = true; the trainer is docs/examples/hf_trainer.py beside `metronome service`, or `metronome train`'s own.
"""

import argparse
import random
from concurrent.futures import ThreadPoolExecutor

from transformers import AutoTokenizer

from engine.client.service import ServiceClient
from engine.data.prompts import prompt_id
from engine.types import Group, Prompt, Response, Score


class Additions:
    """Tasks of this program: additions of three digits, each right or wrong."""

    def __init__(self, service: ServiceClient, seed: int = 0) -> None:
        self.service = service
        self.tokenizer = AutoTokenizer.from_pretrained(service.config.model.path)
        self.draw = random.Random(seed)

    def task(self) -> Prompt:
        """A new task."""
        first = self.draw.randrange(100, 1000)
        second = self.draw.randrange(100, 1000)
        problem = f"{first}+{second}="
        answer = str(first + second)
        token_ids = self.tokenizer.encode(problem, add_special_tokens=False)
        return Prompt(prompt_id(problem, answer), problem, answer, tuple(token_ids))

    def score(self, prompt: Prompt, response: Response) -> Score:
        """1 for the right sum after the last "#"."""
        text = self.tokenizer.decode(response.token_ids, skip_special_tokens=True)
        return Score(float(text.rpartition("#")[2].strip() == prompt.answer))

    def group(self, step: int, index: int, prompt: Prompt) -> Group:
        """Sample and score the responses to one task, as group `index` of the step."""
        size = self.service.config.rollout.group_size
        seeds = [random.Random(f"{step} {index} {number}").getrandbits(62) for number in range(size)]
        responses = self.service.sample(prompt.token_ids, seeds)
        scores = [self.score(prompt, response) for response in responses]
        return Group(step=step, index=index, prompt=prompt, responses=tuple(responses), scores=tuple(scores))

    def push(self, step: int, pool: ThreadPoolExecutor) -> int:
        """Push all groups of a step once its weights are there; return how many were new."""
        self.service.await_version(step)
        tasks = [self.task() for _ in range(self.service.config.train.prompts_per_step)]
        groups = pool.map(self.group, [step] * len(tasks), range(len(tasks)), tasks)
        return sum(self.service.put_experience_data(group) for group in groups)


def main() -> None:
    """Push the groups of every step of a running service's recipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("service", help="run folder or host:port of `metronome service` or `metronome train`")
    arguments = parser.parse_args()
    with ServiceClient.init_engines(arguments.service) as service, ThreadPoolExecutor(8) as pool:
        additions = Additions(service)
        for step in range(service.config.train.steps):
            print(f"step {step}: pushed {additions.push(step, pool)} groups", flush=True)


if __name__ == "__main__":
    main()
