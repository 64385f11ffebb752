"""Damages of files, as a disk, a power cut or a hand make them."""

import random
import re

TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?(?:e-?\d+)?|true|false|null')
OTHERS = (b"null", b"true", b"[]", b"{}", b'"x"', b"-1", b"1e400", b"NaN", b'{"x": [1]}', b"9" * 30, b'"\\ud800"')
WHOLE = (b"", b"[]\n", b"{}\n", b"null\n", b'"x"\n', b"\xff\xfe\n", b"{" * 5000 + b"\n", b"\n", b"0" * 5000 + b"\n")


def damaged(data, seed):
    """The content of a file with one damage: a bit, zeros, a cut, a piece that is gone, or another type somewhere."""
    rng = random.Random(f"{seed}")
    begin = rng.randrange(len(data) or 1)
    end = min(len(data), begin + rng.choice((1, 8, 64, 4096)))
    return {
        0: lambda: data[:begin] + bytes([data[begin] ^ 1 << rng.randrange(8)]) + data[begin + 1 :] if data else b"x",
        1: lambda: data[:begin] + bytes(end - begin) + data[end:],
        2: lambda: data[:begin],
        3: lambda: data[:begin] + data[end:],
        4: lambda: _other_type(data, rng),
        5: lambda: rng.choice(WHOLE),
    }[rng.choice((0, 0, 0, 1, 2, 3, 4, 4, 4, 5))]()


def _other_type(data, rng):
    """A value or a key of JSON or TOML is replaced."""
    found = list(TOKEN.finditer(data))
    if not found:
        return rng.choice(OTHERS)
    token = rng.choice(found)
    return data[: token.start()] + rng.choice(OTHERS) + data[token.end() :]
