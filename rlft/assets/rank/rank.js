"use strict";
// The page of `rlft rank`. Prompts and answers come to it as text nodes only, never as markup.

let state = { done: 0, of: 0, prompt: [], answers: [] }; // what the server shows
let places = []; // indices of answers in their order, the best first: lists of equally good ones
let ties = false; // whether the next choice is as good as the last one
let waiting = false; // for the server
let undoes = false; // whether undo was asked for meanwhile

const left = () => state.answers.map((_, i) => i).filter((i) => !places.flat().includes(i));

/** Sends a request, and shows the prompt that the server answers with: the same one if nothing was saved. */
async function send(request) {
  if (waiting) return;
  waiting = true;
  let problem = "";
  try {
    const response = await fetch("", { method: "POST", body: JSON.stringify(request) });
    const answer = await response.json();
    problem = answer.problem;
    if (answer.answers) state = answer;
  } catch {
    problem = "Nothing was saved: rlft rank has ended. Start it again with the same command; all earlier rankings are kept.";
  }
  waiting = ties = false;
  places = [];
  scrollTo(0, 0);
  by("problem").textContent = problem;
  by("problem").hidden = !problem;
  draw();
  if (undoes) undo();
}

function save() {
  const scores = state.answers.map((_, i) => places.length - 1 - places.findIndex((equal) => equal.includes(i)));
  send({ number: state.done, scores });
}

function choose(i) {
  if (!left().includes(i)) return;
  if (ties) places.at(-1).push(i);
  else places.push([i]);
  ties = false;
  if (left().length === 1) places.push(left());
  if (left().length === 0) save();
  draw();
}

function tie() {
  ties = places.length > 0 && !ties;
  draw();
}

function rest() {
  if (left().length === 0) return;
  if (ties) places.at(-1).push(...left());
  else places.push(left());
  save();
}

function skip() {
  if (state.answers.length > 0) send({ number: state.done, scores: null });
}

function undo() {
  undoes = waiting;
  if (waiting) return;
  if (places.length === 0) {
    if (state.done > 0) send({ number: state.done, undo: true });
    return;
  }
  if (ties) ties = false;
  else if (places.at(-1).length > 1) places.at(-1).pop();
  else places.pop();
  draw();
}

const PLACES = ["best", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th", "9th"];

function card(answer, i) {
  const place = places.findIndex((equal) => equal.includes(i));
  const button = element("button", { textContent: String(i + 1), title: `the next best (${i + 1})`, disabled: place >= 0 });
  const facts = element("div", { className: "facts" }, button, element("span", { className: "place", textContent: PLACES[place] ?? "" }));
  const text = element("div", { className: "text", textContent: answer || "(an empty answer)" });
  const made = element("article", { className: place < 0 ? "card" : "card chosen" }, facts, text);
  made.addEventListener("click", () => { if (getSelection().isCollapsed) choose(i); });
  return made;
}

function draw() {
  by("bar").max = Math.max(1, state.of);
  by("bar").value = state.done;
  by("progress").textContent = `${state.done} of ${state.of} done`;
  by("prompt").replaceChildren(...state.prompt.flatMap(({ role, text }) => [
    element("div", { className: "role", textContent: role }), element("div", { className: "message", textContent: text, tabIndex: 0 }),
  ]));
  by("answers").replaceChildren(...state.answers.map(card));
  by("finished").hidden = state.answers.length > 0;
  const order = places.map((equal) => equal.map((i) => i + 1).join(" = ")).join(" > ");
  by("order").textContent = order ? `${order} ${ties ? "=" : ">"} ?` : state.answers.length > 0 ? "Which is best?" : "";
  by("tie").disabled = places.length === 0;
  by("rest").disabled = by("skip").disabled = state.answers.length === 0;
  by("undo").disabled = state.done === 0 && places.length === 0;
}

const KEYS = { "=": tie, 0: rest, s: skip, u: undo, Backspace: undo, t: otherTheme, "?": () => by("help").showModal() };

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || by("help").open) return;
  const act = /^[1-9]$/.test(event.key) ? () => choose(Number(event.key) - 1) : KEYS[event.key];
  if (act) { event.preventDefault(); act(); }
});
for (const [id, act] of Object.entries({ tie, rest, skip, undo, theme: otherTheme, "help-button": KEYS["?"] })) by(id).addEventListener("click", act);
send({}).then(() => { root.dataset.ready = "true"; });
