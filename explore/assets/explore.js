// The page: what the form asks is answered by the server, and drawn.

const view = timeView();
const address = readAddress();
const state = { a: address.a ?? CHOICES.start, b: address.b, side: address.b ? address.side : "a",
  base: address.base, span: address.span, find: address.find };
const sides = { a: new Side("a", view, activate), b: new Side("b", view, activate) };
const allowed = new Set(CHOICES.factory ? [CHOICES.factory] : []); // functions that the user chose to call
let points = [];
let pointsOf = null; // the pipeline that they belong to
let pointsRunning = null;
const answers = new Map(); // of the last questions, for Back and Forward
const REMEMBERED = 30;

const current = () => sides[state.side];
const runsCode = (question) => question.kind === "plan" && (question.model ?? "").includes(":");
const mayRun = (question) => !runsCode(question) || allowed.has(question.model);

// ---- questions ----

function change(question, moving = false) {
  state[state.side] = question;
  state.base = null;
  if (!moving) showForm(complete(question), change);
  runOrOffer(current(), question);
  if (!moving) remember(true);
}

// A search begins with a click, unless its answer is known.
function runOrOffer(side, question) {
  const offers = side === current() && question.kind === "plan" && !answers.has(plainText(complete(question)));
  return offers ? offerSearch(question) : run(side, question);
}

// What the page cannot ask: a sentence, without the answer to something else next to it.
function refuse(words, side = current()) {
  side.stop();
  side.clear();
  clearPoints();
  showProgress(null);
  showCommand("");
  showError(words);
  arrange();
}

// Ask a question for a side. While a quick one is answered, only the last of the next ones is asked.
async function run(side, question) {
  side.question = question;
  const known = answers.get(plainText(complete(question)));
  if (known) {
    side.stop();
    side.question = question;
    showError("");
    received(side, question, { answer: known });
    askSlowAnswers(side);
    return;
  }
  if (!mayRun(question)) {
    offerSearch(question);
    return;
  }
  byName("form").querySelector(".run")?.remove();
  const quick = question.kind === "uniform" && question.schedule !== "auto";
  if (side.running && quick && side.quick) {
    side.again = true;
    return;
  }
  pointsRunning?.abort();
  if (pointsOf && pointsOf.question.kind !== question.kind) clearPoints(); // their units differ
  side.running?.abort();
  const running = side.running = new AbortController();
  side.quick = quick;
  side.root.classList.toggle("stale", !quick);
  if (!quick) showProgress({ text: "waiting for the answer" });
  try {
    showError("");
    await askLines("api/answer", { question, run_code: question.model }, running.signal, (line) => received(side, question, line));
  } catch (error) {
    if (error.name !== "AbortError") refuse(failure(error), side);
  }
  if (side.running !== running) return;
  side.running = null;
  showProgress(null);
  if (side.again) {
    side.again = false;
    run(side, side.question);
  } else askSlowAnswers(side);
}

// The server's answer to a request that is answered at once; empty if it does not answer.
async function askOnce(path, body) {
  try {
    return await (await ask(path, body)).json();
  } catch (error) {
    showError(failure(error));
    return {};
  }
}

// What takes longer is asked for once no slider has moved for a while: why the schedule is not faster, and the frontier.
function askSlowAnswers(side) {
  clearTimeout(side.slowTimer);
  side.slowTimer = setTimeout(async () => {
    const { question, answer } = side;
    if (side.running || !question) return;
    if (question.kind === "uniform" && question.schedule !== "auto" && answer && !CHOICES.grid) {
      const { idle } = await askOnce("api/idle", { question });
      if (side.answer === answer && idle) side.report.showIdle(idle);
    }
    if (!side.running && side === current()) askPoints(state.base ?? question);
  }, 250);
}

function received(side, question, line) {
  if (line.progress) showProgress(line.progress);
  if (line.error) {
    side.clear();
    if (side === current()) showCommand("");
    showError(line.error);
    arrange();
  }
  if (line.answer) {
    showProgress(null);
    side.shown = question;
    answers.set(plainText(complete(question)), line.answer);
    if (answers.size > REMEMBERED) answers.delete(answers.keys().next().value);
    showCount(side.draw(line.answer, state.find));
    if (side === current()) showCommand(line.answer.command ?? "");
    if (state.span) [state.span] = [null, view.look(...state.span)];
    drawPoints();
    arrange();
  }
  if (line.idle) side.report?.showIdle(line.idle);
}

// A search takes a while, and a function of the user's may do anything: each begins with a click.
function offerSearch(question) {
  refuse(mayRun(question) ? "" : `${question.model} is a function on this machine: it is called only if you choose to.`);
  const words = mayRun(question) ? "Search a plan" : `Run the code of ${question.model}, and search`;
  const button = element("button", { type: "button", class: "run" }, words);
  button.addEventListener("click", () => {
    const asked = state[state.side];
    allowed.add(asked.model);
    run(current(), asked);
  });
  byName("form").querySelector(".run")?.remove();
  byName("form").append(button);
}

// ---- the frontier ----

// The pipeline of a question, without the choice of a schedule: what the frontier is of.
function pipelineOf(question) {
  if (question.kind === "file") return null;
  const { schedule, parameters, chunks, rank, budget, ...rest } = complete(question);
  return rest;
}

async function askPoints(question) {
  const base = pipelineOf(question);
  const mine = base && plainText(base);
  if (mine === pointsOf?.key && pointsOf.complete) {
    drawPoints();
    return;
  }
  pointsRunning?.abort();
  points = [];
  pointsOf = { key: mine, complete: false, question };
  drawPoints();
  if (base === null) return;
  const running = pointsRunning = new AbortController();
  const asked = base.kind === "plan" ? { ...base, budget: question.budget ?? null } : base;
  try {
    await askLines("api/points", { question: asked, run_code: question.model }, running.signal, (line) => {
      if (line.point) points.push(line.point);
      if (line.progress) byName("frontier-hint").textContent = `${line.progress.text} …`;
      if (line.point) drawPoints();
      if (line.error) byName("frontier-hint").textContent = line.error;
    });
    pointsOf.complete = true;
    drawPoints();
  } catch (error) {
    if (error.name !== "AbortError") showError(failure(error));
  }
}

function clearPoints() {
  pointsRunning?.abort();
  [points, pointsOf] = [[], null];
  byName("frontier-hint").textContent = "All schedules are compared once the answer is here.";
  drawPoints();
}

function drawPoints() {
  const question = state[state.side];
  const plain = question.kind === "uniform";
  const hint = byName("frontier-hint");
  byName("frontier").parentElement.hidden = question.kind === "file";
  if (pointsOf?.complete) {
    hint.textContent = `${plural(points.length, "schedule")}; the line joins those that no other one beats in both time and memory. Choose one to see it.`
      + (plain ? " Memory is in one device's saved tensors for one microbatch." : "");
  }
  const limit = (state.base ?? question).memory_limit ?? null;
  const units = plain ? { time: TIME_UNIT, memory: MICROBATCH, timeIs: ", in the unit of F", memoryIs: ", in microbatches" }
    : { time: SECONDS, memory: BYTES, timeIs: "", memoryIs: "" };
  drawFrontier(byName("frontier"), points, { units, limit, chosen: question, choose: choosePoint });
}

function choosePoint(point) {
  state.base ??= pointsOf.question;
  state[state.side] = point.question;
  showForm(complete(point.question), change);
  run(current(), point.question);
  remember(true);
}

// ---- the cluster ----

let drawnCluster = null;

async function drawCluster() {
  const question = complete(state[state.side]);
  const name = question.kind === "plan" ? question.cluster : null;
  byName("topology").hidden = name === null;
  if (name === null || name === drawnCluster) return;
  drawnCluster = name;
  const found = await askOnce("api/topology", { cluster: name });
  if (name !== drawnCluster) return;
  const picture = byName("topology-picture");
  if (found.error) picture.replaceChildren(element("p", { class: "refusal" }, found.error));
  else if (found.svg) picture.replaceChildren(element("img", { alt: `Topology of ${name}`, src: `data:image/svg+xml,${encodeURIComponent(found.svg)}` }));
  else drawnCluster = null; // the server did not answer: ask again later
}

// ---- progress, errors, and the two sides ----

function showProgress(progress) {
  byName("progress").hidden = !progress;
  if (!progress) return;
  byName("progress-text").textContent = progress.text;
  const bar = byName("progress-bar");
  if (progress.of) [bar.max, bar.value] = [progress.of, Math.min(progress.done, progress.of)];
  else bar.removeAttribute("value");
}

function showError(words) {
  byName("error").textContent = words;
  byName("error").hidden = !words;
}

function showCommand(command) {
  byName("command").textContent = command;
}

function showCount(count) {
  byName("search-count").textContent = count === null ? "" : plural(count, "stage");
}

function arrange() {
  const two = state.b !== null;
  byName("panels").classList.toggle("two", two);
  byName("exports").parentElement.hidden = !current().answer;  // nothing to search, save or compare yet
  byName("search").parentElement.hidden = state[state.side].kind === "uniform";  // whose stages have no modules
  byName("exports").hidden = Boolean(CHOICES.grid);  // a server writes these files
  byName("pin").setAttribute("aria-pressed", String(two));
  byName("pin").textContent = two ? "Show only this one" : "Compare with another";
  for (const side of Object.values(sides)) side.root.classList.toggle("active", side.name === state.side);
}

function activate(name) {
  if (state.side === name || !state[name]) return;
  state.side = name;
  showForm(complete(state[name]), change);
  showCommand(sides[name].answer?.command ?? "");
  drawCluster();
  askPoints(state.base ?? state[name]);
  arrange();
  remember();
}

// Write the state into the address: as a new entry of the history, or in place of the present one.
function remember(isNew = false) {
  drawCluster();
  writeAddress({ ...state, span: view.from === 0 && view.to === view.full ? null : [view.from, view.to] }, isNew);
}

window.addEventListener("popstate", async () => {
  const found = readAddress();
  Object.assign(state, found, { a: found.a ?? CHOICES.start, side: found.b ? found.side : "a" });
  for (const side of Object.values(sides)) if (!state[side.name]) [side.stop(), side.clear()];
  showForm(complete(state[state.side]), change);
  showError("");
  showProgress(null);
  drawCluster();
  for (const side of Object.values(sides)) {
    if (!state[side.name]) continue;
    if (sameQuestion(side.shown, state[side.name])) { // its answer is here: no other one is wanted
      side.stop();
      side.question = side.shown;
      askSlowAnswers(side);
    } else await runOrOffer(side, state[side.name]);
  }
  arrange();
});

// Keep this side, and change a copy of it next to it; or go back to one.
function pin() {
  if (state.b === null) {
    state.b = state[state.side];
    state.side = "b";
    if (sides.a.answer) showCount(sides.b.draw(structuredClone(sides.a.answer), state.find));
    sides.b.shown = sides.a.shown;
    sides.b.question = state.b;
  } else {
    state.a = state[state.side];
    if (current() !== sides.a && current().answer) {
      sides.a.draw(current().answer, state.find);
      sides.a.shown = current().shown;
    }
    sides.b.stop();
    sides.b.clear();
    state.b = null;
    state.side = "a";
  }
  showForm(complete(state[state.side]), change);
  arrange();
  view.redraw();
  remember(true);
}

byName("cancel").addEventListener("click", () => {
  const side = current();
  const stopped = side.running;
  side.running = null;
  stopped?.abort();
  showProgress(null);
  showError("Cancelled. Change the form to start again.");
  side.root.classList.remove("stale");
});
byName("pin").addEventListener("click", pin);
byName("search").value = state.find;
byName("search").addEventListener("input", () => {
  state.find = byName("search").value.trim();
  for (const side of Object.values(sides)) {
    const count = side.report?.search(state.find);
    if (side === current()) showCount(count ?? null);
  }
  remember();
});
byName("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(byName("command").textContent);
  byName("copy").textContent = "Copied";
  setTimeout(() => { byName("copy").textContent = "Copy"; }, 1500);
});
for (const button of document.querySelectorAll("[data-file]")) {
  button.addEventListener("click", async () => {
    const question = current().shown ?? state[state.side];  // the answer on the page, whose command line it shows
    try {
      await save({ what: button.dataset.file, question, run_code: allowed.has(question.model) ? question.model : null });
    } catch (error) {
      showError(error.message);
    }
  });
}
view.onlook = () => remember();
const narrow = matchMedia("(max-width: 900px)");  // there the answer comes first, and the form opens on a click
const fold = () => { byName("controls").open = !narrow.matches; };
narrow.addEventListener("change", fold);
fold();
window.addEventListener("resize", drawPoints);

showForm(complete(state[state.side]), change);
arrange();
drawCluster();
(async () => {
  for (const name of ["a", "b"]) if (state[name]) await run(sides[name], state[name]);
})();
