"""The errors that Metronome raises on purpose, and what all texts that people read have in common: a filter, counts.

Each message says what was wrong, where, and what would be right.
"""

from __future__ import annotations

import base64
import os
import re

LONGEST_TEXT = 20_000
"""Length in characters after which a text is cut."""
SHORTEST_SECRET = 6
"""Length in characters below which the value of a variable is no secret: it may be part of any word."""

_USER_INFO = re.compile(
    r"(?<=://)[^/?#@:\s]*:(?P<password>[^/?#\s]*)@|(?:(?<=http://)|(?<=https://))(?P<token>[^/?#@:\s]+)@"
)
"""user:password@ of a URI, and token@ of a web address. A password may have an @ of its own, as some write it."""
_QUERY = re.compile(r"(?<=[?&])(password|passwd|token|secret)=[^&#\s'\"]+", re.IGNORECASE)
"""The same among the parameters of a URI."""
_SECRET = re.compile(r"(?:TOKEN|PASSWORD|PASSWD|KEY|AUTH_STRING|CREDENTIALS?)$|SECRET|PASSPHRASE", re.IGNORECASE)
"""Names of environment variables whose values are secret."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys or draws elsewhere: control characters (C0 but tab and line feed, and C1), other ends of lines,
marks of the direction of text, and halves of surrogate pairs, which no stream can write."""


def clean_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text as people may see it, on a terminal, in a log or on a page, wherever it came from.

    Control characters are escaped, passwords of addresses and the values of secret environment variables are removed,
    and each further line is indented, so that it does not look like a message of its own. A text of more than `longest`
    characters is cut. Cleaning it again changes nothing.
    """
    text = without_password(text)
    for secret in _secrets():
        text = text.replace(secret, "***")
    text = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))
    return cut_text(re.sub(r"\n(?=\S| \S)", "\n  ", text), longest)


def clean_line(text: str) -> str:
    """`clean_text` in one line: further ends of lines are escaped, too."""
    return clean_text("\\n".join(text.strip().split("\n")))


def cut_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text of at most `longest` characters, with a note at its end if it was longer."""
    note = f"… ({len(text) - longest:,} more)"
    return text if len(text) <= longest else text[: longest - len(note)] + note


def counted(count: float, noun: str) -> str:
    """A number of things: "1 step", "1,600 steps", "1.5 groups"."""
    shown = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{shown} {noun}" + ("" if count == 1 else "s")


def has_password(uri: str) -> bool:
    """Whether an address carries a password."""
    return "://" in uri and bool(_USER_INFO.search(uri) or _QUERY.search(uri))


def without_password(text: str) -> str:
    """An address, or a text with addresses, without their passwords and the users of these."""
    return _QUERY.sub(r"\1=***", _USER_INFO.sub("", text)) if "://" in text else text


def _secrets() -> list[str]:
    """The secret values in the environment, the longest first: of secret variables, also as a header has them, and
    passwords in addresses."""
    named = {value for name, value in os.environ.items() if _SECRET.search(name)}
    whole = {value for value in named if ":" in value}  # user:password
    found = named | {value.partition(":")[2] for value in whole}
    found |= {base64.b64encode(os.fsencode(value)).decode() for value in whole}
    found |= {one[one.lastgroup or 0] for value in os.environ.values() for one in _USER_INFO.finditer(value)}
    return sorted((one for one in found if len(one) >= SHORTEST_SECRET), key=len, reverse=True)


class MetronomeError(Exception):
    """Base of all errors below; the command line prints its message, which is clean (`clean_text`), and exits with
    1."""

    def __str__(self) -> str:
        return clean_text(super().__str__())


class BadInput(MetronomeError):
    """The user's input (file, key, value, model, reward) cannot be used; the command line exits with 2."""


class StaleRolloutError(MetronomeError):
    """A response was sampled from a weight version that the mode does not accept for the step
    (docs/architecture.md, On-policy is checked)."""


class RatioGapError(MetronomeError):
    """Trainer and rollout instance disagree on the log-probabilities of the same tokens by more than the limit."""


class Stopped(MetronomeError):
    """A signal has ended the run."""


class TakenOver(MetronomeError):
    """Another orchestrator, or another flow, writes the run folder now, so this one stops."""


class DeadlineError(MetronomeError):
    """A wait reached its deadline; the message names what it waited for."""


class TooManyFiles(MetronomeError):
    """This process cannot open another file or connection; the message names its limit."""


class RewardError(MetronomeError):
    """A reward function raised, or did not return a score for each response."""


class OutOfRoom(MetronomeError):
    """A rollout program asks for a turn, but its response has no token or no turn left (rollout.max_new_tokens,
    rollout.max_context, rollout.max_turns). A program that does not catch it ends there."""


class CheckpointError(MetronomeError):
    """A checkpoint could not be written, published, read or deleted; the message names it, its place and the reason."""


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint do not match its marker; an older checkpoint may be intact."""


class DiskError(MetronomeError):
    """The disk of the run folder is full or broken."""


class DeviceMemoryError(MetronomeError):
    """A device ran out of memory. The message compares what was in use with the dry run's sum, and names the keys to
    change."""


class ProcessDied(MetronomeError):
    """A process of the run ended unexpectedly."""


class TransferError(MetronomeError):
    """Weights or groups did not arrive intact. Weights: a member of the transfer died or was closed, and the transfer
    may be retried. A group: its bytes differ from those that were packed."""


class ServiceConflict(MetronomeError):
    """A request of an outside program conflicts with the state of the service: another group at the same place, a step
    that is over, or a lease whose groups were leased again."""


class WeightsLost(ServiceConflict):
    """No instance of a service holds the weight version any more. The program that trains publishes it again, as long
    as its weights still are this version."""


class ServiceFull(MetronomeError):
    """The service has reached its limit of stored bytes or of responses being sampled; it can take more later."""


class StoreError(MetronomeError):
    """The store of groups (queue.store) does not answer; the message names the part of the store and the request."""


class WeightSyncError(MetronomeError):
    """An instance does not have the weights that the trainer sent. The message names the instance and the tensor, or
    the figures that differ."""
