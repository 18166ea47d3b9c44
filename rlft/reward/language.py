"""The share of a completion's words that are in the target language (DeepSeek-R1, arXiv 2501.12948, section 2.3.2).

The paper doesn't say how it finds the language of a word. Here a language detector judges runs of `window` words of one
script, because a single word often belongs to several languages. Tags, code, formulas, numbers and single letters,
which are no language, are left out. Text doesn't become a formula by standing between dollars: two adjacent words of
three letters are judged wherever they stand, except in fenced code.

Names in another script count as words of another language; as this is a share, a few of them cost little.
The detector is py3langid: deterministic, 114 languages with a two-letter code, a tenth of a millisecond for a window.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlft.config.bounds import PositiveInt
from rlft.system.terminal import pip_install
from rlft.types import Group, Prompt, UserError

PROMPT = "prompt"
MIN_CONFIDENCE = 0.02  # twice the confidence in each language when the detector finds no evidence in a text

# Thai, Lao, Burmese, Khmer, Japanese, Chinese: written without spaces, so each character counts as a word.
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_NO_WORD = re.compile(r"[0-9=+*/^_\\{}&|<>@#]")
_EDGES = "*_~#{}"

# Each search below ends at the next delimiter, so a text is read once.
_FENCED = re.compile(r"```.*?(?:```|\Z)|^[ \t]*~~~.*?(?:^[ \t]*~~~|\Z)", re.DOTALL | re.MULTILINE)
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,100}>")
_FORMULA = re.compile(
    r"`[^`\n]*`"
    r"|\$\$[^$]*\$\$"
    r"|\$(?=\S)[^$\n]*(?<=\S)\$(?![0-9])"
    r"|\\\((?:[^\\]|\\[^()])*+\\\)"
    r"|\\\[(?:[^\\]|\\[^\[\]])*+\\\]"
)
_SIDE_BY_SIDE = re.compile(rf"(?<![^\W\d_])[^\W\d_]{{3,}}+\s++[^\W\d_]{{3}}|[{_UNSPACED}]{{2}}")
_COMMAND = re.compile(r"\\(?:begin|end)\{[^{}]{0,40}\}|\\[A-Za-z]+")
_SCRIPTS = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "KATAKANA-HIRAGANA": "CJK"}


def prose(text: str) -> str:
    r"""The text without tags, code, formulas and LaTeX commands.

    >>> prose(r"<think>Also ist $x^2 = 4$ und $x = 2 \text{ oder noch etwas}$</think>").split()
    ['Also', 'ist', 'und', '$x', '=', '2', '{', 'oder', 'noch', 'etwas}$']
    """
    text = _TAG.sub(" ", _FENCED.sub(" ", text))
    text = _FORMULA.sub(lambda match: match[0] if _SIDE_BY_SIDE.search(match[0]) else " ", text)
    return _COMMAND.sub(" ", text)


def words(text: str) -> Iterator[tuple[str, str]]:
    """(script, word) of each word of a text, in order, without words with digits, formula signs or just one letter.

    >>> list(words("So **we** add 2x + 1: 首先"))
    [('LATIN', 'So'), ('LATIN', 'we'), ('LATIN', 'add'), ('CJK', '首'), ('CJK', '先')]
    """
    for piece in _WORD.findall(prose(text)):
        word = piece.strip(_EDGES)
        letters = [character for character in word if character.isalpha()]
        if letters and not _NO_WORD.search(word) and (len(letters) > 1 or re.match(f"[{_UNSPACED}]", word)):
            yield script(letters[0]), word


def windows(text: str, size: int) -> list[tuple[str, int]]:
    """(text, number of words) of runs of `size` words of one script; less than half a run joins the one before it."""
    by_script: dict[str, list[str]] = {}
    for name, word in words(text):
        by_script.setdefault(name, []).append(word)
    runs: list[list[str]] = []
    for same in by_script.values():
        num_runs = max(1, (len(same) + (size - 1) // 2) // size)
        runs += [same[k * size : (k + 1) * size if k + 1 < num_runs else None] for k in range(num_runs)]
    return [(("" if re.match(f"[{_UNSPACED}]", run[0]) else " ").join(run), len(run)) for run in runs]


def counts(text: str, detect: Callable[[str], str], size: int) -> Counter[str]:
    """{language: number of words}, where `detect` returns the language of a run of words."""
    result: Counter[str] = Counter()
    for run, num_words in windows(text, size):
        result[detect(run)] += num_words
    return result


@functools.lru_cache(maxsize=4096)
def script(letter: str) -> str:
    """The script of a letter by its Unicode name; Chinese characters and kana are one.

    >>> script("b"), script("я"), script("の")
    ('LATIN', 'CYRILLIC', 'CJK')
    """
    name = unicodedata.name(letter, "").partition(" ")[0]
    return _SCRIPTS.get(name, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """The share, 0 to 1, of each completion's words that are in the target language.

    A smaller window notices a change of language sooner, and is misjudged more often.
    """

    target: str
    window: PositiveInt
    min_words: PositiveInt
    too_little: float

    def __post_init__(self) -> None:
        if importlib.util.find_spec("py3langid") is None:
            problem = "needs the py3langid library, which is not installed"
            raise UserError("_target_", problem, remedy=pip_install("rlft[language]"))
        if self.target != PROMPT and self.target not in _detector().labels:
            problem = "is neither prompt nor the ISO 639-1 code of a language that py3langid knows"
            raise UserError("target", problem, got=self.target, remedy="use prompt, or a code such as en, de or zh")

    def start(self) -> None:
        """Loads the detector, about a second, before any time limit runs."""
        _detector()

    def __call__(self, group: Group) -> list[float]:
        target = self._prompt_language(group.prompt) if self.target == PROMPT else self.target
        return [self._score(rollout.completion.text, target) for rollout in group.rollouts]

    def _score(self, text: str, target: str | None) -> float:
        by_language = counts(text, _detect, self.window)
        if target is None or by_language.total() < self.min_words:
            return self.too_little
        return by_language[target] / by_language.total()

    def _prompt_language(self, prompt: Prompt) -> str | None:
        """The language of most words of the last user message; None if there are too few words to judge."""
        question = next((m["content"] for m in reversed(prompt.messages) if m["role"] == "user"), "")
        by_language = counts(question, _detect, self.window)
        return by_language.most_common(1)[0][0] if by_language.total() >= self.min_words else None


@functools.lru_cache(maxsize=4096)
def _detect(text: str) -> str:
    return _detector().classify(text)[0]


@functools.cache
def _detector() -> Any:
    """py3langid's model with the languages that have a two-letter code; the others are mostly dialects of these."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    detector = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=MIN_CONFIDENCE)
    detector.set_languages([code for code in detector.labels if len(code) == 2])
    return detector
