"""A reward that takes as long as a file says, so that what a test does to a run falls into its training."""

from engine.run.files import write_atomically

REWARD = """
import time

def seconds():
    with open({brake!r}) as brake:
        return float(brake.read())

def reward(prompt, responses):
    began = time.monotonic()
    while time.monotonic() < began + seconds():  # the numbers do not depend on it
        time.sleep(0.05)
    return [sum(token % 2 == 0 for token in r.token_ids) / max(1, len(r.token_ids)) for r in responses]
"""


def braked(folder, seconds):
    """`reward.function` in a file of the folder; a group's takes so many seconds until `slow_down` says otherwise, also
    that of a group whose reward is under way."""
    (folder / "reward.py").write_text(REWARD.format(brake=str(folder / "brake")))
    slow_down(folder, seconds)
    return f"{folder / 'reward.py'}:reward"


def slow_down(folder, seconds):
    """Seconds that a group's reward takes from now on."""
    write_atomically(folder / "brake", str(seconds))
