"""The loss in writing, as `rlft algorithms` prints it, computes the number that the code computes.

Every printed line is evaluated as Python here, with small functions of float64 tensors for its symbols: completions are
`[B, 1]`, each of their rewards `[K, B, 1]`, tokens `[B, T]`.
"""

import re
from dataclasses import fields, replace
from importlib import import_module
from itertools import zip_longest
from typing import Any

import pytest
import torch
from in_one_test import each
from torch import Tensor

import rlft
from rlft.algorithm import formula as written
from rlft.algorithm.formula import SYMBOLS, formula, formula_of
from rlft.config import catalog
from rlft.types import Batch, LossScale, Outputs
from tests.algorithm.algorithm_steps import close, full_step, make, scale_of

NAMES = catalog.choices("algorithm")
FAMILIES = ("grpo", "reinforce", "ppo", "kimi", "opd")
ELEMENTARY = {"min", "max", "log", "x"}
LINE = re.compile(r"(?P<name>\w+)(?P<of>\(x\))? = (?P<value>.+)")

KL_IN_LOSS = {"kl_coef": 0.3, "kl_in": "loss", "kl_to": "reference"}
KL_IN_REWARD = {"kl_coef": 0.3, "kl_in": "reward", "kl_to": "reference"}
SHARED: list[dict[str, Any]] = [
    {},
    *({"aggregate": how} for how in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")),
    *({**KL_IN_LOSS, "kl_estimator": kind} for kind in ("auto", "k1", "k2", "k3", "k3_unbiased", "exact")),
    *({**KL_IN_REWARD, "kl_estimator": kind} for kind in ("auto", "k1", "k2", "k3", "k3_unbiased", "exact")),
    *({"kl_coef": 0.3, "kl_in": "loss", "kl_to": "old", "kl_estimator": kind} for kind in ("auto", "exact")),
    {"entropy_coef": 0.02},
]
RATIOS: list[dict[str, Any]] = [
    *({"surrogate": kind, "clip_low": 0.3}
      for kind in ("clipped", "importance", "policy_gradient", "cispo", "sapo", "gmpo")),
    {"surrogate": "clipped", "dual_clip": 1.6},
    *({"surrogate": "clipped", "ratio": level}
      for level in ("token", "sequence", "sequence_token", "sequence_product")),
    *({"mismatch": f"{level}_{way}"}
      for level in ("token", "sequence", "sequence_product") for way in ("truncate", "mask")),
    {"off_policy_limit": 0.05},
    {"off_policy_limit": 0.05, "mismatch": "token_mask"},
    {**KL_IN_LOSS, "mismatch": "token_mask"},
]  # fmt: skip
OWN: dict[str, list[dict[str, Any]]] = {
    "grpo": [
        *({"std": std} for std in ("sample", "population", "batch", "none")),
        *({"std": std, "supervision": "process"} for std in ("sample", "population", "batch", "none")),
        {"supervision": "process", "credit_span": "turn"},
        *({"std": std, "reward_aggregation": "normalize_then_sum"}
          for std in ("sample", "population", "batch", "none")),
    ],
    "reinforce": [
        *({"reward_to_go": to_go, "gamma": 0.9, "baseline": baseline, "whiten": whiten}
          for to_go in (True, False) for whiten in (True, False)
          for baseline in ("none", "batch", "group", "leave_one_out")),
        {**KL_IN_REWARD, "reward_to_go": False},
    ],
    "ppo": [
        *({"estimator": estimator, "gamma": 0.9, "bootstrap_truncated": bootstrap, "n_steps": n, "value_lam": value_lam,
           "credit_span": span}
          for estimator in ("gae", "n_step") for bootstrap in (True, False) for n in (2, None)
          for value_lam in (None, 0.7, 1.0) for span in ("trajectory", "turn")),
        {**KL_IN_REWARD, "credit_span": "turn"},
        {"whiten": False},
        {"value_clip": None},
        {"ptx_coef": 0.7},
    ],
    "kimi": [{"baseline": "soft"}, {"tau": 0.0}],
    "opd": [
        *({"std": std} for std in ("sample", "population", "batch", "none")),
        {"supervision": "process"},
        {"supervision": "process", "credit_span": "turn"},
        *({"std": std, "reward_aggregation": "normalize_then_sum"}
          for std in ("sample", "population", "batch", "none")),
        *({"teacher_in": "loss", "divergence": kind, "jsd_beta": 0.3, "teacher_coef": 0.7}
          for kind in ("reverse", "forward", "jensen_shannon")),
        *({"teacher_in": "loss", "mismatch": f"{level}_{way}"}
          for level in ("token", "sequence", "sequence_product") for way in ("truncate", "mask")),
        {"teacher_in": "loss", "off_policy_limit": 0.05, "mismatch": "token_mask"},
    ],
}  # fmt: skip
BESIDE = {"opd": {"reward_coef": 0.5}}
"""Keys of a family in all its settings: here rewards count beside the teacher."""
SETTINGS = [
    (family, {**BESIDE.get(family, {}), **keys})
    for family in FAMILIES
    for keys in [*SHARED, *(RATIOS if family != "kimi" else []), *OWN[family]]
    if not (keys.get("supervision") == "process" and keys.get("kl_in") == "reward")
]


def keys_of(algorithm):
    return {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}


def stated(algorithm):
    return formula_of(type(algorithm), keys_of(algorithm))


def docstring_of(module):
    return import_module(f"rlft.algorithm.{module}").__doc__


def lines_of(algorithm):
    """{name: (whether it is a function of x, the Python right of its equals sign)} of the printed lines."""
    matches = [LINE.fullmatch(line) for line in stated(algorithm).lines]
    return {match["name"]: (bool(match["of"]), match["value"]) for match in matches if match is not None}


def number(value):
    return torch.as_tensor(value, dtype=torch.float64)


def with_the_rest(probabilities):
    return torch.cat([probabilities, 1 - probabilities.sum(-1, keepdim=True)], -1)


class Written(dict[str, Any]):
    """The names that a line may use: keys, symbols, and the other lines, which are evaluated when they are used."""

    def __init__(
        self, algorithm: Any, outputs: Outputs, batch: Batch, scale: LossScale, text: Tensor, whole: dict[str, Tensor]
    ) -> None:
        self.lines, self.batch = lines_of(algorithm), batch
        mask = self.mask = batch.loss_mask

        def kept(tensor: Tensor | None) -> Tensor:
            return torch.where(mask, tensor, 0.0)

        symbols = {
            "lp": kept(outputs.logprobs), "H": kept(outputs.entropy), "V": kept(outputs.values),
            "lp_old": kept(batch.old_logprobs), "lp_ref": kept(batch.reference_logprobs),
            "lp_smp": kept(batch.sampled_logprobs), "V_old": kept(batch.old_values), "step": kept(batch.token_rewards),
            "lp_teacher": kept(batch.teacher_logprobs),
            "p": with_the_rest(outputs.top_k_logprobs.exp()), "q": with_the_rest(batch.teacher_top_k_logprobs.exp()),
            "sum_top": lambda x: x.sum(-1), "sum_v": lambda x: x.sum(-1), **whole,
            "reward_k": batch.each_reward.T.unsqueeze(-1), "weight_k": batch.each_weight.T.unsqueeze(-1),
            "reward": batch.rewards.unsqueeze(-1), "truncated": batch.truncated.double().unsqueeze(-1),
            "lp_text": text, "mean_text": torch.mean, "s": scale.value_scale,
            "n": mask.sum(-1, keepdim=True).clamp(min=1),
            "N": scale.num_tokens, "B": scale.num_sequences, "T_max": scale.max_completion_tokens,
            "exp": torch.exp, "log": torch.log, "stop": torch.detach, "sigmoid": torch.sigmoid,
            "min": lambda a, b: torch.minimum(a, number(b)), "max": lambda a, b: torch.maximum(a, number(b)),
            "clip": lambda x, low, high: torch.maximum(torch.minimum(x, number(high)), number(low)),
            "within": lambda x, low, high: ((x >= low) & (x <= high)).double(),
        }  # fmt: skip
        super().__init__({**keys_of(algorithm), **symbols})

    def __missing__(self, name: str) -> Any:
        if name not in self.lines:
            return getattr(self, f"_{name}")
        is_function, value = self.lines[name]
        if is_function:
            return lambda x: eval(value, {}, Inner(self, x))
        self[name] = eval(value, {}, self)
        return self[name]

    def _sum_t(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, x.expand(self.mask.shape), 0.0).sum(-1, keepdim=True)

    def _mean_t(self, x: Tensor) -> Tensor:
        return self._sum_t(x) / self.mask.sum(-1, keepdim=True).clamp(min=1)

    def _sum_k(self, x: Tensor) -> Tensor:
        return x.sum(0)

    def _sum_i(self, x: Tensor) -> Tensor:
        return x.sum()

    def _those(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(where x says something, the group of each entry): completions, or scored steps."""
        ids = self.batch.group_ids.unsqueeze(-1).expand(x.shape)
        if x.shape[1] == 1:
            return torch.ones_like(x, dtype=torch.bool), ids
        assert x is self["step"]
        return self.batch.step_ends, ids

    def _of_groups(self, x: Tensor, function: Any, everything: bool = False) -> Tensor:
        """function(entries of a group, this entry) for every entry, 0 where x says nothing."""
        if x.ndim == 3:
            return torch.stack([self._of_groups(reward, function, everything) for reward in x])
        where, ids = self._those(x)
        result = torch.zeros_like(x)
        for position in where.nonzero():
            at = tuple(position)
            among = where if everything else where & (ids == ids[at])
            result[at] = function(x[among], x[at])
        return result

    def _mean_group(self, x: Tensor) -> Tensor:
        return self._of_groups(x, lambda group, one: group.mean())

    def _mean_siblings(self, x: Tensor) -> Tensor:
        return self._of_groups(x, lambda group, one: (group.sum() - one) / (len(group) - 1) if len(group) > 1 else one)

    def _std_group(self, x: Tensor, c: int) -> Tensor:
        return self._of_groups(x, lambda group, one: group.std(correction=c) if len(group) > c else 0 * one)

    def _mean_all(self, x: Tensor) -> Tensor:
        return self._of_groups(x, lambda group, one: group.mean(), everything=True)

    def _std_all(self, x: Tensor) -> Tensor:
        return self._of_groups(x, lambda group, one: group.std(), everything=True)

    def _mean_tokens(self, x: Tensor) -> Tensor:
        return x.expand(self.mask.shape)[self.mask].mean()

    def _std_tokens(self, x: Tensor) -> Tensor:
        return x.expand(self.mask.shape)[self.mask].std()

    def _tokens(self, row: int) -> list[int]:
        return self.mask[row].nonzero().squeeze(-1).tolist()

    def _turns(self, row: int) -> list[list[int]]:
        """The tokens of each turn of a row."""
        turns: list[list[int]] = [[]]
        for token in self._tokens(row):
            turns[-1].append(token)
            if self.batch.turn_ends[row, token]:
                turns.append([])
        return [turn for turn in turns if turn]

    def _at_turn_ends(self, x: Tensor) -> Tensor:
        result = torch.zeros(self.mask.shape, dtype=x.dtype)
        for row in range(len(self.mask)):
            for turn in self._turns(row):
                result[row, turn[-1]] = x[row, 0]
        return result

    def _at_last_token(self, x: Tensor) -> Tensor:
        result = torch.zeros(self.mask.shape, dtype=x.dtype)
        for row in range(len(self.mask)):
            for token in self._tokens(row)[-1:]:
                result[row, token] = x[row, 0]
        return result

    def _last_token(self, x: Tensor) -> Tensor:
        rows = [self._tokens(row)[-1:] for row in range(len(self.mask))]
        return torch.stack([x[row, tokens].sum() for row, tokens in enumerate(rows)]).unsqueeze(-1)

    def _first_token(self, x: Tensor) -> Tensor:
        rows = [self._tokens(row)[:1] for row in range(len(self.mask))]
        firsts = [x[row, tokens[0]] if tokens else self.batch.rewards[row] for row, tokens in enumerate(rows)]
        return torch.stack(firsts).unsqueeze(-1)

    def _next_token(self, x: Tensor, end: Tensor | float) -> Tensor:
        result, ends = torch.zeros_like(x), torch.as_tensor(end, dtype=x.dtype).expand(len(x), 1)
        for row in range(len(x)):
            tokens = self._tokens(row)
            for token, following in zip_longest(tokens, tokens[1:]):
                result[row, token] = ends[row, 0] if following is None else x[row, following]
        return result

    def _next_in_turn(self, x: Tensor, end: Tensor | float) -> Tensor:
        result = self._next_token(x, end)
        for row in range(len(x)):
            for turn in self._turns(row)[:-1]:
                result[row, turn[-1]] = 0.0
        return result

    def _summed(self, x: Tensor, stretches: Any, c: float, n: int | None) -> Tensor:
        """Of each token the next n of its stretch, itself included, discounted by c for each."""
        result = torch.zeros_like(x)
        for row in range(len(x)):
            for tokens in stretches(row):
                for i, token in enumerate(tokens):
                    result[row, token] = sum(c**k * x[row, later] for k, later in enumerate(tokens[i:][:n]))
        return result

    def _to_go_in_turn(self, x: Tensor, c: float, n: int | None = None) -> Tensor:
        return self._summed(x, self._turns, c, n)

    def _to_go(self, x: Tensor, c: float, n: int | None = None) -> Tensor:
        return self._summed(x, lambda row: [self._tokens(row)], c, n)


class Inner(dict[str, Any]):
    """The names inside a function of x."""

    def __init__(self, outer: Written, x: Tensor) -> None:
        super().__init__(x=x)
        self.outer = outer

    def __missing__(self, name: str) -> Any:
        return self.outer[name]


def words(keys):
    return str(keys).translate(str.maketrans("", "", "{}' "))


@pytest.fixture(scope="session")
def loss_on_a_random_step():
    """(loss, its gradients) of an algorithm on a random step: as the code computes it, or as it is written."""

    def loss_of(algorithm, as_written):
        outputs, batch = full_step()
        scale = replace(scale_of(batch), value_scale=1.5)
        text = torch.tensor([-0.5, -1.5, -0.1], dtype=torch.float64, requires_grad=True)
        draws = torch.Generator().manual_seed(7)
        logits = torch.randn(3, *batch.loss_mask.shape, 5, generator=draws, dtype=torch.float64, requires_grad=True)
        pi, (pi_old, pi_ref) = logits[0].softmax(-1), logits[1:].detach().softmax(-1)
        first, second = (pi_old, pi) if algorithm.kl_to == "old" else (pi, pi_ref)
        outputs = replace(outputs, kl=(first * (first / second).log()).sum(-1))
        batch = replace(batch, reference_kl=(pi_old * (pi_old / pi_ref).log()).sum(-1))
        if as_written:
            whole = {"pi": pi, "pi_old": pi_old, "pi_ref": pi_ref}
            loss = Written(algorithm, outputs, batch, scale, text, whole)["L"]
        else:
            loss = algorithm.loss(outputs, algorithm.credit(batch), scale).total
            loss = loss + algorithm.text_loss(text.unsqueeze(0), torch.ones(1, 3, dtype=torch.bool), 3)
        inputs = (outputs.logprobs, outputs.entropy, outputs.values, text, outputs.top_k_logprobs, logits)
        return loss.detach(), torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)

    return loss_of


@pytest.fixture(scope="session")
def agrees(loss_on_a_random_step):
    """Asserts that the written loss is the computed one, in value and gradient."""

    def agrees(algorithm):
        loss, gradients = loss_on_a_random_step(algorithm, as_written=False)
        written_loss, written_gradients = loss_on_a_random_step(algorithm, as_written=True)
        assert loss != 0
        close(written_loss, loss, tol=1e-9)
        for gradient, other in zip(gradients, written_gradients, strict=True):
            close(other, gradient, tol=1e-9)

    return agrees


@each("name", NAMES)
def test_the_printed_loss_of_every_yaml_is_the_loss_that_is_computed(agrees, name):
    agrees(make(name))


@each(("family", "keys"), SETTINGS, ids=words)
def test_the_printed_loss_is_the_computed_one_with_every_choice(agrees, family, keys):
    agrees(make(family, **keys))


@pytest.fixture(scope="module")
def in_all_settings():
    """(family, algorithm, its printed loss) of every setting."""
    made = [(family, make(family, **keys)) for family, keys in SETTINGS]
    return [(family, algorithm, stated(algorithm)) for family, algorithm in made]


@pytest.mark.parametrize("module", [*FAMILIES, "objective"])
def test_no_line_of_a_docstring_is_left_untried(in_all_settings, module):
    """The settings above print every definition and every term of the families and of what they share."""
    lines = [line for line in docstring_of(module).splitlines() if re.match(r" {4}(\w+(\(x\))? = |  [+-] )", line)]
    assert len(lines) > 5
    losses = [loss for family, _, loss in in_all_settings if module in (family, "objective")]
    printed = " ".join(line for loss in losses for line in loss.lines)
    for line in lines:
        assert line.partition("  if ")[0].strip() in printed, line


def test_every_name_in_a_formula_is_a_key_another_line_or_explained(in_all_settings):
    for _, algorithm, loss in in_all_settings:
        names = {name for line in loss.lines for name in re.findall(r"[A-Za-z_]\w*", line.replace("1e-8", ""))}
        known = {line.partition(" = ")[0].removesuffix("(x)") for line in loss.lines} | keys_of(algorithm).keys()
        assert names - known - ELEMENTARY <= loss.symbols.keys(), algorithm
        assert loss.symbols.keys() <= names, algorithm


def test_a_family_does_not_repeat_what_it_builds_on():
    """Only the terms of its loss L, which stands whole in its module."""

    def lines_in(module: str) -> set[str]:
        return set(re.findall(r"(?m)^ {4}((?!L )\w+(?:\(x\))? = .+)$", docstring_of(module)))

    for family in FAMILIES:
        assert not lines_in(family) & lines_in("objective")
    assert not lines_in("opd") & lines_in("grpo")


OTHER_VALUES = {"n_steps": 2, "kl_tolerance": 1.2, "eps": 0.1, "clip_low": 0.1}
"""Where half of a value could leave the loss of the random step as it is: no ratio there is below a half."""


@pytest.mark.parametrize("name", NAMES)
def test_a_number_stands_in_the_printed_loss_where_it_changes_the_loss_and_nowhere_else(loss_on_a_random_step, name):
    algorithm = make(name)
    loss, _ = loss_on_a_random_step(algorithm, as_written=False)
    numbers = {key: value for key, value in keys_of(algorithm).items() if type(value) in (int, float)}
    changes, printed = set(), set()
    for key, value in numbers.items():
        changed = make(name, **{key: OTHER_VALUES.get(key, value / 2 if value else 0.5)})
        other, _ = loss_on_a_random_step(changed, as_written=False)
        changes |= {key} if other != loss else set()
        # A coefficient of 0 is not printed, and half of it would be: of the two the one that acts.
        text = " ".join(value for _, value in lines_of(algorithm if value else changed).values())
        printed |= {key} if re.search(rf"\b{key}\b", text) else set()
    assert changes == printed
    assert len(numbers) > len(changes) >= 2


def test_what_kl_coef_adds_is_printed_where_it_is_on():
    assert "kl_coef" not in " ".join(stated(make("grpo")).lines)
    assert stated(make("grpo", kl_coef=0.1)).lines[0] == "L = agg(w * m * S) + kl_coef * agg(KL)"


def test_a_docstring_without_a_loss_states_none():
    assert formula(["Prose.\n\n    S = r * A\n"], {}) is None
    assert formula([""], {}) is None


def test_lines_that_contradict_each_other_and_unknown_keys_are_errors():
    with pytest.raises(ValueError, match="L has two definitions"):
        formula(["A.\n\nB.\n\n    L = a\n    L = b    if tau > 0\n"], {"tau": 1.0})
    with pytest.raises(ValueError, match="'tua > 0' is no condition on one of the keys tau"):
        formula(["A.\n\n    L = a    if tua > 0\n"], {"tau": 1.0})


def test_what_a_docstring_does_not_define_is_that_of_the_next_and_of_the_nearest_only():
    base = (
        "B.\n\n    L = never\n    a = near + far\n    near = 1\n    far = 2    if key_that_is_not_there=1\n    x = 3\n"
    )
    loss = formula(["A.\n\n    L = a + x\n    near = 4\n    far: explained\n", base], {})
    assert (loss.lines, dict(loss.symbols)) == (
        ("L = a + x", "near = 4", "a = near + far", "x = 3"),
        {"far": "explained"},
    )
    assert formula(["A.\n\n    a = 1\n", base], {}) is None


def test_conditions_read_words_as_yaml_writes_them():
    doc = "A.\n\n    L = a\n      + b    if x=null and y=true\n      + c    if x!=null|3\n      - d    if z=k1|k2\n"
    for keys, line in (
        ({"x": None, "y": True, "z": "k2"}, "L = a + b - d"),
        ({"x": 2, "y": False, "z": "k3"}, "L = a + c"),
    ):
        loss = formula([doc], keys)
        assert loss.lines == (line,)


def test_symbols_are_explained_once():
    for family in FAMILIES:
        own = re.findall(r"(?m)^ {4}(\w+)(?:\(.*?\))?: ", docstring_of(family))
        assert not set(own) & SYMBOLS.keys()
    assert written.LOSS not in SYMBOLS


def test_it_is_read_from_the_class_of_an_algorithm_that_is_loaded():
    assert "r = exp(mean_t(lp - lp_old))" in stated(rlft.load_algorithm("gspo")).lines
