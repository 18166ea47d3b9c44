"""`rlft report` opened in a real Chromium: what it shows, what its filters and colours do, and that nothing runs in it.

Screenshots for looking at are left in build/screenshots.
"""

import itertools
import json
import os
import random
import re
import time
from pathlib import Path

import pytest
from audited_runs import lines_of, write
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from rlft import cli
from rlft.commands.watch import report as report_command
from rlft.commands.watch.report_completions import MAX_TEXT, safe
from rlft.runs.lines import encode

pytestmark = pytest.mark.slow

SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"


class Page:
    """A report in the browser."""

    def __init__(self, driver, file):
        self.driver = driver
        driver.get(file.resolve().as_uri())
        deadline = time.monotonic() + 30
        while driver.execute_script("return document.documentElement.dataset.ready") != "true":
            assert time.monotonic() < deadline, driver.get_log("browser")
            time.sleep(0.02)

    def find(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def select(self, name, value):
        Select(self.find(f"#{name}")).select_by_value(value)

    def press(self, keys):
        self.find("body").send_keys(keys)

    def texts(self, selector):
        return [str(e.get_property("textContent")) for e in self.all(selector)]

    def pixels(self, *colour):
        """How many of the first chart have this colour; edges, which are mixed with another, are left out."""
        return self.driver.execute_script(
            "const c = document.querySelector('.chart canvas'), near = (x, y) => Math.abs(x - y) < 3;"
            "const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', {willReadFrequently: true});"
            "copy.drawImage(c, 0, 0);"
            "const [r, g, b] = arguments, d = copy.getImageData(0, 0, c.width, c.height).data;"
            "let n = 0; for (let i = 0; i < d.length; i += 4)"
            "  n += d[i + 3] > 0 && near(d[i], r) && near(d[i + 1], g) && near(d[i + 2], b); return n",
            *colour,
        )

    def colours(self, inside="#runs"):
        """Of the marks of runs, in turn."""
        return [mark.value_of_css_property("background-color") for mark in self.all(f"{inside} .swatch")]

    def shot(self, name):
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))


@pytest.fixture
def opened(driver, tmp_path):
    """Opens the report of these runs; afterwards the console must be empty."""
    driver.get_log("browser")
    yield lambda *runs: Page(driver, report_command.report([*map(str, runs), f"out={tmp_path / 'report.html'}"]))
    assert driver.get_log("browser") == []


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory):
    """A real run of eleven steps whose tokens are kept every two steps."""
    folder = tmp_path_factory.mktemp("looked_at") / "run"
    words = ["+recipe=grpo_arithmetic", "steps=11", "prompts_per_step=4", "group_size=4", "token_values.every=2"]
    words += ["generation=transformers", "generation.max_tokens=24", "model.device=cpu", "data.size=8", "eval.every=2"]
    words += ["eval.num_prompts=4", "scoring.workers=0", "console=null", "alarms.length_growth=0.1"]
    assert cli.run(["train", *words, f"hydra.run.dir={folder}"]) == 0
    return folder


# -- curves ------------------------------------------------------------------------------------------------------------
def test_curves_are_drawn_smoothed_and_changed(opened, looked_at):
    page = opened(looked_at)
    titles = page.texts(".chart h3")
    for title in ("reward and held-out accuracy", "entropy, nats per token", "seconds by stage"):
        assert title in titles
    assert "accuracy" in "".join(page.texts(".chart:first-child .u-label"))
    assert page.pixels(47, 129, 247) > 100, "the first curve's own colour"
    stages = page.texts("[data-chart='seconds by stage'] .u-label")
    between = ["seal", "log", "evaluate"]
    stages_of_a_step = ["publish", "update", "inspect", "credit", "score", "sample"]
    assert stages[1:] == ["rest", *between, *stages_of_a_step], "from the top down"
    before = len(titles)
    page.select("metric", "tokens/completion")
    assert page.texts(".chart h3") == ["tokens/completion", *titles]
    assert len(page.all(".chart")) == before + 1
    page.driver.execute_script(
        "const s = document.getElementById('smoothing'); s.value = 9; s.dispatchEvent(new Event('input'))"
    )
    assert page.find("#smoothed").text == "9 steps"
    page.shot("curves")
    page.press("t")
    page.shot("curves_dark")


def test_seeds_are_a_band_that_can_be_taken_apart(opened, make_run):
    page = opened(*(make_run(f"s{i}", seed=i, steps=60) for i in range(3)), make_run("other", lr=0.5, steps=60))
    band, label = page.find("#band"), "[data-chart='reward and held-out accuracy'] .u-label"
    assert band.is_displayed()
    assert "trainer.lr=0.01, mean of 3 seeds: reward/mean" in page.texts(label)
    assert len(set(page.colours())) == 2, "a band's seeds have its colour"
    page.shot("seeds")
    band.click()
    apart = page.texts(label)
    assert "trainer.lr=0.01, mean of 3 seeds: reward/mean" not in apart
    assert {f"trainer.lr=0.01, seed={i}: reward/mean" for i in range(3)} | {
        "trainer.lr=0.5, seed=0: reward/mean"
    } <= set(apart)
    assert len(set(page.colours())) == 4
    page.press("2")
    assert "steps on disk are shown, chosen evenly" in page.find("#sampling").text
    page.select("step", "1")
    listed = {text.partition(", step")[0] for text in page.texts("#groups .hint")}
    assert listed == {*(f"trainer.lr=0.01, seed={i}" for i in range(3)), "trainer.lr=0.5, seed=0"}
    assert set(page.colours("#groups")) == set(page.colours()), "a run has one colour everywhere"
    page.press("4")
    assert page.texts("#config table:first-of-type tr:nth-child(4) td") == ["trainer.lr", "0.01", "0.01", "0.01", "0.5"]


def facts_of(page):
    return dict(zip(page.texts("#facts dt"), page.texts("#facts dd"), strict=True))


def test_the_header_says_what_was_run_and_how_it_is_run_again(opened, make_run):
    run, other = make_run("run", steps=40), make_run("b", lr=0.5, steps=20)
    (run / "chain.jsonl").write_bytes(
        encode({"step": 0, "machine": {"processor": "P", "device": "cpu", "threads": "1"}})
    )
    page = opened(run)
    facts = facts_of(page)
    expected = {"model": "embedded:tiny-arithmetic, LoRA rank 16", "data": "arithmetic", "algorithm": "grpo"}
    expected |= {"rewards": "exact_match x 1.0, format x 0.2", "machine": "P, cpu, 1 thread", "step": "40 / 40"}
    assert expected.items() <= facts.items()
    changed = page.texts("#facts .chip")
    assert {"trainer.lr=0.01", "steps=40", "prompts_per_step=32"} <= set(changed)
    assert not [text for text in changed if text.startswith(("name=", "group_size="))], "a default is not changed"
    assert {"rlft", "train", "name=made", "trainer.lr=0.01"} <= set(facts["command"].removesuffix("copy").split())
    assert page.texts("#samples td")[:3] == ["held?answer: 7", "rightit was 0 of it is 7", "rightit was 40 of it is 7"]
    page = opened(run, other)
    assert {"run", "step", "reward"} <= set(page.texts("#runs th"))
    assert not {"model", "algorithm"} & set(page.texts("#runs th")), "columns are what differs"
    assert facts_of(page)["algorithm"] == "grpo"
    assert len([text for text in page.texts("details code") if text.startswith("rlft train")]) == 2


def test_constant_charts_are_folded_into_a_line_and_a_loss_of_zero_is_explained(opened, make_run):
    run = make_run("run", steps=4)
    file = run / "metrics.jsonl"
    lines = lines_of(file)

    def shown(loss, **config):
        numbers = {"kl/reference": 0.0, "ratio/clip_low_fraction": 0.25, "ratio/clip_high_fraction": 0.0}
        rows = [
            line | numbers | {"loss/total": loss * (-1) ** i, "policy/grad_norm": 1.0 + i}
            for i, line in enumerate(lines)
        ]
        write(file, rows)
        text = (run / "config.yaml").read_text()
        for key, value in config.items():
            text = re.sub(rf"^{key}: .*$", f"{key}: {value}", text, flags=re.MULTILINE)
        (run / "config.yaml").write_text(text)
        page = opened(run)
        folded = page.texts("#constant p:last-child")[0]
        titles = page.texts(".chart h3")
        page.find("#unfold").click()
        assert len(page.texts(".chart h3")) > len(titles)
        page.find("#unfold").click()
        assert page.texts(".chart h3") == titles
        return titles, folded, bool(page.all("#zero-loss"))

    titles, folded, explained = shown(1e-8)
    assert not {"loss", "KL, nats per token", "clipped tokens, share", "peak memory, bytes"} & set(titles)
    assert "loss: 0 (loss/total); KL, nats per token: 0 (kl/reference)" in folded
    assert "clipped tokens, share: ratio/clip_high_fraction 0, ratio/clip_low_fraction 0.25" in folded
    assert explained
    titles, _, explained = shown(0.5)
    assert "loss" in titles
    assert not explained
    assert not shown(1e-8, minibatches="2")[2], "with several updates a loss of 0 has another reason"


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_window_or_cut(width, opened, make_run):
    page = opened(make_run("a_run_with_a_long_name", steps=40), make_run("b", lr=0.5, steps=40, marks={5: "kl"}))
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        page.driver.execute_script("redraw()")
        for part in ("1", "2", "3", "4"):
            page.press(part)
            for shade in ("light", "dark"):
                page.press("t")
                page.driver.execute_script("redraw()")
                sizes = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
                content, window = page.driver.execute_script(sizes)
                assert content <= window, (part, shade)
                wide = "return [...document.querySelectorAll('table')].filter((t) => t.scrollWidth > t.clientWidth + 1)"
                assert width == 1400 or page.driver.execute_script(wide) == [], "no table is cut"
                page.shot(f"{width}_{part}_{page.find('html').get_attribute('data-theme')}")
            cut = page.driver.execute_script(
                "return [...document.querySelectorAll('h1, h2, h3, th, nav button')]"
                ".filter((e) => e.offsetParent && e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"
            )
            assert cut == [], part
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_trials_of_a_sweep_have_a_part_of_their_own(opened, make_run):
    sweep = make_run("alone").parent
    page = opened(sweep)
    assert not page.find("#tab-trials").is_displayed(), "a folder without a table has none"
    (sweep / "sweep.csv").write_text("trial,state,accuracy\n1,complete,0.5\n0,<b>pruned</b>,0.25\n")
    page = opened(sweep)
    page.press("5")
    assert page.texts("#trials th") == ["trial", "state", "accuracy"]
    assert page.texts("#trials td") == ["1", "complete", "0.5", "0", "<b>pruned</b>", "0.25"]


def test_alarms_stand_at_their_steps_with_their_words(opened, looked_at):
    page = opened(looked_at)
    told = [json.loads(line) for line in (looked_at / "alarms.jsonl").read_text().splitlines()]
    page.press("3")
    assert page.texts("#alarms dt") == [f"step {alarm['step']}: {alarm['name']}" for alarm in told]
    assert page.texts("#alarms dd") == [alarm["text"] for alarm in told]
    assert told
    page.shot("alarms")


def test_an_alarm_is_a_line_in_every_curve(opened, make_run):
    orange = (179, 89, 0)
    assert opened(make_run("quiet", steps=9)).pixels(*orange) == 0
    page = opened(make_run("loud", steps=9, marks={5: "kl"}))
    assert page.pixels(*orange) > 50
    page.press("t")
    assert page.pixels(*orange) == 0, "in the dark it has another colour"
    assert page.pixels(255, 180, 84) > 50


def test_numbers_are_written_as_they_are(opened, make_run):
    run = make_run("run", steps=4)
    file = run / "metrics.jsonl"
    lines = lines_of(file)
    lengths = [1200.3, 1100.4, 1000.2, 999.96]
    rows = [line | {"length/mean": n, "reward/mean": 1230.4} for line, n in zip(lines, lengths, strict=True)]
    write(file, rows)
    page = opened(run)
    assert facts_of(page)["reward"] == "1,230"
    told = page.driver.execute_script("return [1200.3, 999.96, 0.5, 0, 12, 1e-5, 110.2, null].map((n) => shown(n))")
    assert told == ["1,200", "1,000", "0.5", "0", "12", "1.00e-5", "110.2", "-"]
    ticks = page.driver.execute_script(
        "return [[110.2, 0.2], [100.4, 0.2], [1001.5, 0.5], [1200, 50], [0.25, 0.05], [2e6, 5e5], [-1e-7, 5e-8],"
        "[0, 1]].map(([tick, step]) => tickText(tick, step))"
    )
    assert ticks == ["110.2", "100.4", "1,001.5", "1,200", "0.25", "2M", "-1.0e-7", "0"]


@pytest.mark.parametrize(("command", "words"), [
    ("sft", ["demonstrations.path=embedded:arithmetic-demonstrations", "examples_per_step=4"]),
    ("rm", ["preferences.path=embedded:arithmetic-preferences", "rankings_per_step=4"]),
])  # fmt: skip
def test_runs_of_other_commands_are_drawn_too(command, words, opened, tmp_path):
    common = ["max_completion_tokens=64", "steps=3", "eval.every=3", "lora.rank=2", "model.device=cpu", "console=null"]
    assert cli.run([command, *words, *common, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    page = opened(tmp_path / "run")
    titles = page.texts(".chart h3")
    assert {"loss", "seconds by stage"} <= set(titles)
    assert ("reward and held-out accuracy" in titles) == (command == "rm"), "of rankings: pairs that are ranked right"
    page.press("2")
    assert page.texts("#groups li") == ["no such completion"]
    page.select("filter", "best")


def test_a_run_with_one_step_and_broken_numbers_is_drawn(opened, make_run):
    run = make_run("run", steps=1, tokens_in=0)
    file = run / "rollouts" / "step_000001.jsonl"
    rows = lines_of(file)
    for row in rows:
        row["reward"] = None
        row["rewards"] = dict.fromkeys(row["rewards"])
        if "tokens" in row:
            row["tokens"]["old"], row["logprobs"] = [None], [None]
    write(file, rows)
    page = opened(run)
    page.press("2")
    for mode in ("logprob", "ratio", "kl", "entropy", "advantage", "mismatch"):
        page.select("colour", mode)
    for name in ("varied", "zero", "format"):
        page.select("filter", name)
        assert page.texts("#groups li") == ["no such completion"]


# -- completions -------------------------------------------------------------------------------------------------------
def rows_of(run):
    return [line for file in sorted((run / "rollouts").iterdir()) for line in lines_of(file)]


def test_filters_leave_the_groups_they_name(opened, looked_at):
    page = opened(looked_at)
    page.press("2")
    groups = {}
    for row in rows_of(looked_at):
        groups.setdefault((row["step"], row["prompt_id"]), []).append(row)
    rewards = [[row["reward"] for row in group] for group in groups.values()]

    def listed(name):
        page.select("filter", name)
        found = page.texts("#groups li")
        return 0 if found == ["no such completion"] else len(found)

    assert listed("zero") == sum(max(r) == min(r) for r in rewards)
    assert listed("varied") == sum(max(r) > min(r) for r in rewards)
    assert listed("truncated") == sum(any(r["finish_reason"] == "length" for r in g) for g in groups.values()) + sum(
        example["finish_reason"] == "length"
        for line in lines_of(looked_at / "eval.jsonl")
        for example in line["examples"]
    )
    assert listed("format") == sum(any(r["rewards"]["format"] <= 0 for r in g) for g in groups.values())
    assert listed("tokens") == sum("tokens" in g[0] for g in groups.values()) == 10, "two groups at five steps"
    listed("best")
    assert page.find(".card .total").text == f"reward {max(max(r) for r in [*rewards, [1.0]]):g}"
    listed("worst")
    assert min(min(r) for r in rewards) <= 0
    assert "reward 0" in page.texts(".card .total")
    listed("all")
    page.select("step", "3")
    assert len(page.all("#groups li")) == sum(step == 3 for step, _ in groups)


def test_tokens_are_coloured_by_what_is_chosen(opened, looked_at):
    page = opened(looked_at)
    page.press("2")
    page.select("filter", "tokens")
    assert page.all(".token") == []
    seen = {}
    for mode in ("logprob", "ratio", "kl", "entropy", "advantage", "mismatch"):
        page.select("colour", mode)
        seen[mode] = [token.value_of_css_property("background-color") for token in page.all(".token")]
        assert page.find("#legend").text
        page.shot(f"tokens_{mode}")
    kept = [row for row in rows_of(looked_at) if "tokens" in row]
    first = next(row for row in kept if row["step"] == 2)
    card = page.texts(".card .token")[: len(first["tokens"]["text"])]
    assert card == first["tokens"]["text"]
    # the weakest log-prob has the strongest colour: an opacity of 0.75 at 5 nats, which browsers keep in a byte
    old = first["tokens"]["old"]
    place = min(range(len(old)), key=lambda i: old[i])
    colour, _, opacity = seen["logprob"][place].rpartition(", ")
    assert colour == "rgba(210, 120, 20"
    assert float(opacity.rstrip(")")) == pytest.approx(0.75 * min(1, -old[place] / 5), abs=1 / 255)
    advantages = first["tokens"]["advantage"]
    assert ("46, 160, 67" in seen["advantage"][0]) == (advantages[0] >= 0)
    assert len({tuple(colours) for colours in seen.values()}) == len(seen)
    assert "ratio" in str(page.find(".token").get_attribute("title"))


def test_the_same_prompt_at_two_steps_shows_what_changed(opened, make_run):
    page = opened(make_run("run", steps=5, completion="seven"))
    page.press("2")
    page.select("filter", "held")
    page.press("d")
    assert page.texts(".card .text") == ["it was 0 of seven", "it was 5 of seven"]
    assert (page.texts("del"), page.texts("ins")) == (["0"], ["5"])
    page.shot("beside")


def test_search_marks_what_it_finds_and_keys_lead_through(opened, looked_at):
    page = opened(looked_at)
    page.press("2")
    everything = len(page.all("#groups li"))
    wanted = rows_of(looked_at)[0]["prompt"][-1]["content"]
    page.press("/")
    page.driver.switch_to.active_element.send_keys(wanted[-8:])
    found = page.all("#groups li")
    assert 0 < len(found) < everything
    assert page.texts("mark")[0] == wanted[-8:]
    page.driver.switch_to.active_element.send_keys(Keys.CONTROL, "a")
    page.driver.switch_to.active_element.send_keys(Keys.DELETE)
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert len(page.all("#groups li")) == everything
    page.press("j")
    at = [item.get_attribute("aria-current") for item in page.all("#groups li")].index("true")
    page.press("j")
    page.press("k")
    assert [item.get_attribute("aria-current") for item in page.all("#groups li")].index("true") == at > 0
    page.press("c")
    assert Select(page.find("#colour")).first_selected_option.get_attribute("value") == "logprob"
    page.press("n")
    assert Select(page.find("#step")).first_selected_option.text == "0"
    theme = page.find("html").get_attribute("data-theme")
    page.press("t")
    assert page.find("html").get_attribute("data-theme") != theme
    page.press("?")
    assert page.find("#help").is_displayed()
    page.find("#help button").click()
    assert not page.find("#help").is_displayed()


# -- hostile text ------------------------------------------------------------------------------------------------------
def test_nothing_that_a_model_writes_runs(hostile, opened, make_run):
    run = make_run("run", completion=hostile, tokens_in=0)
    page = opened(run)
    title = page.driver.title
    page.press("2")
    page.select("colour", "logprob")
    body = page.texts(".card .text")[0]
    assert body == safe(hostile)[: len(body)]
    assert len(body) >= min(len(hostile), MAX_TEXT)
    assert all(char.isprintable() or char == "\n" for char in body)
    for part in ("#group a", "#group img", "#group svg", "#group iframe", "#group script"):
        assert page.all(part) == [], part
    assert len(page.all("script")) == 4, "the data, and three of the page's own"
    assert page.driver.title == title
    page.select("colour", "none")
    page.select("filter", "held")
    page.press("d")
    assert page.driver.title == title
    width = page.driver.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert width <= 0, "nothing is wider than the window"


def test_a_prompts_id_and_a_rewards_name_are_text_too(opened, make_run):
    run = make_run("run", steps=1)
    file = run / "rollouts" / "step_000001.jsonl"
    rows = lines_of(file)
    bad = "<img src=x onerror=document.title=1>"
    file.write_bytes(b"".join(encode(row | {"prompt_id": bad, "rewards": {bad: 1.0}, "answer": bad}) for row in rows))
    page = opened(run)
    page.press("2")
    assert page.all("#group img") == []
    assert bad in str(page.find("#group").get_property("textContent"))


def test_a_run_of_1000_steps_of_512_completions_is_small_and_usable(driver, make_run):
    """Its rollout files are links to those of 16 steps: what is read of a step goes by its file's name."""
    letters = random.Random(0)
    run = make_run("run", steps=1000, groups=1)
    for number in range(16):
        lines = []
        for group, index in itertools.product(range(64), range(8)):
            text = " ".join("".join(letters.choices("abcdefghijklmnop", k=6)) for _ in range(200))
            question = [{"role": "user", "content": f"question {number} {group}"}]
            line = {"step": number, "prompt_id": f"p{number}.{group}", "index": index, "answer": "7"}
            line |= {"prompt": question, "completion": text, "token_ids": [1] * 400, "logprobs": [-0.5] * 400}
            line |= {"rewards": {"exact_match": 1.0}, "reward": 1.0, "advantage": 0.0, "policy_version": number}
            lines.append(line | {"finish_reason": "stop"})
        write(run / "rollouts" / f"of_{number}", lines)
    for step in range(1, 1001):
        file = run / "rollouts" / f"step_{step:06d}.jsonl"
        file.unlink()
        os.link(run / "rollouts" / f"of_{step % 16}", file)
    report = report_command.report([str(run)])
    assert 2_000_000 < report.stat().st_size <= 10_000_000
    driver.get_log("browser")
    page = Page(driver, report)
    page.press("2")
    page.press("j")
    told = "of the 1,000 steps on disk are shown, chosen evenly (at most 16 groups of a step)"
    assert told in page.find("#sampling").text
    assert len(page.all("#groups li")) > 100
    assert driver.get_log("browser") == []


def test_the_pictures_of_the_first_page_are_drawn(looked_at, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCREENSHOTS.parents[1] / "scripts"))
    import report_figures

    monkeypatch.setattr(report_figures, "DOCS", tmp_path)
    report_figures.draw(report_command.report([str(looked_at), f"out={tmp_path / 'report.html'}"]))
    for name in ("report_curves.png", "report_tokens.png"):
        assert (tmp_path / name).stat().st_size > 20_000


# -- images ------------------------------------------------------------------------------------------------------------
def test_images_of_prompts_are_drawn_and_those_that_are_missing_are_named(opened, tmp_path):
    folder = tmp_path / "run"
    words = ["+recipe=grpo_shapes", "steps=1", "prompts_per_step=2", "group_size=2", "data.size=8", "console=null"]
    words += ["data.held_out_size=4", "eval.num_prompts=2", "model.device=cpu", "scoring.workers=0"]
    assert cli.run(["train", *words, f"hydra.run.dir={folder}"]) == 0
    page = opened(folder)
    page.press("2")
    [image] = page.all("#group .images img")
    size = page.driver.execute_script("return [arguments[0].naturalWidth, arguments[0].naturalHeight]", image)
    assert size == [48, 48]
    assert image.is_displayed()
    page.shot("images")
    file = folder / "rollouts" / "step_000001.jsonl"
    lines = lines_of(file)
    file.write_bytes(b"".join(encode({**line, "images": ["gone"]}) for line in lines))
    page = opened(folder)
    assert page.texts("#group .images") == ["image gone is not in this page"]
