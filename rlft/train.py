"""The loop: sample -> score -> credit -> update -> publish. A step is a function of (config, state at its start)."""

from __future__ import annotations

from functools import partial

from rlft.loop.metrics import rollout_metrics
from rlft.loop.session import Session, State


def train(session: Session) -> State:
    """Runs steps until the last one or an interruption; returns the state it ended in."""
    trainer = session.trainer
    state = session.begin()
    while state.step < session.config.steps and not session.interrupted:
        clock, algorithm = session.clock, state.algorithm
        with clock("sample"):
            groups = session.sample(state.step)
        with clock("score"):
            scores = session.score(groups)
        rollouts = session.replace_uninformative(clock, state.step, groups, scores)
        with clock("credit"):
            batch = session.batch(rollouts)
            zero_gradient_B = algorithm.zero_gradient_rows(batch)
            batch = algorithm.credit(trainer.annotate(batch, zero_gradient_B))
        inspecting = session.inspecting(state.step + 1, rollouts, batch, zero_gradient_B)
        with inspecting as tokens, clock("update"):
            metrics = rollout_metrics(rollouts, batch, algorithm)
            metrics |= trainer.update(algorithm, batch, zero_gradient_B, state.step)
            metrics |= {f"algorithm/{name}": value for name, value in algorithm.state().items()}
        session.wait_for_samples(clock)
        with clock("publish"):
            session.publish(state.step + 1)
            metrics |= trainer.refresh(state.step + 1, rollouts)
            # A policy that rests has not moved: its KL of 0 says nothing to a controller.
            rests = state.step < session.config.critic.warmup_steps
            adapted = algorithm if rests else algorithm.adapt(metrics)
            state = State(step=state.step + 1, algorithm=adapted)
        session.record(state.step, metrics, rollouts, batch, tokens)
        session.evaluate_if_due(state.step)
        session.checkpoint_if_due(state.step, partial(session.checkpoint, state))
    return state
