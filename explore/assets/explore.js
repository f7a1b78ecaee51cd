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
let changeTimer = null; // until the form's last change is answered

const current = () => sides[state.side];
const runsCode = (question) => question.kind === "plan" && (question.model ?? "").includes(":");
const mayRun = (question) => !runsCode(question) || allowed.has(question.model);

// ---- questions ----

function change(question, moving = false) {
  state[state.side] = question;
  state.base = null;
  if (!moving) showForm(complete(question), change);
  clearTimeout(changeTimer);
  if (question.kind === "uniform") run(current(), question);
  else if (!moving) changeTimer = setTimeout(() => run(current(), question), 250);
  remember();
}

// Ask a question for a side. While a quick one is answered, only the last of the next ones is asked.
async function run(side, question) {
  side.question = question;
  if (!mayRun(question)) {
    offerCode(question);
    return;
  }
  const quick = question.kind === "uniform" && question.schedule !== "auto";
  if (side.running && quick && side.quick) {
    side.again = true;
    return;
  }
  pointsRunning?.abort();
  if (pointsOf && pointsOf.question.kind !== question.kind) {  // their units differ
    [points, pointsOf] = [[], null];
    byName("frontier-hint").textContent = "";
    drawPoints();
  }
  side.running?.abort();
  const running = side.running = new AbortController();
  side.quick = quick;
  side.root.classList.toggle("stale", !quick);
  try {
    showError("");
    await askLines("api/answer", { question, run_code: question.model }, running.signal, (line) => received(side, question, line));
  } catch (error) {
    if (error.name !== "AbortError") showError(`The server does not answer: ${error.message}`);
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
    showError(`The server does not answer: ${error.message}`);
    return {};
  }
}

// What takes longer is asked for once no slider has moved for a while: why the schedule is not faster, and the frontier.
function askSlowAnswers(side) {
  clearTimeout(side.slowTimer);
  side.slowTimer = setTimeout(async () => {
    const { question, answer } = side;
    if (side.running || !question) return;
    if (question.kind === "uniform" && question.schedule !== "auto" && answer) {
      const { idle } = await askOnce("api/idle", { question });
      if (side.answer === answer && idle) side.report.showIdle(idle);
    }
    if (!side.running && side === current()) askPoints(state.base ?? question);
  }, 250);
}

function received(side, question, line) {
  if (line.progress) showProgress(line.progress);
  if (line.error) {
    showError(line.error);
    side.root.classList.remove("stale");
  }
  if (line.answer) {
    showProgress(null);
    side.shown = question;
    showCount(side.draw(line.answer, state.find));
    if (side === current()) showCommand(line.answer.command);
    if (state.span) [state.span] = [null, view.look(...state.span)];
    drawPoints();
    arrange();
  }
  if (line.idle) side.report?.showIdle(line.idle);
}

function offerCode(question) {
  const button = element("button", { type: "button", class: "run" }, `Run the code of ${question.model}`);
  button.addEventListener("click", () => {
    allowed.add(question.model);
    button.remove();
    run(current(), question);
  });
  byName("form").querySelector(".run")?.remove();
  byName("form").append(button);
  showError(`${question.model} is a function on this machine: it is called only if you choose to.`);
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
    if (error.name !== "AbortError") showError(`The server does not answer: ${error.message}`);
  }
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
  drawFrontier(byName("frontier"), points, { units: plain ? { time: PLAIN, memory: PLAIN } : { time: SECONDS, memory: BYTES },
    limit, chosen: question, choose: choosePoint });
}

function choosePoint(point) {
  state.base ??= pointsOf.question;
  state[state.side] = point.question;
  showForm(complete(point.question), change);
  run(current(), point.question);
  remember();
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

function remember() {
  drawCluster();
  writeAddress({ ...state, span: view.from === 0 && view.to === view.full ? null : [view.from, view.to] });
}

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
    sides.b.close();
    state.b = null;
    state.side = "a";
  }
  showForm(complete(state[state.side]), change);
  arrange();
  view.redraw();
  remember();
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
view.onlook = remember;
window.addEventListener("resize", drawPoints);

showForm(complete(state[state.side]), change);
arrange();
drawCluster();
(async () => {
  for (const name of ["a", "b"]) if (state[name]) await run(sides[name], state[name]);
})();
