"""A rule that stands for a person's taste in sentences, and ranks answers as a person would in `rlft rank`.

    python taste.py prompts <out.jsonl>                      # requests for a sentence, and what each is about
    python taste.py rank <samples.jsonl> <rankings.jsonl>    # the file that `rlft rank` writes

Nobody's taste was asked: the rule is known, so that what a policy is rewarded for can be compared with it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from rlft.commands.rank import Rankings, questions_of
from rlft.types import Group

WORDS = """
    apple bread butter carrot cheese coffee honey lemon onion orange pepper rice salad soup sugar tea tomato water
    bear bee bird cat cow dog duck elephant fish fox frog goat horse lion mouse owl rabbit sheep snake tiger whale wolf
    beach cloud desert field flower forest garden grass hill island lake leaf moon mountain ocean rain river rock
    sand sea sky snow star storm sun tree valley wind winter summer spring autumn
    bed book bridge camera candle car chair clock coat cup desk door guitar hammer hat house key kitchen lamp letter
    map mirror paper pen piano plate road school ship shoe table train umbrella wall wheel window
    artist baker child doctor farmer friend king nurse pilot poet sailor singer teacher writer
    city dance dream family game holiday market music party sleep story village
"""
SUBJECTS = WORDS.split()
BEST_WORDS = (6, 12)


def taste(group: Group) -> list[float]:
    """The reward of these completions of a prompt, whose answer is its subject."""
    return [liking(rollout.completion.text, group.prompt.answer) for rollout in group.rollouts]


def liking(completion: str, subject: str) -> float:
    """0 to 1: a third each for naming the subject, for one whole sentence, and for 6 to 12 words.

    The last third is lost over 6 words too few or 12 too many.
    """
    text, (fewest, most) = completion.strip(), BEST_WORDS
    number = len(re.findall(r"[\w'-]+", text))
    names_it = re.search(rf"\b{re.escape(subject)}", text, re.IGNORECASE) is not None
    is_sentence = re.fullmatch(r"[A-Z][^.!?\n]*[.!?]", text) is not None
    away = (fewest - number) / 6 if number < fewest else (number - most) / 12
    return (names_it + is_sentence + max(0.0, 1.0 - max(0.0, away))) / 3


def write_prompts(out: Path) -> None:
    rows = [{"prompt": f"Write one sentence about this: {subject}", "answer": subject} for subject in SUBJECTS]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rank(samples: Path, out: Path) -> None:
    """Ranks what is not ranked yet; answers that the rule likes equally are tied."""
    rankings = Rankings(out, questions_of([str(samples)], "a rule", seed=0))
    while rankings.left:
        question = rankings.left[-1]
        subject = question["messages"][-1]["content"].split()[-1]
        likes = [round(liking(text, subject), 6) for text in question["completions"]]
        order = sorted(set(likes))
        rankings.add([order.index(like) for like in likes])
    print(f"{out}: {len(rankings.done)} rankings")


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"prompts": write_prompts, "rank": rank}[command](*map(Path, paths))
