"""Each format of the field, from a file and a configuration to the tokens of a prompt and to a reward."""

import json
import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from engine.config.recipe import HOME, load_config
from engine.data.hub import is_hub_id
from engine.data.loader import load_prompts
from engine.data.prepared import prepare_problems, training_problems
from engine.data.problem_statistics import report_data
from engine.data.problems import read_problems
from engine.data.prompts import encode_problems
from engine.data.row_format import RowFormat
from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput
from engine.evaluation.benchmarks import encode_benchmarks, read_benchmarks
from engine.run.folder import dump_config
from engine.types import Response
from engine.verifier.reward_function import load_reward

MODEL = HOME / "data/quickstart_model"
ASKED = {"role": "user", "content": "1+1="}
SYSTEM = {"role": "system", "content": "Be brief."}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [SYSTEM, ASKED],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "split": "train"},
}
THINK = {"role": "assistant", "content": "<think>\n"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "content": "2"}
CHAT = ["data.prompt_template=chat"]
FORMATS = {
    "deepscaler": ({"problem": "1+1=", "answer": "2", "solution": "so \\boxed{3}"}, [ASKED]),
    "solution": ({"problem": "1+1=", "answer": "", "solution": "so \\boxed{2}"}, [ASKED]),
    "gsm8k": ({"question": "1+1=", "answer": "One and one, <<1+1=2>>2\n#### 2"}, [ASKED]),
    "trl": ({"prompt": [ASKED], "ground_truth": "2", "kind": "sum"}, [ASKED]),
    "trl-text": ({"prompt": "1+1=", "solution": "2"}, [ASKED]),
    "verl": (VERL, [SYSTEM, ASKED]),
    "openai": ({"messages": [SYSTEM, ASKED, {"role": "assistant", "content": "2"}]}, [SYSTEM, ASKED]),
    "openai-answer": ({"messages": [ASKED, {"role": "assistant", "content": "no idea"}], "answer": 2}, [ASKED]),
    "openai-parts": ({"messages": [{**ASKED, "content": [{"type": "text", "text": "1+1="}]}], "answer": "2"}, [ASKED]),
}


REWARDS = """
import json

def target(prompt, responses):
    return [float(json.loads(prompt.answer)["target"] == int(one.text)) for one in responses]

def short(prompt, responses):
    return [float(len(one.text) <= prompt.columns["most"]) for one in responses]
"""


PUBLISHED = {
    "agentica-org/DeepScaleR-Preview-Dataset": FORMATS["deepscaler"][0],
    "BytedTsinghua-SIA/DAPO-Math-17k": VERL,
}
"""A row of each set of the hub that a recipe trains on, in its published columns."""


@pytest.fixture
def write(tmp_path):
    def written(*rows, name="set.jsonl"):
        path = tmp_path / name
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return written


def config(path, *keys):
    return load_config(None, [f"data.train={path}", f"model.path={MODEL}", *keys])


def encode(made):
    return encode_problems(training_problems(made), Tokenizer(Path(made.model.path)), made.data, 1024)


def rendered(messages, model=MODEL, **variables):
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables))


def scores(spec, prompt, *texts):
    empty = Response(
        token_ids=(), logprobs=(), versions=(), loss_mask=(), finish_reason="stop", text="", seed=0, instance=""
    )
    responses = [replace(empty, text=text) for text in texts]
    reward = load_reward(spec)
    found = [reward.call(prompt, one) for one in responses] if reward.per_response else reward.call(prompt, responses)
    return [getattr(score, "value", score) for score in found]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_row_of_each_format_is_rendered_and_scored_without_configuration(write, form, suffix):
    row, messages = FORMATS[form]
    (prompt,) = encode(config(write(row, name=f"set{suffix}"), *CHAT, "reward.function=math")).prompts
    assert prompt.token_ids == rendered(messages)
    assert (prompt.problem, prompt.answer, dict(prompt.columns)) == ("1+1=", "2", row)
    assert scores("math", prompt, "It is \\boxed{2}", "It is \\boxed{3}") == [1.0, 0.0]


@pytest.mark.parametrize("columns", [("question", "answer"), ("prompt", "ground_truth"), ("problem", "solution"), "xy"])
@pytest.mark.parametrize(
    ("stated", "gold"),
    [
        ("1,200", "1200"),
        ("$1,234,567.50", "$1234567.50"),
        ("-1,200", "-1200"),
        ("1,200, 3,400", "1200, 3400"),
        ("3,4", "3,4"),
        ("1,2,3", "1,2,3"),
        ("(3,4)", "(3,4)"),
        ("(1,200)", "(1,200)"),
        ("0,500", "0,500"),
        ("1,20", "1,20"),
        ("1,200 (dollars)", "1200 (dollars)"),
        ("f(1,200) = 3,400", "f(1,200) = 3400"),
        (r"\{100,200\}", r"\{100,200\}"),
        ("{100,200}", "{100,200}"),
        ("(2, {1,200} + (3), 1,200) or 1,200", "(2, {1,200} + (3), 1,200) or 1200"),
        ("[100,200)", "[100,200)"),
        ("]100,200[", "]100,200["),
        ("[100,200[", "[100,200["),
        ("a) 1,200 [km", "a) 1200 [km"),
        (r"\(1,200\)", r"\(1200\)"),
        (r"\text{1,200}", r"\text{1200}"),
        (r"10^{1,200}", r"10^{1200}"),
        ("1234,567", "1234,567"),
    ],
)
def test_gsm8ks_answers_are_read_in_any_column_and_said(write, columns, stated, gold):
    path = write({columns[0]: "How far?", columns[1]: f"far <<1+1=2>>2\n#### {stated}\n"})
    names = ["data.columns.problem=x", "data.columns.answer=y"] if columns == "xy" else []
    prepared = prepare_problems(config(path, *names))
    assert [row.answer for row in prepared.train.rows] == [gold]
    assert report_data(prepared)["notes"][0] == f"{path}, 1 row: the answer is what follows ####, as in GSM8K"


@pytest.mark.parametrize(
    "text", ["#### 1,200", "far\r\n####1,200\r\n", "far\n  ####\t1,200", "#### 5\n#### 1,200\nThe answer is: 1200"]
)
def test_gsm8ks_form_as_others_write_it(write, text):
    """The last as in MetaMathQA."""
    assert (
        training_problems(config(write({"query": "How far?", "problem": "p", "answer": text}))).rows[0].answer == "1200"
    )


@pytest.mark.parametrize("text", ["far\n####", "#### \n", "####\nThe answer is: 5"])
def test_nothing_behind_the_signs_of_gsm8k_is_no_answer(write, text):
    rows = [{"question": "a", "answer": text}, {"question": "b", "answer": text, "solution": "\\boxed{2}"}]
    found = prepare_problems(config(write(*rows)))
    assert ([row.answer for row in found.train.rows], found.train.skipped, found.notes) == (["2"], {"no answer": 1}, ())


def test_what_only_looks_like_gsm8ks_form_stays(write):
    rows = [
        {"question": str(n), "answer": text} for n, text in enumerate(["#hash", "5 #### 6", "#### 5\nor so", "#####5"])
    ]
    found = prepare_problems(config(write(*rows)))
    assert [row.answer for row in found.train.rows] == [row["answer"] for row in rows]
    assert found.notes == ()


NAN = float("nan")


@pytest.mark.parametrize(
    ("row", "problem", "answer"),
    [
        ({"problem": "", "question": "1+1=", "answer": "2"}, "1+1=", "2"),
        ({"problem": " \n", "question": "1+1=", "answer": "2"}, "1+1=", "2"),
        ({"problem": NAN, "prompt": [ASKED], "answer": "2"}, "1+1=", "2"),
        ({"problem": "p", "answer": NAN, "solution": "so \\boxed{2}"}, "p", "2"),
        ({"problem": "p", "answer": NAN, "solution": "so\n#### 1,200"}, "p", "1200"),
        ({"problem": "p", "answer": " ", "final_answer": NAN, "ground_truth": 2}, "p", "2"),
        ({"problem": "p", "final_answer": [None], "ground_truth": 2}, "p", "2"),
        ({"problem": "p", "final_answer": [NAN, " "], "solution": "so \\boxed{2}"}, "p", "2"),
        ({"problem": "p", "final_answer": ["", "2", None]}, "p", "2"),
        ({"problem": [None, []], "prompt": [ASKED], "answer": "2"}, "1+1=", "2"),
        ({"messages": [ASKED, {"role": "assistant", "content": "2"}], "answer": None}, "1+1=", "2"),
        ({"question": [ASKED, {"role": "assistant", "content": "2"}], "answer": " "}, "1+1=", "2"),
        ({"problem": "p", "solution": "So \\boxed{5} a day.\n#### 35"}, "p", "35"),
    ],
)
def test_a_column_that_says_nothing_hides_no_other(write, row, problem, answer):
    (found,) = training_problems(config(write(row))).rows
    assert (found.problem, found.answer) == (problem, answer)


@pytest.mark.parametrize(
    ("column", "after", "kept", "begun"),
    [
        ("prompt", [THINK], [], "<think>\n"),
        ("prompt", [CALL, RESULT], [CALL, RESULT], ""),
        ("prompt", [CALL, RESULT, THINK], [CALL, RESULT], "<think>\n"),
        ("messages", [CALL, RESULT], [CALL, RESULT], ""),
        ("messages", [CALL, RESULT, THINK], [CALL, RESULT], ""),
        ("messages", [THINK], [], ""),
    ],
)
def test_messages_after_the_users_last_reach_the_model(write, column, after, kept, begun):
    path = write({column: [SYSTEM, ASKED, *after], "answer": "2"})
    made = config(path, *CHAT, "data.instruction=Add.")
    problems = prepare_problems(made).train
    (prompt,) = encode(made).prompts
    asked = {**ASKED, "content": "1+1=\nAdd."}
    turns = [SYSTEM, asked, *({"content": ""} | one for one in kept)]
    assert prompt.text == Tokenizer(MODEL).render(turns, {}) + begun
    unread = column == "messages" and after[-1] is THINK
    assert [note.partition(": ")[2] for note in problems.notes] == unread * [UNREAD]


UNREAD = "the assistant's message at the end, or its column completion, is not read"


@pytest.mark.parametrize(
    ("row", "keys", "said"),
    [
        ({"prompt": [ASKED], "completion": [THINK], "answer": "2"}, [], True),
        ({"prompt": "1+1=", "completion": "2", "answer": "2"}, [], True),
        ({"prompt": "1+1=", "completion": [None], "answer": "2"}, [], False),
        ({"prompt": "1+1=", "completion": "2"}, ["data.columns.answer=completion"], False),
        ({"messages": [ASKED, THINK]}, ["data.columns.answer=messages.1.content"], False),
        ({"messages": [ASKED, THINK], "gold": 2}, ["data.columns.answer=gold"], True),
    ],
)
def test_a_response_that_is_not_read_is_said(write, row, keys, said):
    path = write(row)
    notes = training_problems(config(path, *CHAT, *keys)).notes
    assert notes == ((f"{path}, 1 row: {UNREAD}",) if said else ())


@pytest.mark.parametrize(
    ("own", "begun", "left"),
    [
        ("<think>\n", "<think>\n", ""),
        ("<think>\n", "<think>\nFirst, ", "First, "),
        ("<think>\n", "<think>First, ", "First, "),
        ("<think>\n", "<think>\n\nFirst, ", "\nFirst, "),
        ("<think>\n\n", "<think>\n", ""),
        ("<think>", "<think>\n", "\n"),
        ("<think>", "> 5", "> 5"),
        ("<think>\n", "\nFirst", "\nFirst"),
        ("", "assistant\n", "assistant\n"),
        ("", "n\n", "n\n"),
    ],
)
def test_the_begin_of_a_response_that_the_template_writes_too_is_there_once(write, tmp_path, own, begun, left):
    model = shutil.copytree(MODEL, tmp_path / "model")
    with (model / "chat_template.jinja").open("a") as template:
        template.write(f"{{% if add_generation_prompt %}}{own}{{{{ '' }}}}{{% endif %}}")
    row = {"prompt": [ASKED, {**THINK, "content": begun}], "answer": "2"}
    (prompt,) = encode(config(write(row), *CHAT, f"model.path={model}")).prompts
    assert prompt.text == Tokenizer(model).render([ASKED], {}) + left
    assert prompt.text.endswith(f"assistant\n{own}{left}")


def test_an_answer_of_messages_is_the_assistants_last(write):
    before = ([], [CALL, RESULT], [{"role": "assistant", "content": "Let me think."}])
    rows = [{"messages": [ASKED, *after, {"role": "assistant", "content": "so\n#### 2"}]} for after in before]
    found = encode(config(write(*rows), *CHAT, "reward.function=exact"))
    assert [(prompt.answer, "think" in prompt.text) for prompt in found.prompts] == [("2", False), ("2", False)]


def test_columns_are_named_for_any_other_row(write):
    said = {"messages": [ASKED, {"role": "assistant", "content": "3"}]}
    named = training_problems(config(write(said | {"gold": None}, said | {"gold": 2}), "data.columns.answer=gold"))
    assert ([one.answer for one in named.rows], named.skipped) == (["2"], {"no answer": 1})
    row = {"task": {"text": "1+1="}, "gold": 2, "problem": "not this"}
    (prompt,) = encode(config(write(row), "data.columns.problem=task.text", "data.columns.answer=gold")).prompts
    assert (prompt.problem, prompt.answer) == ("1+1=", "2")
    (plain,) = encode(config(write(VERL), "data.columns.problem=prompt.-1.content")).prompts
    assert (plain.text, plain.answer) == ("1+1=", "2")
    with pytest.raises(BadInput, match=r"answer = 'golden': data\.train has no such column; .* task, gold"):
        training_problems(config(write(row | {"answer": 1}), "data.columns.answer=golden"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [SYSTEM], "answer": "2"}, "no problem .*expected a text, or messages .* user's"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "2"}, "problem is an object"),
        ({"prompt": [ASKED]}, r"answer: no answer \(found the columns prompt"),
        ({"prompt": [ASKED], "answer": {"target": 2}}, "answer is an object"),
        ({"problem": "1+1=", "answer": None, "solution": "It is two."}, "answer: no answer"),
        ({"prompt": [ASKED, CALL], "answer": "2"}, "conversation ends with the assistant .*tool_calls"),
        (
            {"question": [ASKED, THINK], "answer": "2"},
            "conversation ends with the assistant .*<think>.*a text that continues in a column prompt",
        ),
        ({"messages": [THINK], "answer": "2"}, "no problem"),
    ],
)
def test_a_row_that_is_no_conversation_with_an_answer_is_left_out(write, row, message):
    found = training_problems(config(write(row, FORMATS["trl"][0])))
    assert len(found.rows) == 1
    assert re.search(message, str(found.rejected[0]))


def test_a_reward_of_ones_own_takes_any_answer_or_none(write, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARDS)
    spec = f"{reward}:target"
    row = {**VERL, "reward_model": {"style": "rule", "ground_truth": {"target": 2, "numbers": [1, 1]}}}
    (prompt,) = encode(config(write(row), *CHAT, f"reward.function={spec}")).prompts
    assert scores(spec, prompt, "2", "3") == [1.0, 0.0]
    spec = f"{reward}:short"
    (prompt,) = encode(config(write({"prompt": [ASKED], "most": 3}), *CHAT, f"reward.function={spec}")).prompts
    assert (prompt.answer, scores(spec, prompt, "abc", "abcd")) == ("", [1.0, 0.0])


def test_conversations_differ_by_all_their_messages(write):
    earlier = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    path = write(*({"prompt": one, "answer": "2"} for one in ([ASKED], [SYSTEM, ASKED], [*earlier, ASKED], [ASKED])))
    found = training_problems(config(path, "reward.function=math"))
    assert [row.problem for row in found.rows] == ["1+1=", "1+1=", "user: 2+2=\n\nassistant: 4\n\nuser: 1+1="]
    assert found.skipped == {"duplicate": 1}
    ids = [prompt.id for prompt in encode(config(path, *CHAT)).prompts]
    assert len(set(ids)) == 3
    plain = write({"problem": "1+1=", "answer": "2"}, name="plain.jsonl")
    assert encode(config(plain)).prompts[0].id == ids[0]  # a problem is the same in every format


def test_messages_need_the_chat_template(write):
    with pytest.raises(BadInput, match=r"line 1: the problem is a list of messages.*prompt_template = \"chat\""):
        encode(config(write(VERL)))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_instruction_and_variables_are_in_training_and_evaluation(write, tmp_path, role):
    own = {**SYSTEM, "role": role}
    rows = [{"problem": "1+1=", "answer": "2"}, {"prompt": [own, {**ASKED, "content": "2+2="}], "answer": "4"}]
    path = write(*rows)
    model = shutil.copytree(MODEL, tmp_path / "model")
    with (model / "chat_template.jinja").open("a") as template:
        template.write("{% if enable_thinking is false %}<think></think>{% endif %}")
    added = [
        "data.system=You add.",
        r"data.instruction=Use \boxed{}.",
        "data.chat_template_kwargs.enable_thinking=false",
    ]
    made = config(path, *CHAT, *added, f"data.heldout={path}", f"model.path={model}")
    one, other = encode(made).prompts
    asked = [{"role": "user", "content": f"{text}\nUse \\boxed{{}}."} for text in ("1+1=", "2+2=")]
    system = {"role": "system", "content": "You add."}
    assert one.token_ids == rendered([system, asked[0]], model, enable_thinking=False)
    assert other.token_ids == rendered([own, asked[1]], model, enable_thinking=False)
    assert one.text.endswith("<think></think>")
    (benchmark,) = encode_benchmarks(made, read_benchmarks(made), Tokenizer(model))
    assert benchmark.prompts == (one, other)
    as_is = config(path, *CHAT, r'data.instruction=" Go."')
    assert encode(as_is).prompts[0].token_ids == rendered([{**ASKED, "content": "1+1= Go."}])


def test_tools_of_the_recipe_are_in_every_prompt(write, tmp_path):
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ tools | tojson }} {{ messages[0].content }}")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[[data.chat_template_kwargs.tools]]\ntype = "function"\n'
        'function = {name = "add", parameters = {type = "object"}}\n'
    )
    data = write({"problem": "1+1=", "answer": "2"})
    made = load_config(recipe, [*CHAT, f"data.train={data}", f"data.heldout={data}", f"model.path={model}"])
    assert encode(made).prompts[0].text == f"{json.dumps(tools)} 1+1="
    dump_config(made, tmp_path / "dumped.toml")
    assert load_config(tmp_path / "dumped.toml", []) == made


def test_other_columns_are_filled_into_a_template(write):
    path = write({"problem": "1+{x}=", "answer": "2", "kind": "sum", "extra": {"n": 1.0}})
    template = r"""{kind} {extra.n} {{kind}} \text{kind} {} {"a": {problem}}"""
    (prompt,) = encode(config(path, f"data.prompt_template='{template}'")).prompts
    assert prompt.text == r"""sum 1.0 {kind} \text{kind} {} {"a": 1+{x}=}"""
    empty = write({"problem": "1+1=", "answer": "2", "kind": NAN}, name="empty.jsonl")
    with pytest.raises(BadInput, match=r"\{kind\} is no text or number of .*line 1"):
        encode(config(empty, "data.prompt_template={problem} {kind}"))
    with pytest.raises(BadInput, match=r"\{knd\} is no column of .*line 1, which has problem, .* \{\{knd\}\}"):
        encode(config(path, "data.prompt_template={problem} {knd}"))


def test_sets_without_weights_are_one_set_and_each_has_its_format(write, tmp_path):
    one = write({"problem": "1+1=", "answer": "2"}, name="one.jsonl")
    other = write({"question": "2+2=", "answer": "#### 4"}, {"question": "1+1=", "answer": "#### 2"}, name="two.jsonl")
    made = config(json.dumps([one, other]), *CHAT)
    loader = load_prompts(encode(made), made)
    assert sorted(loader.at(place)[1].problem for place in range(2)) == ["1+1=", "2+2="]
    dump_config(made, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml").data == made.data


def test_sets_with_weights_are_mixed_in_proportion(write):
    names = {"one": 10, "two": 30}
    paths = {
        name: write(*({"problem": f"{name} {n}", "answer": "2"} for n in range(count)), name=f"{name}.jsonl")
        for name, count in names.items()
    }
    made = config(f'[{{path = "{paths["one"]}", weight = 3}}, {{path = "{paths["two"]}", weight = 1}}]')
    loader = load_prompts(encode(made), made)
    epoch = [loader.at(place)[1].problem.split()[0] for place in range(40)]
    assert (epoch.count("one"), epoch.count("two")) == (30, 10)
    used = write({"problem": "one 3", "answer": "2"}, name="used.jsonl")
    for again in (used, paths["one"]):  # a file that is named twice has no rows of its own the second time
        with pytest.raises(BadInput, match=rf"data\.train: no row of {again} is left"):
            training_problems(config(f'[{{path = "{paths["one"]}", weight = 3}}, {{path = "{again}", weight = 1}}]'))
    assert training_problems(config(json.dumps([paths["one"], paths["one"]]))).skipped == {"duplicate": 10}


def test_every_recipe_reads_the_published_rows_of_its_training_set(write):
    recipes = [load_config(path) for path in sorted((HOME / "infra/recipes").rglob("*.toml")) if _has_data(path)]
    assert len(recipes) > 5
    for recipe in recipes:
        rows = read_problems(write(PUBLISHED[recipe.data.train]), RowFormat.of(recipe))
        (prompt,) = encode_problems(rows, Tokenizer(MODEL), recipe.data, 1024).prompts
        assert (prompt.problem, prompt.answer) == ("1+1=", "2")


def _has_data(path):
    return is_hub_id(tomllib.loads(path.read_text()).get("data", {}).get("train", ""))
