"""What `rlft sft` learns: cross-entropy on demonstrated completions, with an adapter or the model's own weights."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rlft.generation.engine import Generator
from rlft.loop.driver import Outcome
from rlft.loop.engines import Engines
from rlft.loop.freshness import check_decoding, open_freshness
from rlft.loop.metrics import evaluate, kl_to_base, text_loss
from rlft.loop.parts import load_for_training, open_scorer
from rlft.loop.supervised import SupervisedTask, likelihood_gradient, open_policy, train_supervised
from rlft.model.full_weights import WholeModel
from rlft.model.networks import Networks
from rlft.plan.sft_plan import SftPlan
from rlft.plan.sizes import of_evaluation, rehearse_decoding
from rlft.reward.workers.scorer import Scorer
from rlft.system.terminal import Say
from rlft.types import Evaluation


class DemonstrationTask(SupervisedTask[SftPlan]):
    """Supervised fine-tuning: the demonstrated completions become more likely.

    The learner is the adapter in the role of the policy, or the whole model. The generator samples and the scorer
    scores for the task accuracy; None if that is not measured.
    """

    def __init__(
        self, plan: SftPlan, learner: Networks, generator: Generator | None, scorer: Scorer | None, say: Say
    ) -> None:
        super().__init__(plan, learner)
        self.generator, self.scorer = generator, scorer
        self.freshness = None
        if plan.held_out is not None and plan.engine is not None:
            engine = self.config.generation.named(plan.engine)
            self.freshness = open_freshness(self.config.freshness, plan.held_out, learner.backbone, engine, say)

    def backward(self, step: int) -> dict[str, float]:
        """Adds the gradient of the mean negative log-prob over the tokens of the step's completions."""
        batch = self.plan.train.at(self.config.seed, step, self.config.examples_per_step)
        return likelihood_gradient(self.learner, batch, self.config.token_budget)

    def rehearse(self) -> None:
        lengths = [len(text.ids) for text in self.plan.train.texts]
        longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])[: self.config.examples_per_step]
        num_examples = next(
            (n for n in range(1, len(longest)) if sum(lengths[i] for i in longest[:n]) > self.config.token_budget),
            len(longest),
        )
        likelihood_gradient(self.learner, self.plan.train.batch(longest[:num_examples]), self.config.token_budget)

    def rehearse_sampling(self, step: int) -> None:
        if self.generator is not None:
            assert self.freshness is not None, "an engine is opened for held-out prompts"
            assert self.plan.held_out is not None, "an engine is opened for held-out prompts"
            self.generator.load(self.learner.publish(step))  # the engine's merged weights count as well
            shapes = of_evaluation(self.plan.held_out, self.config.eval)
            rehearse_decoding(self.generator, shapes, self.config.generation.max_tokens)
            check_decoding(self.generator, self.learner, self.plan.held_out, self.config, self.freshness.limits)

    def evaluate(self, step: int) -> Evaluation:
        """Loss on the held-out demonstrations, and accuracy on the held-out prompts of the task."""
        settings, held_out, examples = self.config.eval, self.plan.held_out, self.plan.held_out_examples
        batch = examples.batch(range(min(settings.num_prompts, len(examples.texts))))  # as many as prompts are sampled
        metrics = {"eval/loss": text_loss(self.learner, batch, self.config.token_budget)}
        if held_out is None:
            return Evaluation(step=step, accuracy=None, accuracy_se=None, metrics=metrics, examples=())
        assert self.generator is not None
        assert self.scorer is not None
        assert self.freshness is not None
        adapter = self.learner.publish(step)
        self.generator.load(adapter)
        self.freshness.check(step, self.generator, self.learner, adapter)
        prompts = tuple(held_out.prompts[: settings.num_prompts])
        evaluation, groups, scores = evaluate(self.generator, self.scorer, prompts, self.config, step)
        self.generator.sleep()
        metrics |= evaluation.metrics
        if settings.kl_base:
            metrics["eval/kl_base"] = kl_to_base(self.learner, self.learner.backbone.collated(groups, scores))
        return replace(evaluation, metrics=metrics)


def open_task(plan: SftPlan, engines: Engines, stack: ExitStack, say: Say) -> DemonstrationTask:
    """Loads the model and, if the task is evaluated, opens the engine and the rewards' workers."""
    config = plan.config
    if config.lora is None:
        learner: Networks = WholeModel(load_for_training(config.model, None, config.token_budget))
    else:
        adopt = engines.adopting(plan, config.lora)
        learner = open_policy(config, config.lora, stack, adopt)
    if plan.engine is None:
        return DemonstrationTask(plan, learner, None, None, say)
    scorer = stack.enter_context(open_scorer(config, learner))
    generator = stack.enter_context(engines.opened_for(plan, learner, config.lora))
    return DemonstrationTask(plan, learner, generator, scorer, say)


def run(plan: SftPlan, folder: Path, engines: Engines, say: Say) -> Outcome:
    return train_supervised(
        plan, folder, lambda stack: open_task(plan, engines, stack, lambda text: say(f"note: {text}")), say
    )
