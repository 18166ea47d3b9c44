"""Families of tokenizers and templates: prompts, demonstrations, turns and calls of tools with each of them, and what
texts spell of their markers, which stays text.

The templates were written for the tests, with the tokens and the structure of their families.
"""

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from family_tokenizers import SPECIAL, family_tokenizer
from in_one_test import each
from turn_shapes import byte_tokenizer

from rlft.config.schema import PromptsConfig
from rlft.data.examples import scan_demonstrations, scan_rankings
from rlft.data.prompts import scan
from rlft.environment.turn_template import Dialect
from rlft.tokens.plain import PlainText, markers_of
from rlft.tokens.text import RunTokenizer, decode, render, rendered, turn_ends
from rlft.types import Demonstration, Prompt, Ranking, Split, UserError
from tests.helpers.family_tokenizers import with_attributes

TEMPLATES = Path(__file__).parent / "templates"
PROMPTS = PromptsConfig(max_tokens=4000, over_limit="refuse", style="chat")
QUESTION = {"role": "user", "content": "Two and three?"}
SYSTEM = {"role": "system", "content": "Answer kindly."}
ANSWER = "It is five."
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
KIMI = (
    *("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_call_begin|>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|tool_calls_section_end|>", "[BOS]"),
)
MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[CALL_ID]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"),
    *("[THINK]", "[/THINK]"),
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's tokens, and what is right for its template.

    Attributes:
        special: special tokens.
        end: what ends a turn of the assistant.
        eos: the tokenizer's end token.
        call: a call of `add` as the template writes it; "": its template shows no tools.
        answered: what stands between that call and the next turn.
        system: whether the template takes a system message.
        thinks: (variables that switch thinking on, off), where the template reads any.
        begun: {variables: the end of the prompt that belongs to the turn}, of `thinks`.
        note: a part of the note about demonstrations.
    """

    special: tuple[str, ...]
    end: str
    eos: str
    call: str = ""
    answered: str = ""
    system: bool = True
    thinks: tuple[dict[str, Any], ...] = ()
    begun: tuple[str, ...] = ()
    note: str = ""


LISTED = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n"
    '<parameter=say>\na "b" <c>\nd\n</parameter>\n</function>\n</tool_call>'
)
RESPONSE = "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response>"
AS_JSON = '{"a": 2, "say": "a \\"b\\" <c>\\nd"}'
THINKING = ({"enable_thinking": True}, {"enable_thinking": False})
FAMILIES = {
    "qwen3-coder": Family(
        special=CHATML, end="<|im_end|>", eos="<|im_end|>", call=LISTED,
        answered=f"{RESPONSE}\n<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3.5": Family(
        special=CHATML, end="<|im_end|>", eos="<|im_end|>", call=LISTED,
        answered=f"{RESPONSE}<|im_end|>\n<|im_start|>assistant\n<think>\n", thinks=THINKING, begun=("<think>\n", ""),
        note="learned inside <think>, opened by the prompt and never closed",
    ),
    "gpt-oss": Family(
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"), end="<|return|>",
        eos="<|return|>", call=f" to=functions.add<|channel|>commentary json<|message|>{AS_JSON}",
        answered="<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>"
        '"5"<|end|><|start|>assistant',
        thinks=({"reasoning_effort": "high"}, {"reasoning_effort": "low"}), begun=("", ""),
    ),
    "kimi-k2": Family(
        special=KIMI, end="<|im_end|>", eos="<|im_end|>",
        call="<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>" + AS_JSON,
        answered="<|tool_call_end|><|tool_calls_section_end|><|im_end|><|im_system|>tool<|im_middle|>"
        "## Return of functions.add:0\n5<|im_end|><|im_assistant|>assistant<|im_middle|>",
    ),
    "hermes": Family(
        special=("<|begin_of_text|>", *CHATML), end="<|im_end|>", eos="<|im_end|>",
        call=f'<tool_call>\n{{"name": "add", "arguments": {AS_JSON}}}\n</tool_call>',
        answered="<|im_end|>\n<|im_start|>tool\n<tool_response>\n5\n</tool_response><|im_end|><|im_start|>assistant\n",
    ),
    "smollm3": Family(
        special=CHATML, end="<|im_end|>", eos="<|im_end|>",
        call=f'<tool_call>\n{{"name": "add", "arguments": {AS_JSON}}}\n</tool_call>',
        answered="<|im_end|>\n<|im_start|>user\n5<|im_end|>\n<|im_start|>assistant\n", thinks=THINKING, begun=("", ""),
    ),
    "deepseek-v3.1": Family(
        special=DEEPSEEK, end="<｜end▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>",
        call=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{AS_JSON}",
        answered="<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>5"
        "<｜tool▁output▁end｜>",
        thinks=({"thinking": True}, {"thinking": False}), begun=("<think>", ""),
    ),
    "mistral-small": Family(
        special=MISTRAL, end="</s>", eos="</s>", call=f"[TOOL_CALLS]add[CALL_ID]000000000[ARGS]{AS_JSON}",
        answered="</s>[TOOL_RESULTS]000000000[TOOL_CONTENT]5[/TOOL_RESULTS]",
    ),
    "glm": Family(
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        end="<|endoftext|>", eos="<|endoftext|>",
        call="<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>say</arg_key>\n"
        '<arg_value>a "b" <c>\nd</arg_value>\n</tool_call>',
        answered="<|observation|><tool_response>\n5\n</tool_response><|assistant|>", thinks=THINKING, begun=("", ""),
    ),
    "llama-3.1": Family(
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>", eos="<|eot_id|>", call=f'{{"name": "add", "parameters": {AS_JSON}}}',
        answered='<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "phi-3": Family(
        special=("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"), end="<|end|>", eos="<|endoftext|>",
        system=False,
    ),
    "gemma-2": Family(
        special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), end="<end_of_turn>", eos="<eos>", system=False
    ),
}  # fmt: skip
BOS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<s>", "<bos>", "[BOS]")
DATED = ("gpt-oss", "llama-3.1", "smollm3")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "say": {"type": "string"}}},
    },
}
ARGUMENTS = {"a": 2, "say": 'a "b" <c>\nd'}


@dataclass
class Adding:
    """What a dialect reads of an environment with one tool."""

    syntax: str = "template"
    plays_a_game: bool = False
    show_tools: bool = True
    tools: list[Any] = field(default_factory=lambda: [ADD])

    def schemas(self):
        return self.tools


@cache
def made(name):
    """A byte tokenizer with the family's special tokens and template, without a pad token."""
    family = FAMILIES[name]
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    bos = next((token for token in family.special if token in BOS), None)
    own = byte_tokenizer(name, template, family.special, bos_token=bos, eos_token=family.eos)
    return RunTokenizer(own, date="2026-02-03")


def tokenizer_of(name, **variables):
    """The family's tokenizer on a date of its own, with these variables of its template."""
    return made(name).with_variables(variables)


def whole_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def shown(tokenizer, ids):
    """The text with its special tokens."""
    return str(tokenizer.decode(list(ids)))


def prompt_of(tokenizer, *messages, style="chat"):
    asked = [Prompt(id="p", messages=messages, answer="5")]
    return scan(asked, tokenizer, 4000, "refuse", Split.train, style).prompts[0]


def learned(tokenizer, completion, *messages, tools=(), **fields):
    """(the ids of a demonstration, the number of those that are given, the note)."""
    prompt = Prompt(id="p", messages=messages or (QUESTION,), answer="", tools=tools)
    demonstration = Demonstration(prompt=prompt, completion=completion, fields=fields)
    found = scan_demonstrations([demonstration], tokenizer, PROMPTS, 4000, Split.train)
    return found.texts[0].ids.tolist(), found.texts[0].num_given, "; ".join(found.notes) or None


def specials(tokenizer, ids):
    return [str(tokenizer.convert_ids_to_tokens(i)) for i in ids if i in tokenizer.added_tokens_decoder]


# -- prompts and demonstrations ----------------------------------------------------------------------------------------
@each("name", FAMILIES)
def test_prompts_are_what_the_template_renders_and_need_no_pad(name):
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    assert tokenizer.pad_token is None
    for messages in ([QUESTION], [SYSTEM, QUESTION]):
        if len(messages) > 1 and not family.system:
            with pytest.raises(UserError, match=r"^data\.system_prompt: the model's chat template"):
                prompt_of(tokenizer, *messages)
            continue
        [text] = rendered(tokenizer, [messages], start=True)
        assert list(prompt_of(tokenizer, *messages).token_ids) == whole_ids(tokenizer, text), name
        assert all(message["content"] in text for message in messages)
        assert ("2026" in text) == (name in DATED)


@each("name", FAMILIES)
def test_a_demonstration_has_the_tokens_of_the_templates_own_conversation_or_a_note(name):
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    ids, _, note = learned(tokenizer, ANSWER)
    assert specials(tokenizer, ids[-1:]) == [family.end]
    assert specials(tokenizer, turn_ends(tokenizer, "chat").ids[:1]) == [family.end]
    if family.note:
        assert family.note in str(note)
        return
    assert note is None
    [text] = rendered(tokenizer, [[QUESTION, {"role": "assistant", "content": ANSWER}]])
    has_end = text.rstrip().endswith((family.end, family.eos))
    own = whole_ids(tokenizer, text)
    assert own[: len(ids)] == ids if has_end else [*own, tokenizer.eos_token_id] == ids, name


@each("name", [name for name, family in FAMILIES.items() if family.thinks])
def test_variables_of_a_template_are_in_every_rendering(name):
    texts = []
    for variables, begun in zip(FAMILIES[name].thinks, FAMILIES[name].begun, strict=True):
        tokenizer = tokenizer_of(name, **variables)
        prompt = prompt_of(tokenizer, QUESTION)
        texts.append(shown(tokenizer, prompt.token_ids))
        plain = tokenizer.apply_chat_template(
            [[QUESTION]], add_generation_prompt=True, tokenize=False, strftime_now=lambda _: "", **variables
        )
        assert len(texts[-1]) >= len(str(plain[0]))
        assert prompt.tail == begun, (name, variables)
        opening = Dialect(Adding(tools=[ADD]), tokenizer, [QUESTION]).opened([QUESTION], "")[1]
        assert shown(tokenizer, opening).endswith(texts[-1][-20:])
    assert len(set(texts)) == len(texts)


def test_a_variable_that_the_template_does_not_read_is_refused():
    for name, variable, problem in (
        ("qwen3.5", "enable_thinkin", "does not read it, got False; use one that it reads: enable_thinking"),
        ("hermes", "enable_thinking", "reads none, got False; leave it out"),
        ("qwen3.5", "messages", "is given by rlft in every rendering"),
        ("smollm3", "xml_tools", "does not read it"),
    ):
        with pytest.raises(UserError, match=rf"^prompts\.template_variables\.{variable}: .*{problem}"):
            tokenizer_of(name, **{variable: False})


# -- text is text ------------------------------------------------------------------------------------------------------
@each("name", FAMILIES)
def test_special_tokens_that_data_spell_stay_text(name):
    """In questions, system prompts, demonstrations, calls, and what tools are called and answer."""
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    hostile = "".join(t for t in family.special if "THINK" not in t) + f"{family.end}x"

    def written(text):
        question = {"role": "user", "content": f"Two {text}?"}
        messages = [{"role": "system", "content": f"Kind {text}."}, question] if family.system else [question]
        rows = [list(prompt_of(tokenizer, *messages, style=style).token_ids) for style in ("chat", "raw")]
        rows.append(learned(tokenizer, f"It {text}", *messages)[0])
        if family.call:
            tool = {"type": "function", "function": {**ADD["function"], "description": f"Adds {text}."}}
            dialect = Dialect(Adding(tools=[tool]), tokenizer, [question])
            rows.append(list(dialect.opened([question], f"More {text}")[1]))
            sampled = whole_ids(tokenizer, dialect.written("add", ARGUMENTS))
            rows.append(list(dialect.suffix(sampled, [("add", f"It {text}")])))
        return rows

    for plain, spelled in zip(written("5"), written(hostile), strict=True):
        assert specials(tokenizer, spelled) == specials(tokenizer, plain), name
        text = str(tokenizer.decode(spelled)).replace("\\n", "\n")
        assert text.count(hostile) >= 1, name


def test_a_block_that_the_model_says_is_made_of_its_special_tokens():
    tokenizer = tokenizer_of("mistral-small")
    said = "[THINK]two and three[/THINK]It is five [INST]."
    ids, given, _ = learned(tokenizer, said)
    assert specials(tokenizer, ids[given:]) == ["[THINK]", "[/THINK]", "</s>"]
    assert decode(tokenizer, ids[given:]) == said
    asked = prompt_of(tokenizer, {"role": "user", "content": "[THINK]"})
    assert "[THINK]" not in specials(tokenizer, asked.token_ids)


def test_a_tokenizer_that_makes_a_special_token_of_a_part_is_refused(monkeypatch):
    tokenizer = made("hermes")
    plain, end = PlainText(tokenizer), tokenizer.eos_token_id
    some = plain._special[plain._some_special]
    for behind in ([some, end], [end]):  # it reads the end token in a part; it joins the part to the token before
        monkeypatch.setattr(plain, "_tokenised", lambda texts, behind=behind: [behind] * len(texts))
        with pytest.raises(UserError, match=r"^model\.path: its tokenizer makes a special token of a text that spells"):
            plain.ids_said(["It is <|im_end|>"])


# -- tools -------------------------------------------------------------------------------------------------------------
@each("name", [name for name, family in FAMILIES.items() if family.call])
def test_calls_are_written_and_read_as_the_family_does(name):
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    dialect = Dialect(Adding(), tokenizer, [QUESTION])
    assert "add" in shown(tokenizer, dialect.opened([QUESTION], "")[1])
    assert dialect.written("add", ARGUMENTS).endswith(family.call), name
    sampled = whole_ids(tokenizer, family.call)
    [call] = dialect.calls(sampled)
    assert (call.name, call.arguments, call.problem) == ("add", ARGUMENTS, ""), name
    assert dialect.calls(whole_ids(tokenizer, "Add 2 {a} <b> 5.")) == []
    assert shown(tokenizer, dialect.suffix(sampled, [("add", "5")])) == family.answered, name
    ends = specials(tokenizer, whole_ids(tokenizer, family.answered))[:1]
    ended = [*sampled, *whole_ids(tokenizer, ends[0])]
    assert family.answered == ends[0] + shown(tokenizer, dialect.suffix(ended, [("add", "5")]))


@each("name", [name for name, family in FAMILIES.items() if family.call])
def test_a_demonstration_of_a_call_is_the_templates_or_is_refused_by_name(name):
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    call = {"type": "function", "id": "000000000", "function": {"name": "add", "arguments": ARGUMENTS}}
    if name in ("smollm3", "deepseek-v3.1"):  # one writes no calls, the other no schemas
        problem = r"^(demonstrations: .* does not write the tool_calls|model\.path: .* does not show the tool add)"
        with pytest.raises(UserError, match=problem):
            learned(tokenizer, "", tools=(ADD,), tool_calls=[call])
        return
    ids, given, _ = learned(tokenizer, "", tools=(ADD,), tool_calls=[call])
    said = str(tokenizer.decode(ids[given:]))
    assert family.call in said, name
    assert specials(tokenizer, ids[-1:])[0] in {str(n) for n in turn_ends(tokenizer, "chat").names.values()}, name


def test_families_without_tools_are_refused_by_name():
    for name in ("phi-3", "gemma-2"):
        problem = r"^model\.path: its chat template cannot show tools .* \(add is not shown\)"
        with pytest.raises(UserError, match=problem):
            Dialect(Adding(), tokenizer_of(name), [QUESTION])


def test_calls_as_models_write_them_are_read():
    """Not only as their templates do: with other words between the tokens, several of them, or none that is whole."""
    for name, text, expected in (
        ("gpt-oss", "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"a\": 2}", [{"a": 2}]),
        ("kimi-k2", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{\"a\": 2}<|tool_call_end|>"
         "<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{\"a\": 3}<|tool_call_end|>",
         [{"a": 2}, {"a": 3}]),
        ("qwen3-coder", "<tool_call>\n<function=add>\n<parameter=a>2</parameter>\n</function>\n</tool_call>\n"
         "<tool_call>\n<function=add>\n</function>\n</tool_call> I wait.", [{"a": 2}, {}]),
        ("qwen3-coder", "<function=add>\n<parameter=a>\n2", None),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\": ", None),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>[1</arg_value></tool_call>", [{"a": "[1"}]),
    ):  # fmt: skip
        tokenizer = tokenizer_of(name)
        calls = Dialect(Adding(), tokenizer, [QUESTION]).calls(whole_ids(tokenizer, text))
        if expected is None:
            assert [bool(call.problem) for call in calls] == [True], name
        else:
            assert [(call.arguments, call.problem) for call in calls] == [(each, "") for each in expected], name


def test_answers_have_the_ids_of_their_calls():
    tokenizer = tokenizer_of("mistral-small")
    dialect = Dialect(Adding(), tokenizer, [QUESTION])
    for written, read in (("abcdefghi", "abcdefghi"), ("ab", "000000000")):  # the template takes nine characters
        sampled = whole_ids(tokenizer, f'[TOOL_CALLS]add[CALL_ID]{written}[ARGS]{{"a": 2}}')
        assert f"[TOOL_RESULTS]{read}[TOOL_CONTENT]" in shown(tokenizer, dialect.suffix(sampled, [("add", "5")]))


# -- texts that hold markers of a chat template ------------------------------------------------------------------------
NAMES = [*SPECIAL, *(f"{name} of the tests" for name in FAMILIES)]
WORDS = (
    *("Two and three?", "x < y", "a|b", "What is <b>bold</b>?", "[1, 2]", "role: user", "<think>5</think>"),
    *("User: hi\n\nAssistant:", "the assistant said", "<|", "|>", "$[0, 1]$", "def f(x): return x[0]"),
    *("<answer>5</answer>", "### Response:", "INST"),
)
"""Texts without a marker."""


@cache
def tokenizer(name):
    return tokenizer_of(name.partition(" ")[0]) if name.endswith("tests") else family_tokenizer(name)


def conversation(rng):
    turns = [{"role": role, "content": rng.choice(WORDS[:6])} for role in ("user", "assistant") * rng.randint(1, 2)]
    return turns[:-1]


def asked(number, *contents):
    return Prompt(id=str(number), messages=tuple({"role": "user", "content": text} for text in contents), answer="")


def notes(name, texts, style):
    prompts = [asked(i, text) for i, text in enumerate(texts)]
    return scan(prompts, tokenizer(name), 10_000, "refuse", Split.train, style).notes


def test_conversations_that_any_template_has_rendered_are_counted_and_named():
    """19 families read conversations that 19 have rendered: 361 pairs, each among plain texts, with both styles."""
    rng = random.Random(3)
    for read_by in NAMES:
        texts = [render(tokenizer(by), conversation(rng), start=True) for by in NAMES]
        assert notes(read_by, [*WORDS], "chat") == (), read_by
        for by, text in zip(NAMES, texts, strict=True):
            assert markers_of(tokenizer(read_by)).in_text(text), (read_by, by)
        [note] = notes(read_by, [*WORDS, *texts, *(f"Repeat: {text}" for text in texts)], "chat")
        of_all = f"{2 * len(NAMES)} of {len(WORDS) + 2 * len(NAMES)}"
        assert note.startswith(f"{of_all} train prompts hold markers of a chat template, such as "), read_by
        assert note.endswith("prompts.style=raw reads such texts as they are"), read_by


def test_raw_prompts_that_the_models_template_has_rendered_are_the_tokens_of_the_template():
    """What the note promises, with each family; a part of a rendering stays text, and so does another template's."""
    rng = random.Random(4)
    for name in NAMES:
        own = tokenizer(name)
        for _ in range(5):
            said = conversation(rng)
            chat = Prompt(id="a", messages=tuple(said), answer="")
            expected = scan([chat], own, 10_000, "refuse", Split.train, "chat").prompts[0].token_ids
            text = render(own, said, start=True)
            found = scan([asked(0, text)], own, 10_000, "refuse", Split.train, "raw")
            assert found.prompts[0].token_ids == expected, (name, said)
            [note] = found.notes
            assert note.startswith("1 of 1 train prompts are renderings of the model's own chat template"), name
            assert not markers_of(own).is_rendering(f"Repeat: {text}")
            assert not markers_of(own).is_rendering(text.partition(markers_of(own).answer)[0])
            [stays] = notes(name, [f"Repeat: {text}"], "raw")
            assert "stay" in stays, name


def test_markers_in_demonstrations_and_preferences_are_counted_in_prompts_and_completions():
    settings = PromptsConfig(max_tokens=10_000, over_limit="refuse", style="chat")
    for name in NAMES:
        own, rng = tokenizer(name), random.Random(5)
        given = render(own, conversation(rng), start=True)
        ended = render(own, [*conversation(rng), {"role": "assistant", "content": "Five."}]).rpartition("Five.")
        completion = "".join(ended[1:]).strip()
        prompts = [asked(0, "Two?"), asked(1, given), asked(2, "Three?")]
        plain = ["It is five.", "Six.", "Seven."]
        for completions in (plain, [completion, *plain[1:]]):
            demonstrations = [Demonstration(prompt=p, completion=c) for p, c in zip(prompts, completions, strict=True)]
            rankings = [
                Ranking(prompt=d.prompt, completions=(d.completion, "No."), scores=(1, 0)) for d in demonstrations
            ]
            for scanned, what, of in (
                (scan_demonstrations(demonstrations, own, settings, 1000, Split.train), "demonstrations", 3),
                (scan_rankings(rankings, own, settings, 1000, Split.train), "rankings", 6),
            ):
                told = [
                    note for note in scanned.notes if "learned as the chat" not in note and "never closed" not in note
                ]
                assert told[0].startswith(f"1 of 3 prompts of train {what} hold markers of a chat template"), name
                spelled = [f"1 of {of} completions of train {what} spell what ends or begins a turn"] * (
                    completions[0] not in (plain[0], "Five.")  # GLM's template puts no end behind it
                )
                assert [note.partition(", such as")[0] for note in told[1:]] == spelled, (name, told)


def test_a_tokenizer_without_a_template_reads_markers_as_text_and_says_so():
    bare = with_attributes(family_tokenizer("qwen2.5"), chat_template=None)
    other = render(tokenizer("mistral"), conversation(random.Random(1)), start=True)
    found = scan([asked(0, "a"), asked(1, other), asked(2, other)], bare, 1000, "refuse", Split.train)
    [note] = found.notes
    assert note.startswith("2 of 3 train prompts hold markers of a chat template")
    assert note.endswith("which stay text")
