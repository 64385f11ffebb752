"""Responses that hurt a verifier: what hangs it or fills its memory."""

import random

from support.spellings import boxed


def hostile(count, seed=0):
    """`count` responses made to hang or fill a verifier:
    towers of powers, nesting, long runs, half a formula, noise."""
    draw = random.Random(seed)
    kinds = [_tower, _nested, _long, _bomb, _noise, _half, _many, _huge]
    return [kinds[number % len(kinds)](draw) for number in range(count)]


def _tower(draw):
    height = draw.randint(2, 8)
    digit = draw.choice("23579")
    sign = draw.choice(("", "-", "1/", "\\sqrt{", "\\frac{1}{"))
    return f"\\boxed{{{sign}{(digit + '^{') * height}{digit}{'}' * height}{'}' if sign.endswith('{') else ''}}}"


def _huge(draw):
    n = draw.choice((10**6, 10**9, 123456789, 10**12))
    return boxed(
        draw.choice(
            (
                f"{n}!",
                f"\\binom{{{n}}}{{{n // 2}}}",
                f"{n}^{{{n}}}",
                f"\\sum_{{k=1}}^{{{n}}} k^{{{n}}}",
                f"\\int_0^{{{n}}} x^{{x^x}} dx",
                f"1e{n}",
                f"\\prod_{{k=1}}^{{{n}}} k",
                f"(x+y+z)^{{{n % 10007}}}",
                f"{n}^{{1/{n}}}",
                "9" * 5000,
                "0." + "3" * 50_000,
                f"\\sqrt[{n}]{{{n}}}",
                f"2^{{2^{{{n % 97}}}}}",
                f"\\gcd({n}!, {n}^{{{n}}})",
                f"F_{{{n}}}",
                f"\\log(\\log({n}^{{{n}}}))",
            )
        )
    )


def _nested(draw):
    depth = draw.choice((10, 100, 1000, 5000))
    pairs = (
        ("\\frac{1}{", "}"),
        ("\\sqrt{", "}"),
        ("(", ")"),
        ("\\left(", "\\right)"),
        ("{", "}"),
        ("|", "|"),
        ("\\boxed{", "}"),
    )
    opening, closing = draw.choice(pairs)
    return boxed(opening * depth + "x" + closing * depth)


def _long(draw):
    unit = draw.choice(
        ("1", "1+", "x", "\\pi ", "1,", "- ", "\\frac{1}{2}+", "a_", "2^", "1/", "\\cup(0,1)", "\\text{a}", ".")
    )
    text = (unit * (100_000 // len(unit)))[:100_000]
    return draw.choice((text, f"\\boxed{{{text}}}", f"${text}$"))


def _bomb(draw):
    units = (
        "answer is ",
        "final answer is $",
        "$ ",
        "$$",
        "\\[",
        "\\(",
        "1 ,",
        "\\boxed{",
        "=",
        "\n",
        "and ",
        "1 000 ",
        "$1$ and ",
    )
    unit = draw.choice(units)
    return (unit * (draw.choice((1_000, 20_000, 100_000)) // len(unit))) + draw.choice(("", "7", "$7$", "I hope"))


def _noise(draw):
    alphabet = "0123456789+-*/^_{}()[]\\$ ,.xyzabc=<>!|&%\n\ud83d\x00é∞√"
    return "".join(draw.choice(alphabet) for _ in range(draw.choice((20, 200, 2_000))))


def _half(draw):
    parts = [
        "\\frac",
        "{",
        "}",
        "1",
        "\\sqrt",
        "^",
        "_",
        "x",
        "\\left(",
        "\\right)",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "&",
        "\\\\",
        ",",
        "\\int",
        "\\sum_{k=1}^{9}",
        "=",
        "\\le",
        "\\infty",
        "\\text{",
        "\\%",
        "!",
        "\\cup",
        "[",
        ")",
        "\\sin",
        "\\log_",
        "|",
        "\\pm",
    ]
    return boxed("".join(draw.choice(parts) for _ in range(draw.choice((5, 20, 60)))))


def _many(draw):
    size = draw.choice((50, 500, 5_000))
    return draw.choice(
        (
            f"\\boxed{{{', '.join(str(draw.randrange(10**6)) for _ in range(size))}}}",
            f"\\boxed{{{' + '.join(f'x_{{{k}}}^{{{draw.randrange(99)}}}' for k in range(size))}}}",
            f"\\boxed{{\\begin{{pmatrix}} {' & '.join(str(k) for k in range(size))} \\end{{pmatrix}}}}",
            f"\\boxed{{{' = '.join(str(draw.randrange(99)) for _ in range(size))}}}",
            f"\\boxed{{{''.join(f'(x-{k})' for k in range(size))}}}",
        )
    )
