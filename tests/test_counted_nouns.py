"""Every message that counts something says "1 step" and "2 steps": numbers and nouns are joined by `counted` alone."""

import ast
import re
from pathlib import Path

import rlft
from rlft.types import counted

FILES = sorted(Path(rlft.__file__).parent.rglob("*.py"))
SEVERAL = {
    "len(text)": "more than a page of characters", "len(self._failed)": "more than one, by the condition beside it",
    "other": "two numbers that differ",
    "self.updates_per_step": "a mistake in rlft's own code", "len(values)": "a mistake in rlft's own code",
    "expected": "a mistake in rlft's own code", "len(prompts)": "a mistake in rlft's own code",
    "len(seeds)": "a mistake in rlft's own code",
    "'+'.join(map(str, counts))": "a sum of several", "counts": "a list",
    "self.max_sequence_tokens - 1": "a range from 2", "self.settings.row_tokens": "a range from 2",
    "self.max_tokens": "a range from 1", "available": "as many as there are workers", "longest": "beyond a limit",
    "work.prompts": "the doctor's own", "work.completion_tokens": "the doctor's own", "most_tokens": "a model's",
    "split": "a word", "name": "a word", "where": "a word",
    "reward": "a word", "max(numbers)": "more than the number before it",
    "type(self).__name__": "a word", "answers": "a word", "eos": "a word", "temperature": "a value",
    "self.num_identical": "a share of the number before it", "keys": "what is typed", "with_images": "a prompt",
    "of_split": "the name of a split", "counted(number, 'vector')": "counted before what it is of",
}  # fmt: skip
"""{expression that is not a number that may be 1: why}."""


def nodes_of(source):
    """Calls, texts and constants."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call | ast.JoinedStr | ast.Constant)]


def nouns(nodes):
    """The last word of every noun that is counted somewhere, in the plural."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    found = [call.args[1] for call in calls if call.func.id == "counted"]
    texts = [noun.value for noun in found if isinstance(noun, ast.Constant)]
    return {counted(2, text.split()[-1]).removeprefix("2 ") for text in texts}


def by_hand(nodes, plurals):
    """(line, expression) of each value in a text that a counted noun follows, unless it is a share ("2 of 5 rows")."""
    noun = re.compile(rf" (?:[a-z-]+ )?(?:{'|'.join(sorted(plurals))})(?![\w=])")
    for node in (node for node in nodes if isinstance(node, ast.JoinedStr)):
        for before, value, after in zip([None, *node.values], node.values, node.values[1:], strict=False):
            if not (isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant)):
                continue
            text = before.value if isinstance(before, ast.Constant) else ""
            expression = ast.unparse(value.value)
            is_share = re.search(r"\b(of|all|all its|[a-z_]+ =)( the| other)? $", str(text)) is not None
            is_measured = value.format_spec is not None and "." in ast.unparse(value.format_spec)
            if noun.match(str(after.value)) and not (is_share or is_measured or expression.isupper()):
                yield node.lineno, expression


def test_no_message_counts_by_hand():
    sources = {file: file.read_text() for file in FILES}
    nodes = {file: nodes_of(source) for file, source in sources.items()}
    everything = [node for found in nodes.values() for node in found]
    plurals = nouns(everything)
    assert {"steps", "trials", "jobs", "tokens", "completions", "prompts", "GPUs", "minibatches"} <= plurals
    found = [(what, f"{file}:{line}") for file, of in nodes.items() for line, what in by_hand(of, plurals)]
    assert not [f"{where} {what}" for what, where in found if what not in SEVERAL]
    assert {*SEVERAL} == {what for what, _ in found}, "no exception is left over"
    logged = re.compile(rf"(?<!of )%d (?:[a-z-]+ )?(?:{'|'.join(plurals)})\b")
    assert not [file for file, source in sources.items() if logged.search(source)]
    texts = [node.value for node in everything if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [text for text in texts if re.search(r"[a-z]\(e?s\)", text.replace("http(s)", ""))], "step(s)"


def test_a_message_that_counts_by_hand_is_found():
    nodes = nodes_of(
        'f"there are {n} failed jobs"; f"finished {self.steps} steps in"; f"{a} of {b} rows"; f"{x:.1f} steps"'
    )
    assert [what for _, what in by_hand(nodes, {"steps", "rows", "jobs"})] == ["n", "self.steps"]
