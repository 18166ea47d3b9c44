"use strict";
// The page of `rlft report`. What models and users have written comes to the page as text nodes only, never as markup.

const COLOURS = ["#2f81f7", "#e8590c", "#2f9e44", "#ae3ec9", "#e03131", "#0c8599", "#f08c00", "#6741d9", "#66a80f", "#c2255c"];
const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3]];
const MANY = 300; // groups that are listed before "more" is asked for

const shown = (value, digits = 3) => {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3 ? value.toExponential(2) : Number(value.toPrecision(digits + 1)).toLocaleString("en", { maximumFractionDigits: 9 });
};
/** What an axis says at ticks that lie `step` apart. */
const tickText = (tick, step) => {
  if (tick === 0) return "0";
  const large = Math.abs(tick), digits = Math.max(0, Math.floor(Math.log10(large) + 1e-9) - Math.floor(Math.log10(step) + 1e-9));
  if (step < 1e-4) return tick.toExponential(Math.min(digits, 4));
  if (large >= 1e6) return tick.toLocaleString("en", { notation: "compact", maximumSignificantDigits: digits + 1 });
  return tick.toLocaleString("en", { maximumFractionDigits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) });
};
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

async function unpacked() {
  const bytes = Uint8Array.from(atob(by("data").textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

// -- runs -------------------------------------------------------------------------------------------------------------
const last = (values) => (values || []).findLast((value) => value !== null);
const first = (values) => (values || []).find((value) => value !== null);
/** A run's colour in the table, the charts and the list of completions; seeds that are drawn as a band share theirs. */
const colourOf = (run) => {
  const seeds = curves.band && curves.report ? curves.report.seeds.find((runs) => runs.includes(run)) : undefined;
  return COLOURS[(seeds ? seeds[0] : run) % COLOURS.length];
};
const swatch = (run) => {
  const made = element("span", { className: "swatch" });
  made.style.background = colourOf(run);
  return made;
};
const labelOf = (run) => curves.report.runs[run].label;

const duration = (seconds) => (seconds < 100 ? `${seconds.toFixed(0)} s` : seconds < 6000 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`);

/** A table; on a narrow screen each row is a block, whose cells have the column's name before them. */
function tableOf(heads, rows, properties = {}) {
  const made = element("table", { className: "wide", ...properties }, element("tr", {}, ...heads.map((name) => element("th", { textContent: name }))));
  for (const cells of rows) {
    const row = element("tr", {}, ...cells.map((cell) => (cell instanceof Node ? cell : element("td", { textContent: cell }))));
    [...row.children].forEach((cell, i) => { cell.dataset.name = heads[i] ?? ""; });
    made.append(row);
  }
  return made;
}

const NUMBERS = ["step", "reward", "accuracy", "time", "peak memory"];
const ends = (values) => (first(values) === last(values) ? shown(last(values)) : `${shown(first(values))} to ${shown(last(values))}`);
const changedOf = (run) => Object.entries(run.changed ?? {}).filter(([key]) => key !== "name").map(([key, [value]]) => `${key}=${value}`);

/** {what: its text} of a run, without what it does not have. */
function factsOf(run) {
  const { config, choices } = run, data = ["demonstrations", "preferences", "data"].find((section) => config[`${section}._target_`]);
  const rewards = Object.keys(config).map((key) => /^reward\.(.+)\.weight$/.exec(key)?.[1]).filter(Boolean);
  const path = config[`${data}.path`];
  const { processor, device, threads } = run.machine;
  const facts = {
    model: config["model.path"] && `${config["model.path"]}, ${config["lora.rank"] ? `LoRA rank ${config["lora.rank"]}` : "all weights"}`,
    data: data && [choices[data] || config[`${data}._target_`], path].filter(Boolean).join(": "),
    algorithm: choices.algorithm || choices.loss || config["algorithm._target_"],
    rewards: rewards.map((name) => `${name} x ${config[`reward.${name}.weight`]}`).join(", "),
    status: run.status + (run.reason ? `: ${run.reason}` : ""),
    step: `${run.step}${run.planned ? ` / ${run.planned}` : ""}`,
    reward: run.metrics["reward/mean"] && ends(run.metrics["reward/mean"]),
    accuracy: run.evaluations.accuracy && ends(run.evaluations.accuracy),
    time: duration(run.seconds),
    "peak memory": `${(run.peak / 1e9).toFixed(2)} GB`,
    machine: [processor, device, threads && `${threads} thread${threads === "1" ? "" : "s"}`].filter(Boolean).join(", "),
    commit: config["origin.commit"],
  };
  return Object.fromEntries(Object.entries(facts).filter(([, text]) => text));
}

/** The command that repeats a run, with a button that copies it. */
function commandOf(run) {
  if (!run.repeat) return [element("span", { className: "hint", textContent: "no command repeats it: it has keys or classes that rlft alone does not have" })];
  const code = element("code", { textContent: run.repeat }), button = element("button", { className: "copy", textContent: "copy" });
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(code); // stays for Ctrl-C where a browser refuses
    await navigator.clipboard?.writeText(run.repeat).then(() => { button.textContent = "copied"; }, () => {});
  });
  return [code, button];
}

const chips = (texts, run) => texts.map((text) => element("code", { className: "chip", textContent: text, title: `default: ${run.changed[text.split("=")[0]][1]}` }));

/** The facts of the runs: those that all have, as a list, and those that differ, as columns of a table. */
function drawRuns(report) {
  const facts = report.runs.map(factsOf), several = report.runs.length > 1;
  const names = [...new Set(facts.flatMap(Object.keys))];
  const columns = several ? names.filter((name) => facts.some((own) => own[name] !== facts[0][name])) : [];
  const list = element("dl", { id: "facts" });
  const add = (name, ...parts) => list.append(element("dt", { textContent: name }), element("dd", {}, ...parts));
  if (!several) add("run", report.runs[0].name);
  for (const name of names.filter((one) => !columns.includes(one))) add(name, facts[0][name]);
  const changed = report.runs.map(changedOf), shared = (changed[0] ?? []).filter((text) => changed.every((own) => own.includes(text)));
  if (shared.length) add("changed keys", ...chips(shared, report.runs[0]));
  if (!several) add("command", ...commandOf(report.runs[0]));
  const rows = report.runs.map((run, i) => [
    element("td", {}, swatch(i), run.label, ...(run.name.endsWith(run.label) ? [] : [element("div", { className: "hint", textContent: run.name })])),
    ...columns.map((name) => element("td", { textContent: facts[i][name] ?? "-", className: NUMBERS.includes(name) ? "number" : "" })),
  ]);
  const again = element("details", {}, element("summary", { textContent: "commands that repeat these runs" }), ...report.runs.map((run) => element("p", {}, element("div", { textContent: run.label }), ...commandOf(run))));
  const pairs = report.runs.map((run) => samplesOf(run));
  const samples = pairs.flatMap((rows_, i) => (!rows_ ? [] : several ? [element("details", {}, element("summary", { textContent: `before and after: ${report.runs[i].label}` }), rows_)] : [rows_]));
  by("about").className = several ? "" : "two";
  by("about").replaceChildren(
    element("div", {}, list, ...(several ? [tableOf(["run", ...columns], rows, { id: "runs" }), again] : [])),
    ...(samples.length ? [element("div", { id: "samples" }, ...samples)] : []),
  );
}

const SAMPLES = 3, SAMPLE_TEXT = 600;
/** The same prompts at the first and the last evaluation, else the first and the last step, side by side; null without any. */
function samplesOf(run) {
  for (const kind of ["held out", "trained on"]) {
    const groups = run.completions.groups.filter((group) => group.kind === kind).sort((a, b) => a.step - b.step);
    const found = [...new Set(groups.map((group) => group.id))].map((id) => groups.filter((group) => group.id === id)).map((same) => [same[0], same.at(-1)]);
    const widest = Math.max(...found.map(([old, now]) => now.step - old.step));
    const pairs = found.filter(([old, now]) => now.step > old.step && now.step - old.step === widest).slice(0, SAMPLES);
    if (!pairs.length) continue;
    const said = ({ rows: [row] }) => {
      const [mark, name] = row.reward === null ? ["", ""] : row.reward >= 1 ? ["right", "right"] : row.reward <= 0 ? ["wrong", "wrong"] : [`reward ${shown(row.reward)}`, ""];
      return element("td", {}, element("div", { className: name, textContent: mark }), element("div", { className: "text", textContent: row.text.slice(0, SAMPLE_TEXT) + (row.text.length > SAMPLE_TEXT ? ".." : "") }));
    };
    const heads = ["prompt", `before (step ${pairs[0][0].step})`, `after (step ${pairs[0][1].step})`];
    const asked = (group) => element("td", {}, element("div", { className: "text", textContent: (group.prompt.at(-1)?.text ?? "").slice(0, SAMPLE_TEXT) }), element("div", { className: "hint", textContent: `answer: ${group.answer.text.slice(0, 80)}` }));
    return tableOf(heads, pairs.map(([old, now]) => [asked(now), said(old), said(now)]), { className: "wide samples" });
  }
  return null;
}

// -- curves -----------------------------------------------------------------------------------------------------------
const CHARTS = [
  { title: "reward and held-out accuracy", metrics: ["reward/mean"], evaluations: ["accuracy"], evaluated: /^eval\/maj@\d+$/ },
  { title: "loss", metrics: ["loss/total", "loss/value"], evaluations: ["eval/loss"] },
  { title: "single rewards", pattern: /^reward\/(?!mean$|std$)/ },
  { title: "KL, nats per token", metrics: ["kl/reference", "kl/old"], evaluations: ["eval/kl_base"] },
  { title: "entropy, nats per token", metrics: ["policy/entropy"] },
  { title: "length of completions, tokens", metrics: ["length/mean"] },
  { title: "truncated completions, share", metrics: ["length/truncated_fraction"] },
  { title: "clipped tokens, share", pattern: /^ratio\/.*fraction$/ },
  { title: "ratio to old", pattern: /^ratio\/(?!.*fraction$)/ },
  { title: "waste, share", pattern: /^waste\// },
  { title: "engine against trainer, nats", pattern: /^sampler\// },
  { title: "gradient norm", pattern: /\/grad_norm$/ },
  { title: "learning rate", pattern: /\/lr$/ },
  { title: "peak memory, bytes", metrics: ["memory/peak_bytes"] },
];

const STAGES = ["sample", "score", "credit", "inspect", "update", "publish"].map((stage) => `time/${stage}`);
const WHOLE = ["time/step"];
const OUTSIDE_ONCE = [...WHOLE, "time/evaluate", "time/checkpoint", "time/log"]; // no part of it in runs without time/seal

const charts = [];
let curves = { report: null, smoothing: 1, band: true, unfolded: false };

function drawCurves(report) {
  curves.report = report;
  const names = [...new Set(report.runs.flatMap((run) => [...Object.keys(run.metrics), ...Object.keys(run.evaluations)]))].sort();
  by("metric").replaceChildren(element("option", { value: "", textContent: "choose" }), ...names.map((name) => element("option", { value: name, textContent: name })));
  by("band-label").hidden = report.seeds.length === 0;
  redraw();
}

function redraw() {
  charts.splice(0).forEach((chart) => chart.destroy());
  by("charts").replaceChildren();
  const chosen = by("metric").value;
  const wanted = chosen ? [{ title: chosen, metrics: [chosen], evaluations: [chosen] }, ...CHARTS] : CHARTS;
  const folded = wanted.map((chart) => drawChart(chart, chart === wanted[0] && chosen)).filter(Boolean);
  curves.report.runs.forEach(drawStages);
  drawFolded(folded);
}

const ROUNDING = 1e-6; // a float32 loss below it is 0
/** Whether a run's loss is 0 by construction: one update a step, at which the ratio is 1 and a group's advantages add up to 0. */
const isZeroLoss = (run) => {
  const loss = (run.metrics["loss/total"] ?? []).filter((value) => value !== null);
  return run.config.epochs === "1" && run.config.minibatches === "1" && loss.length > 0 && loss.every((value) => Math.abs(value) <= ROUNDING) && (run.metrics["policy/grad_norm"] ?? []).some((value) => value > 0);
};
const ZERO_LOSS = "The loss is 0 by construction (up to rounding, about 1e-8): with one update per step the ratio is 1, and the advantages of a group add up to 0. Its gradient is not 0, and the policy learns; watch the reward.";

/** {name: its only value} of the series of a chart, if each has one value at all steps and in all runs; else null. */
function constantOf(found) {
  const values = {};
  for (const one of found) {
    const own = one.values.filter((value) => value !== null);
    const same = own.every((value) => Math.abs(value) <= (one.name === "loss/total" ? ROUNDING : 0)) ? 0 : own[0];
    if (own.length < 2 || own.some((value) => value !== same && same !== 0) || (one.name in values && values[one.name] !== same)) return null;
    values[one.name] = same;
  }
  return values;
}

/** One line for the charts of numbers that never change, which a button unfolds, and why a loss is 0. */
function drawFolded(folded) {
  const parts = [], zero = curves.report.runs.some(isZeroLoss);
  if (zero) parts.push(element("p", { id: "zero-loss", textContent: ZERO_LOSS }));
  if (folded.length || curves.unfolded) {
    const button = element("button", { id: "unfold", textContent: curves.unfolded ? "fold constant charts" : "show them" });
    button.addEventListener("click", () => { curves.unfolded = !curves.unfolded; redraw(); });
    const line = element("p", {}, ...(folded.length ? [element("b", { textContent: "constant: " }), `${folded.join("; ")} `] : []), button);
    parts.push(line);
  }
  by("constant").replaceChildren(...parts);
}

/** The series of a chart: {label, run, values, points} on the axis of all steps. */
function seriesOf(chart, axis) {
  const { report, band } = curves;
  const places = new Map(axis.map((step, i) => [step, i]));
  const on = (steps, values) => {
    const row = new Array(axis.length).fill(null);
    steps.forEach((step, i) => { row[places.get(step)] = values[i]; });
    return row;
  };
  const found = [];
  report.runs.forEach((run, i) => {
    const names = chart.pattern ? Object.keys(run.metrics).filter((name) => chart.pattern.test(name)) : (chart.metrics || []).filter((name) => run.metrics[name]);
    names.forEach((name, place) => found.push({ name, run: i, dash: place, values: on(run.steps, run.metrics[name]), points: false }));
    for (const name of [...(chart.evaluations || []), ...Object.keys(run.evaluations).filter((name) => chart.evaluated?.test(name))]) {
      if (run.evaluations[name]) found.push({ name, run: i, dash: 1, values: on(run.evaluated, run.evaluations[name]), points: true });
    }
  });
  if (!band) return found;
  const kept = found.filter((one) => !report.seeds.some((runs) => runs.includes(one.run)));
  for (const runs of report.seeds) {
    for (const name of [...new Set(found.filter((one) => runs.includes(one.run)).map((one) => one.name))]) {
      const own = found.filter((one) => runs.includes(one.run) && one.name === name);
      const across = (reduce) => axis.map((_, i) => {
        const values = own.map((one) => one.values[i]).filter((value) => value !== null);
        return values.length ? reduce(values) : null;
      });
      kept.push({
        ...own[0], seeds: own.length, values: across(mean), low: across((v) => Math.min(...v)), high: across((v) => Math.max(...v)),
      });
    }
  }
  return kept;
}

/** A centred mean over `width` values, gaps left out. */
function smooth(values, width) {
  if (width <= 1) return values;
  const half = Math.floor(width / 2);
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((one) => one !== null);
    return mean(near);
  });
}

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The range of an axis: a little more than the values, and something to see where they are all the same. */
function spread(low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  const margin = 0.06 * (high - low);
  return [low >= 0 && low < 0.3 * (high - low) ? 0 : low - margin, high + margin];
}

function optionsOf(series, bands) {
  const axis = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line") } };
  const size = (values) => 20 + 7 * Math.max(...(values || [""]).map((text) => String(text).length));
  return {
    width: 430, height: 210, series, bands,
    cursor: { sync: { key: "rlft" } },
    scales: { y: { range: (u, low, high) => spread(low, high) }, x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } },
    axes: [{ ...axis, size: 32 }, { ...axis, size: (u, values) => size(values), values: (u, ticks, axisIndex, space, step) => ticks.map((tick) => tickText(tick, step)) }],
    hooks: { draw: [(u) => drawAlarms(u)] },
  };
}

function drawAlarms(u) {
  const context = u.ctx;
  context.save();
  context.strokeStyle = ink("--alarm");
  context.setLineDash([4, 4]);
  for (const run of curves.report.runs) {
    for (const alarm of run.alarms) {
      const x = Math.round(u.valToPos(alarm.step, "x", true));
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
      context.beginPath();
      context.moveTo(x, u.bbox.top);
      context.lineTo(x, u.bbox.top + u.bbox.height);
      context.stroke();
    }
  }
  context.restore();
}

function place(title, options, data) {
  const box = element("div", { className: "chart" }, element("h3", { textContent: title }));
  box.dataset.chart = title;
  by("charts").append(box);
  options.width = Math.max(300, box.clientWidth);
  charts.push(new uPlot(options, data, box));
}

/** Draws a chart, or returns what its constant numbers are. */
function drawChart(chart, isChosen) {
  const { report, smoothing } = curves;
  const axis = [...new Set(report.runs.flatMap((run) => [...run.steps, ...run.evaluated]))].sort((a, b) => a - b);
  const found = seriesOf(chart, axis);
  if (!found.length) return "";
  const constant = curves.unfolded || isChosen ? null : constantOf(found);
  if (constant) {
    const names = Object.keys(constant), same = names.every((name) => constant[name] === constant[names[0]]);
    return `${chart.title}: ${same ? `${shown(constant[names[0]])} (${names.join(", ")})` : names.map((name) => `${name} ${shown(constant[name])}`).join(", ")}`;
  }
  const series = [{ label: "step" }], data = [axis], bands = [];
  const many = found.filter((one) => !one.points).length;
  for (const one of found) {
    const colour = report.runs.length > 1 ? colourOf(one.run) : COLOURS[(found.indexOf(one)) % COLOURS.length];
    const own = report.runs[one.run];
    const of = one.seeds ? [own.setting, `mean of ${one.seeds} seeds`].filter(Boolean).join(", ") : own.label;
    const label = report.runs.length > 1 ? `${of}: ${one.name}` : one.name;
    const value = (u, number) => shown(number);
    if (one.low) {
      const edge = { class: "faint", stroke: "transparent", points: { show: false }, spanGaps: true, value, label: `${label}, most` };
      bands.push({ series: [series.length, series.length + 1], fill: `${colour}33` });
      series.push(edge, { ...edge, label: `${label}, least` });
      const width = one.points ? 1 : smoothing;
      data.push(smooth(one.high, width), smooth(one.low, width));
    } else if (smoothing > 1 && !one.points && many <= 4) {
      series.push({ class: "faint", label: `${label}, each step`, stroke: `${colour}44`, points: { show: false }, spanGaps: true, value });
      data.push(one.values);
    }
    series.push({
      label, stroke: colour, width: 1.6, spanGaps: true, value, dash: DASHES[one.dash % DASHES.length],
      points: { show: one.points, size: 6, fill: colour },
    });
    data.push(one.points ? one.values : smooth(one.values, smoothing));
  }
  place(chart.title, optionsOf(series, bands), data);
  return "";
}

/** Seconds of a run's step by stage, one on top of the other; what no stage has is the last. */
function drawStages(run) {
  const known = STAGES.filter((name) => run.metrics[name]);
  const others = [...known, ...(run.metrics["time/seal"] ? WHOLE : OUTSIDE_ONCE)];
  const names = [...known, ...Object.keys(run.metrics).filter((name) => name.startsWith("time/") && !others.includes(name))];
  if (!names.length) return;
  const whole = run.metrics["time/step"] || [];
  const stages = names.map((name) => ({ label: name.slice(5), values: run.metrics[name].map((value) => value || 0) }));
  stages.push({ label: "rest", values: whole.map((all, i) => Math.max(0, (all || 0) - stages.reduce((sum, one) => sum + one.values[i], 0))) });
  const sums = [];
  stages.forEach((stage, i) => sums.push(stage.values.map((value, step) => value + (i ? sums[i - 1][step] : 0))));
  const series = [{ label: "step" }], bands = [];
  for (let i = stages.length - 1; i >= 0; i--) {
    const colour = COLOURS[i % COLOURS.length];
    series.push({
      label: stages[i].label, stroke: colour, fill: i ? undefined : `${colour}55`, width: 1, points: { show: false },
      value: (u, _, seriesIndex, place) => (place === null || place === undefined ? "-" : `${shown(stages[i].values[place])} s`),
    });
    if (i) bands.push({ series: [series.length - 1, series.length], fill: `${colour}55` });
  }
  const title = curves.report.runs.length > 1 ? `seconds by stage: ${run.label}` : "seconds by stage";
  place(title, optionsOf(series, bands), [run.steps, ...sums.toReversed()]);
}

// -- alarms and config ------------------------------------------------------------------------------------------------
function drawAlarmList(report) {
  const box = by("alarms");
  const all = report.runs.flatMap((run) => run.alarms.map((alarm) => ({ ...alarm, run: run.name })));
  by("tab-alarms").textContent = `Alarms (${all.length})`;
  if (!all.length) return box.replaceChildren(element("p", { textContent: "No alarm was raised." }));
  const list = element("dl");
  for (const alarm of all) {
    const where = report.runs.length > 1 ? `${alarm.run}, ` : "";
    list.append(element("dt", { textContent: `${where}step ${alarm.step}: ${alarm.name}` }), element("dd", { textContent: alarm.text || "marked in the metrics; an older run kept no words" }));
  }
  return box.replaceChildren(list);
}

function drawConfig(report) {
  const box = by("config");
  const heads = report.runs.map((run) => run.label);
  const table = (rows) => tableOf(["key", ...heads], rows.map(([key, values]) => [element("td", { textContent: key, className: "key" }), ...values]));
  const names = [...new Set(report.runs.flatMap((run) => Object.keys(run.config)))];
  const parts = [];
  if (report.runs.length > 1) {
    parts.push(element("h2", { textContent: "differences" }), table(report.differences.map((row) => [row.key, row.values])));
  }
  const origin = names.filter((name) => name.startsWith("origin."));
  const rows = (some) => some.map((name) => [name, report.runs.map((run) => run.config[name] ?? "")]);
  parts.push(element("h2", { textContent: "environment and commit" }), table(rows(origin)));
  parts.push(element("h2", { textContent: "config" }), table(rows(names.filter((name) => !name.startsWith("origin.")))));
  box.replaceChildren(...parts);
}

// -- completions ------------------------------------------------------------------------------------------------------
const state = { groups: [], listed: [], at: 0, limit: MANY };

/** What a group is filtered and sorted by. */
function describe(group, run) {
  const rewards = group.rows.map((row) => row.reward).filter((reward) => reward !== null);
  const gaps = group.rows.flatMap((row) => (row.tokens ? row.tokens.old.map((_, i) => Math.abs(MODES.mismatch.value(row.tokens, i) ?? 0)) : []));
  const text = [...group.prompt.map((message) => message.text), group.answer.text, group.id, ...group.rows.map((row) => row.text)].join("\n").toLowerCase();
  return {
    ...group, run, text,
    mean: rewards.length ? mean(rewards) : null,
    best: Math.max(...rewards), worst: Math.min(...rewards),
    equal: rewards.length > 1 && Math.max(...rewards) === Math.min(...rewards),
    truncated: group.rows.some((row) => row.finish === "length"),
    format: group.rows.some((row) => Object.entries(row.rewards).some(([name, value]) => /format/.test(name) && value !== null && value <= 0)),
    tokens: group.rows.some((row) => row.tokens),
    gap: gaps.length ? gaps.reduce((a, b) => Math.max(a, b)) : null,
    several: rewards.length > 1,
  };
}

const FILTERS = {
  all: () => true,
  varied: (group) => group.several && !group.equal,
  zero: (group) => group.equal,
  truncated: (group) => group.truncated,
  format: (group) => group.format,
  best: (group) => group.mean !== null,
  worst: (group) => group.mean !== null,
  mismatch: (group) => group.gap !== null,
  tokens: (group) => group.tokens,
  held: (group) => group.kind === "held out",
};
const ORDERS = {
  best: (a, b) => b.best - a.best || b.mean - a.mean,
  worst: (a, b) => a.worst - b.worst || a.mean - b.mean,
  mismatch: (a, b) => b.gap - a.gap,
};

function drawCompletions(report) {
  state.groups = report.runs.flatMap((run, i) => run.completions.groups.map((group) => describe(group, i)));
  by("run").replaceChildren(element("option", { value: "", textContent: "all" }), ...report.runs.map((run, i) => element("option", { value: String(i), textContent: run.label })));
  by("run-label").hidden = report.runs.length < 2;
  const steps = [...new Set(state.groups.map((group) => group.step))].sort((a, b) => a - b);
  by("step").replaceChildren(element("option", { value: "", textContent: "all" }), ...steps.map((step) => element("option", { value: String(step), textContent: String(step) })));
  by("sampling").textContent = report.runs.map((run) => {
    const { steps: few, steps_on_disk: all, completions, groups } = run.completions;
    const held = groups.filter((group) => group.kind === "held out").length;
    const of = report.runs.length > 1 ? `${run.label}: ` : "";
    return `${of}${completions.toLocaleString("en")} completions of ${few} of the ${all.toLocaleString("en")} steps on disk are shown${few < all ? ", chosen evenly" : ""} (at most 16 groups of a step), and ${held} held-out ones of eval.jsonl; all are in rollouts/.`;
  }).join(" ");
  list();
}

/** Lists the groups that the filters leave; keeps the chosen one if it is still there. */
function list() {
  const run = by("run").value, step = by("step").value, filter = by("filter").value, search = by("search").value.trim().toLowerCase();
  const before = state.listed[state.at];
  state.listed = state.groups.filter((group) => (run === "" || group.run === Number(run)) && (step === "" || group.step === Number(step)) && FILTERS[filter](group) && (!search || group.text.includes(search)));
  if (ORDERS[filter]) state.listed.sort(ORDERS[filter]);
  state.limit = MANY;
  choose(Math.max(0, state.listed.indexOf(before)));
  drawList();
}

function drawList() {
  const items = state.listed.slice(0, state.limit).map((group, i) => {
    const asked = group.prompt.at(-1)?.text ?? "";
    const marks = [group.equal && "equal", group.truncated && "cut", group.tokens && "tokens"].filter(Boolean).join(", ");
    const item = element("li", {},
      element("div", { className: "one-line", textContent: asked.slice(0, 200) }),
      element("div", { className: "hint" }, ...(curves.report.runs.length > 1 ? [swatch(group.run), `${labelOf(group.run)}, `] : []), `step ${group.step}, ${group.kind}, reward ${shown(group.mean)}${marks ? `, ${marks}` : ""}`));
    item.addEventListener("click", () => choose(i));
    return item;
  });
  if (state.listed.length > state.limit) {
    const more = element("li", { className: "more", textContent: `${(state.listed.length - state.limit).toLocaleString("en")} more` });
    more.addEventListener("click", () => { state.limit += MANY; drawList(); });
    items.push(more);
  }
  if (!items.length) items.push(element("li", { textContent: "no such completion" }));
  by("groups").replaceChildren(...items);
  mark();
}

function mark() {
  [...by("groups").children].forEach((item, i) => item.setAttribute("aria-current", String(i === state.at && state.listed.length > 0)));
  by("groups").children[state.at]?.scrollIntoView({ block: "nearest" });
}

function choose(place) {
  state.at = Math.min(Math.max(0, place), Math.max(0, state.listed.length - 1));
  const group = state.listed[state.at];
  const others = group ? sameGroups(group).filter((other) => other !== group) : [];
  const before = by("beside").value;
  by("beside").replaceChildren(element("option", { value: "", textContent: others.length ? "nothing" : "no other step is shown" }), ...others.map((other) => element("option", { value: String(state.groups.indexOf(other)), textContent: `step ${other.step}` })));
  by("beside").value = others.some((other) => String(state.groups.indexOf(other)) === before) ? before : "";
  drawGroup();
  mark();
}

const sameGroups = (group) => state.groups.filter((other) => other.run === group.run && other.id === group.id && other.kind === group.kind);

function drawGroup() {
  const group = state.listed[state.at], box = by("group");
  drawLegend();
  if (!group) return box.replaceChildren();
  const head = [element("h2", { textContent: `step ${group.step}, ${group.kind}, prompt ${group.id}` })];
  for (const message of group.prompt) {
    head.push(element("div", { className: "role", textContent: message.role }), withSearch(element("div", { className: "message" }), message.text), ...cutNote(message));
  }
  if (group.images) head.push(element("div", { className: "images" }, ...group.images.map((digest) => picture(curves.report.runs[group.run].images[digest], digest))));
  head.push(element("div", { className: "role", textContent: "answer" }), withSearch(element("div", { className: "message" }), group.answer.text), ...cutNote(group.answer));
  const beside = by("beside").value === "" ? null : state.groups[Number(by("beside").value)];
  const cards = element("div", { className: beside ? "cards pairs" : "cards" });
  if (beside) {
    const [old, now] = beside.step < group.step ? [beside, group] : [group, beside];
    for (let i = 0; i < Math.max(old.rows.length, now.rows.length); i++) {
      const pair = [old.rows[i]?.text ?? "", now.rows[i]?.text ?? ""];
      const parts = differences(...pair);
      cards.append(card(old, i, (text) => text.append(...marked(parts, "del"))), card(now, i, (text) => text.append(...marked(parts, "ins"))));
    }
  } else {
    group.rows.forEach((_, i) => cards.append(card(group, i)));
  }
  return box.replaceChildren(...head, cards);
}

/** An image of a prompt; those beyond the page's limit, or no longer in the run's data, are named. */
const picture = (url, digest) => (url ? element("img", { src: url, alt: `image ${digest}`, title: digest }) : element("span", { className: "cut", textContent: `image ${digest} is not in this page` }));
const cutNote = (item) => (item.cut ? [element("div", { className: "cut", textContent: `cut here: it has ${item.cut.toLocaleString("en")} characters; all of them are in the run's folder` })] : []);

function card(group, i, write) {
  const row = group.rows[i];
  if (!row) return element("div", { className: "card", textContent: "none" });
  const facts = element("div", { className: "facts" }, element("span", { className: "total", textContent: `reward ${shown(row.reward)}` }));
  for (const [name, value] of Object.entries(row.rewards)) facts.append(element("span", { textContent: `${name} ${shown(value)}` }));
  if (row.advantage !== undefined) facts.append(element("span", { textContent: `advantage ${shown(row.advantage)}` }));
  if (row.length !== undefined) facts.append(element("span", { textContent: `${row.length} tokens` }));
  if (row.version !== undefined && row.version !== null) facts.append(element("span", { textContent: `policy ${row.version}` }));
  facts.append(element("span", { textContent: row.finish === "length" ? "truncated" : row.finish, className: row.finish === "length" ? "bad" : "" }));
  if (write) facts.append(element("span", { textContent: `step ${group.step}` }));
  const text = element("div", { className: "text" });
  const mode = by("colour").value;
  if (write) write(text);
  else if (row.tokens && mode !== "none") tokens(text, row.tokens, mode, row.mask);
  else if (row.turns) row.turns.forEach((turn, k) => text.append(...turnBoxes(turn, k, row.turns.length)));
  else withSearch(text, row.text);
  return element("div", { className: "card" }, facts, text, ...cutNote(row));
}

/** A turn of a conversation: what the policy said, then its calls and what it was answered, folded and grey. */
function turnBoxes(turn, k, count) {
  const earned = turn.reward === null ? "" : `, reward ${shown(turn.reward)}`;
  const boxes = [element("div", { className: "facts", textContent: `turn ${k + 1} of ${count}${earned}` })];
  boxes.push(withSearch(element("div", {}), turn.said.text), ...cutNote(turn.said));
  for (const call of turn.calls) {
    const head = element("summary", { textContent: `${call.name}(${call.arguments.text})`, className: call.failed ? "bad" : "" });
    const answer = withSearch(element("div", { className: "read" }), call.answer.text);
    boxes.push(element("details", { open: searched(call.answer.text) }, head, ...cutNote(call.arguments), answer, ...cutNote(call.answer)));
  }
  if (turn.answer.text && !turn.calls.length) {
    const head = element("summary", { textContent: "answer" });
    const answer = withSearch(element("div", { className: "read" }), turn.answer.text);
    boxes.push(element("details", { open: searched(turn.answer.text) }, head, answer, ...cutNote(turn.answer)));
  }
  return boxes;
}

/** Whether the text has what is searched for. */
function searched(text) {
  const wanted = by("search").value.trim().toLowerCase();
  return wanted !== "" && text.toLowerCase().includes(wanted);
}

/** The text with what is searched for marked. */
function withSearch(box, text) {
  const wanted = by("search").value.trim().toLowerCase(), lower = text.toLowerCase();
  if (!wanted) { box.append(text); return box; }
  let from = 0;
  for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, from)) {
    box.append(text.slice(from, at), element("mark", { textContent: text.slice(at, at + wanted.length) }));
    from = at + wanted.length;
  }
  box.append(text.slice(from));
  return box;
}

// -- colours of tokens ------------------------------------------------------------------------------------------------
// value: of token i. both: whether it has two sides. full: at which value a colour is at its strongest.
const less = (a, b) => (a === null || b === null ? null : a - b);
const MODES = {
  logprob: { value: (t, i) => t.old[i], both: false, full: 5, unit: "nats", words: "log-prob of the policy that sampled: the stronger, the less likely" },
  ratio: { value: (t, i) => less(t.after[i], t.old[i]), both: true, full: Math.log(1.2), unit: "", words: "probability after the update, times that before it", text: (v) => (v === null ? null : Math.exp(v)) },
  kl: { value: (t, i) => less(t.old[i], t.reference[i]), both: true, full: 2, unit: "nats", words: "log-prob of the policy less that of the reference (or the base)" },
  entropy: { value: (t, i) => t.entropy[i], both: false, full: 3, unit: "nats", words: "entropy of the policy's choice there" },
  advantage: { value: (t, i) => t.advantage[i], both: true, full: 2, unit: "", words: "advantage that the token was trained with" },
  mismatch: { value: (t, i) => less(t.old[i], t.sampled[i]), both: true, full: 0.1, unit: "nats", words: "trainer's log-prob less the engine's" },
};
const strength = (mode, value) => Math.min(1, Math.abs(value) / MODES[mode].full);
const paint = (mode, value) => {
  if (value === null) return "transparent";
  const colour = MODES[mode].both ? (value >= 0 ? "46, 160, 67" : "218, 54, 51") : "210, 120, 20";
  return `rgba(${colour}, ${(0.75 * strength(mode, value)).toFixed(3)})`;
};

function tokens(box, values, mode, mask) {
  values.text.forEach((text, i) => {
    const value = MODES[mode].value(values, i);
    if (mask && !mask[i]) {
      box.append(element("span", { className: "read", textContent: text, title: "read by the policy, not sampled" }));
      return;
    }
    const token = element("span", { className: "token", textContent: text });
    token.style.background = paint(mode, value);
    token.title = Object.entries(MODES).map(([name, { value: of, text: as }]) => `${name} ${shown(as ? as(of(values, i)) : of(values, i))}`).join("\n");
    box.append(token);
  });
}

function drawLegend() {
  const mode = by("colour").value, box = by("legend");
  if (mode === "none") return box.replaceChildren();
  const { both, full, unit, words, text } = MODES[mode];
  const scale = (both ? [-1, -0.5, 0, 0.5, 1] : mode === "logprob" ? [0, -0.5, -1] : [0, 0.5, 1]).map((share) => {
    const sample = element("span", { className: "scale", textContent: shown(text ? text(share * full) : share * full) });
    sample.style.background = paint(mode, share * full);
    return sample;
  });
  const none = state.listed[state.at]?.tokens ? "" : "; this group's tokens were not kept (token_values.every, token_values.groups)";
  return box.replaceChildren(`${words}${unit ? `, ${unit}` : ""} `, ...scale, none);
}

// -- differences of two texts -----------------------------------------------------------------------------------------
/** [[kind, text]] with kind "same", "del" or "ins", by words: a longest common subsequence, of at most 1,500 words. */
function differences(before, after) {
  const split = (text) => text.match(/\s+|[^\s]+/g)?.slice(0, 3000) ?? [];
  const pieces = (text) => split(text).flatMap((word) => (/^\s/.test(word) ? [word] : word.match(/[\p{L}\p{N}]+|[^\p{L}\p{N}]/gu) ?? [word])).slice(0, 1500);
  const a = pieces(before), b = pieces(after), width = b.length + 1;
  const table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  const found = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { found.push(["same", a[i]]); i++; j++; }
    else if (j >= b.length || (i < a.length && table[(i + 1) * width + j] >= table[i * width + j + 1])) found.push(["del", a[i++]]);
    else found.push(["ins", b[j++]]);
  }
  const rest = [["del", before.slice(a.join("").length)], ["ins", after.slice(b.join("").length)]];
  return [...found, ...rest.filter(([, text]) => text)];
}

/** The parts of one side: what both have, and its own, marked. */
const marked = (parts, kind) => parts.filter(([own]) => own === "same" || own === kind).map(([own, text]) => (own === "same" ? text : element(kind, { textContent: text })));

// -- the page ---------------------------------------------------------------------------------------------------------
function drawTrials(report) {
  by("tab-trials").hidden = !report.sweeps.length;
  const parts = report.sweeps.flatMap((sweep) => [element("h2", { textContent: sweep.name }), tableOf(sweep.columns, sweep.rows)]);
  by("trials").replaceChildren(...parts);
}

const PARTS = ["curves", "completions", "alarms", "config", "trials"];

function open(part) {
  for (const name of PARTS) {
    by(name).hidden = name !== part;
    by(`tab-${name}`).setAttribute("aria-selected", String(name === part));
  }
  if (part === "curves") charts.forEach((chart) => chart.setSize({ width: Math.max(300, chart.root.parentElement.clientWidth), height: 210 }));
  if (part === "completions") mark();
}

function turn() {
  otherTheme();
  redraw();
}

function next(select, by_ = 1) {
  select.selectedIndex = (select.selectedIndex + by_ + select.length) % select.length;
  select.dispatchEvent(new Event("change"));
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") { document.activeElement.blur(); return; }
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName) && document.activeElement.type !== "range" && document.activeElement.type !== "checkbox") return;
  const inCompletions = !by("completions").hidden;
  const keys = {
    "?": () => by("help").showModal(), t: turn, 1: () => open("curves"), 2: () => open("completions"), 3: () => open("alarms"), 4: () => open("config"),
    5: () => { if (!by("tab-trials").hidden) open("trials"); },
  };
  const own = {
    j: () => choose(state.at + 1), ArrowDown: () => choose(state.at + 1), k: () => choose(state.at - 1), ArrowUp: () => choose(state.at - 1),
    n: () => next(by("step")), p: () => next(by("step"), -1), c: () => next(by("colour")), d: () => next(by("beside")), "/": () => by("search").focus(),
  };
  const act = keys[event.key] || (inCompletions && own[event.key]);
  if (act) { event.preventDefault(); act(); }
}

async function main() {
  const report = await unpacked();
  curves.report = report;
  drawRuns(report);
  drawAlarmList(report);
  drawConfig(report);
  drawTrials(report);
  drawCurves(report);
  drawCompletions(report);
  by("footer").textContent = `made ${report.made} by rlft ${report.rlft}; ${report.runs.filter((run) => run.averaged).map((run) => `curves of ${run.label} show means of ${run.averaged} steps; `).join("")}no part of it comes from a network`;
  for (const part of PARTS) by(`tab-${part}`).addEventListener("click", () => open(part));
  for (const id of ["run", "step", "filter"]) by(id).addEventListener("change", list);
  by("search").addEventListener("input", list);
  for (const id of ["colour", "beside"]) by(id).addEventListener("change", drawGroup);
  by("smoothing").addEventListener("input", () => {
    curves.smoothing = Number(by("smoothing").value);
    by("smoothed").textContent = curves.smoothing === 1 ? "1 step" : `${curves.smoothing} steps`;
    redraw();
  });
  by("band").addEventListener("change", () => { curves.band = by("band").checked; drawRuns(report); redraw(); drawList(); });
  by("metric").addEventListener("change", redraw);
  by("theme").addEventListener("click", turn);
  by("help-button").addEventListener("click", () => by("help").showModal());
  addEventListener("keydown", press);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 200); });
  document.documentElement.dataset.ready = "true";
}

main().catch((error) => {
  by("footer").textContent = `this page could not be drawn: ${error}`;
  throw error;
});
