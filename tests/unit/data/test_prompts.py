import json
from datetime import UTC, datetime

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.config.inputs import Data
from engine.config.recipe import HOME
from engine.data.problems import ProblemRow, Problems
from engine.data.prompts import encode_problems, prompt_id
from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput

PLAIN = Data()
CHAT = Data(prompt_template="chat")
SIZES = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8},
    **{"num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64},
}
CHARACTERS = "0123456789+= {}abcdefghijklmnopqrstuvwxyz<>/\n"


def write_sizes(folder, vocabulary):
    """A model with so many tokens."""
    (folder / "config.json").write_text(json.dumps(SIZES | {"vocab_size": vocabulary}))


@pytest.fixture
def tokenizer(tmp_path):
    vocabulary = {"<bos>": 0, **{character: i + 1 for i, character in enumerate(CHARACTERS)}}
    model = Fast(WordLevel(vocabulary, unk_token="a"))
    model.pre_tokenizer = Split("", "isolated")
    # Like many models' tokenizers it would put <bos> in front of everything if asked for special tokens.
    model.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    write_sizes(tmp_path, len(vocabulary))
    PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<bos>").save_pretrained(tmp_path)
    return Tokenizer(tmp_path)


def problems(*rows: tuple[str, str], skipped=None) -> Problems:
    made = [ProblemRow(*row, {"problem": row[0], "answer": row[1], "n": index}) for index, row in enumerate(rows)]
    return Problems(tuple(made), skipped or {}, "set.json", "hash")


def spelled(text: str) -> tuple[int, ...]:
    return tuple(CHARACTERS.index(character) + 1 for character in text)


def test_text_template_adds_nothing(tokenizer):
    prompt = encode_problems(problems(("1+1=", "2")), tokenizer, PLAIN, 64).prompts[0]
    assert prompt.token_ids == spelled("1+1=")
    assert prompt.id == prompt_id("1+1=", "2")
    assert (prompt.problem, prompt.answer, prompt.columns["n"]) == ("1+1=", "2", 0)


CLOCK = datetime(2024, 7, 26, tzinfo=UTC)


def test_a_template_that_asks_for_the_time_is_told_the_clock(tokenizer):
    """As Llama 3's does, once by itself and once in a macro."""
    tokenizer.chat_template = (
        "{%- macro day(format) %}{{ strftime_now(format) }}{% endmacro -%}"
        "{% if strftime_now is defined %}{{ day('%d/%m/') }}{{ strftime_now('%Y') }}{% endif %} = "
        "{{ messages[0].content }}"
    )
    (prompt,) = encode_problems(problems(("1+1=", "2")), tokenizer, CHAT, 64, clock=CLOCK).prompts
    assert prompt.text == "26/07/2024 = 1+1="
    assert prompt.token_ids == spelled(prompt.text)
    (present,) = encode_problems(problems(("1+1=", "2")), tokenizer, CHAT, 64).prompts
    year, _, rest = present.text[6:].partition(" = ")
    assert (int(year) > 2024, rest) == (True, "1+1=")


TEMPLATES = {
    "qwen": (HOME / "data/quickstart_model/chat_template.jinja").read_text(),
    "a thought begun": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}<think>\n",
    "blocks": "{% for m in messages %}\n    {% if loop.first %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "the library's own": (
        "{% set found = namespace(last='') %}{% for m in messages %}{% generation %}{% set found.last = m %}"
        "{% endgeneration %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% endfor %}"
        "{{ found.last | tojson }}{{ dict(a=tools) }}{{ documents is none }}{{ thinking }}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_by_transformers(tokenizer, tmp_path, name):
    tokenizer.chat_template = TEMPLATES[name]
    messages = [{"role": "user", "content": "a < 'ü'\n"}, {"role": "assistant", "content": "\\n"}]
    variables = {"thinking": [True, {"a": 1}]}
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(
        messages, **variables, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.render(messages, variables) == tokenizer.render(messages, variables, CLOCK) == expected


@pytest.mark.parametrize("template", ["Q: {problem}\n<think>", "chat"])
def test_a_prompt_knows_its_text_with_what_the_template_puts_before_the_answer(tokenizer, template):
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}\n<think>"
    (prompt,) = encode_problems(problems(("1+1=", "2")), tokenizer, Data(prompt_template=template), 64).prompts
    assert prompt.text == ("<bos>1+1=\n<think>" if template == "chat" else "Q: 1+1=\n<think>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("1{% if messages[0].content == '2+2=' %}{{ raise_exception('no twos') }}{% endif %}", "no twos"),
        ("{% for m in messages %}", "TemplateSyntaxError: Unexpected end of template"),
        ("{{ messages[0].content | nofilter }}", "No filter named 'nofilter'"),
        ("{{ messages[5].content }}", "UndefinedError"),
        ("{% include 'other' %}", "TypeError: no loader"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ [].pop() }}", "SecurityError"),
        ("{{ none | dictsort }}", "AttributeError"),
        ("{{ range(1000000) }}", "OverflowError"),
        ("{{ 'a'.encode('none') }}", "LookupError"),
        ("{{ strftime_now(5) }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_is_named_with_its_row(tokenizer, tmp_path, template, reason):
    tokenizer.chat_template = template
    with pytest.raises(BadInput) as refused:
        encode_problems(problems(("1+1=", "2"), ("2+2=", "4")), tokenizer, CHAT, 64, clock=CLOCK)
    row = "2+2=" if reason == "no twos" else "1+1="
    for part in ('data.prompt_template = "chat"', f"the chat template of {tmp_path}", reason, f"{row!r} of set.json"):
        assert part in str(refused.value)


def test_chat_without_a_chat_template(tokenizer):
    with pytest.raises(BadInput, match="no chat template"):
        encode_problems(problems(("1+1=", "2")), tokenizer, CHAT, 64)


def test_over_long_and_duplicates_are_counted_and_order_is_kept(tokenizer):
    rows = (("1+1=", "2"), ("12345678", "1"), ("1+2=", "3"), ("1+1=", "2"), ("1+1=", "3"))
    encoded = encode_problems(problems(*rows, skipped={"no answer": 4}), tokenizer, PLAIN, 8)
    assert [(p.problem, p.answer, p.columns["n"]) for p in encoded.prompts] == [
        ("1+1=", "2", 0),
        ("1+2=", "3", 2),
        ("1+1=", "3", 4),
    ]
    assert encoded.skipped == {"no answer": 4, "over-long": 1, "duplicate": 1}


def test_no_prompt_left(tokenizer):
    with pytest.raises(BadInput, match=r"set\.json: no prompt is left of 2 rows \(2 × over-long\).*max_context is 4"):
        encode_problems(problems(("1+1=", "2"), ("2+2=", "4")), tokenizer, PLAIN, 4)


def test_a_token_that_the_model_lacks_is_refused(tokenizer, tmp_path):
    last = max(spelled("1+1="))
    write_sizes(tmp_path, last + 1)
    assert encode_problems(problems(("1+1=", "2")), tokenizer, PLAIN, 64).prompts
    write_sizes(tmp_path, last)
    with pytest.raises(BadInput, match=rf"gives token {last} in the prompt '1\+1=' of set\.json.*vocab_size is {last}"):
        encode_problems(problems(("1+1=", "2")), tokenizer, PLAIN, 64)


def test_id_is_a_fixed_function_of_problem_and_answer():
    assert prompt_id("1+1=", "2") == "2ed01ccb4f3b18c1"
    assert prompt_id("1+1=", "2") != prompt_id("1+1", "=2")
