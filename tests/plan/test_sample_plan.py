"""The plan of a run that samples alone."""

from plans import counted, planned


def test_a_run_that_samples_alone_has_a_tower():
    words = ("model.path=embedded:tiny-shapes", "data=shapes", "data.size=40", "data.held_out_size=8")
    plan = planned(*words, "generation=transformers", command="sample")
    assert counted(plan)[1].tower == plan.tower
    assert plan.tower.vectors == 9 * 48 * 4


def test_only_samples_that_stay_are_counted():
    sampling = ["n=4", "num_prompts=3", "data.size=16", "token_budget=512"]
    four, alone = (
        planned(*sampling, *more, command="sample").disk_bytes()["samples"] for more in ([], ["max_per_prompt=1"])
    )
    assert alone == four // 4
