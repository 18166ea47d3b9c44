"""The loop, which anybody can read: on one screen, with its five stages in their order; runs show what it computes."""

import ast
import inspect
from types import SimpleNamespace
from unittest.mock import MagicMock

import rlft.train
from rlft.train import train


def test_the_loop_fits_one_screen_and_names_its_five_stages():
    source = inspect.getsource(train)
    assert len(source.splitlines()) <= 45
    withs = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.With)]
    clocks = [node.items[-1].context_expr for node in withs]
    stages = [ast.literal_eval(clock.args[0]) for clock in clocks if isinstance(clock, ast.Call)]
    assert stages == ["sample", "score", "credit", "update", "publish"]


def test_it_runs_to_the_last_step_or_an_interruption_and_a_policy_that_rests_says_nothing_to_a_controller(monkeypatch):
    monkeypatch.setattr(rlft.train, "rollout_metrics", lambda *_: {})
    for interrupted_after, steps, adapted in ((None, 4, [3, 4]), (2, 2, [])):
        session, algorithm, told = MagicMock(), MagicMock(), []
        algorithm.state.return_value = {}
        algorithm.adapt.side_effect = lambda metrics: told.append(metrics["step"]) or algorithm  # noqa: B023
        session.begin.return_value = SimpleNamespace(step=0, algorithm=algorithm)
        session.config.steps, session.config.critic.warmup_steps = 4, 2
        session.trainer.update.side_effect = lambda *rest: {"step": rest[-1] + 1}
        session.trainer.refresh.return_value = {}
        type(session).interrupted = property(lambda self: self.record.call_count == interrupted_after)  # noqa: B023
        assert train(session).step == steps
        assert told == adapted
        assert [call.args[0] for call in session.publish.call_args_list] == list(range(1, steps + 1))
        assert [call.args[0] for call in session.record.call_args_list] == list(range(1, steps + 1))
