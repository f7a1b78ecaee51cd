// Everything that is text: key figures, errors, checks, the plan.

function figure(title, value, unit, ...below) {
  const big = element("p", { class: "big" }, value, ...(unit ? [element("small", {}, unit)] : []));
  return element("div", { class: "figure" }, element("h3", {}, title), big, ...below);
}

function figures() {
  const box = byId("figures");
  const { predicted, measured, error, interval, timed, fastest, slowest, speedup } = DATA.step;
  const time = quantity(measured === null ? predicted : measured, TIME_UNITS, 4);
  const step = element("p");
  if (measured === null) step.append("predicted");
  else step.append("predicted ", element("strong", {}, seconds(predicted)), `, error ${signed(error)}`);
  box.append(figure("Step time", time.number, time.unit, step));
  if (interval !== null) step.after(element("p", {}, `90 % between ${seconds(interval[0])} and ${seconds(interval[1])}`));
  if (timed > 1) step.after(element("p", {}, `median of ${timed} steps, ${seconds(fastest)} to ${seconds(slowest)}`));
  const [bubble, measuredBubble] = DATA.traces.map((trace) => trace.bubbles);
  box.append(deviceFigure("Bubble of the busiest device", bubble, measuredBubble, Math.min,
    (value) => ({ number: percent(value), unit: "" }), percent, percent));
  if (DATA.peaks.kinds.length) {
    const [peak, measuredPeak] = DATA.peaks.devices;
    const title = DATA.peaks.whole ? "Peak memory" : `Peak of ${DATA.peaks.kinds.join(", ")}`;
    box.append(deviceFigure(title, peak, measuredPeak, Math.max, (value) => quantity(value, BYTE_UNITS, 3), bytes,
      (value, found) => bytes(value) + (found > 0 ? `, ${signed(value / found - 1)}` : "")));
  }
  if (speedup !== null) {
    const ideal = DATA.plan.devices * DATA.plan.replicas;
    const words = `over one process, on ${plural(ideal, "device")}`;
    box.append(figure("Speed-up", `${speedup.toFixed(2)} ×`, "", element("p", {}, words)));
  }
}

// A value of each device, measured if it was, with its prediction; the headline is that of one device, by Math.min or Math.max.
function deviceFigure(title, predicted, measured, choose, headline, text, prediction) {
  const shown = measured || predicted;
  const chosen = shown.indexOf(choose(...shown));
  const { number, unit } = headline(shown[chosen]);
  const list = element("dl");
  shown.forEach((value, device) => {
    if (shown.length > 4 && device !== chosen) return;
    const words = measured && predicted ? `predicted ${prediction(predicted[device], value)}` : "";
    list.append(element("dt", {}, `device ${device}`), element("dd", {}, text(value)), element("dd", { class: "error" }, words));
  });
  return figure(title, number, unit, list);
}

function legend() {
  const found = new Set(DATA.traces.flatMap((trace) => trace.events.kind));
  const box = byId("legend");
  const entries = new Map();
  for (const kind of Object.keys(KIND_NAMES)) {
    if (!found.has(kind)) continue;
    const name = { SEND_F: "activations sent", RECV_F: "activations sent", SEND_B: "gradients sent",
      RECV_B: "gradients sent" }[kind] || kindName(kind);
    const letter = /^[FBIW]$/.test(kind) ? `${kind} ` : "";
    entries.set(`${letter}${name}`, [kindColour(kind), /^(SEND|RECV)/.test(kind) ? "thin" : ""]);
  }
  for (const [name, [tone, shape]] of entries) {
    box.append(element("span", { class: "item" },
      element("span", { class: `swatch ${shape}`, style: { background: `var(${tone})` } }), name));
  }
  if (MOST_CHUNKS > 1) box.append(element("span", { class: "item" }, "lighter: later stages of a device"));
  if (DATA.traces.some((trace) => trace.phases.some(Boolean))) {
    for (const [name, tone] of [["warm-up, cool-down", "--phase-warm"], ["steady", "--phase-steady"]]) {
      box.append(element("span", { class: "item" },
        element("span", { class: "swatch phase", style: { background: `var(${tone})` } }), name));
    }
  }
}

function table(caption, columns, rows) {
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map((row) => element("tr", {},
    ...row.map((cell, i) => element("td", { "data-name": columns[i] }, cell))));
  return element("div", { class: `scroll ${columns.length > 5 ? "cards" : ""}` }, element("table", {}, element("caption", {}, caption),
    element("thead", {}, head), element("tbody", {}, ...body)));
}

function kindCell(kind) {
  const cell = element("span", {}, element("span", { class: "swatch", style: { background: `var(${kindColour(kind)})` } }));
  cell.append(kindName(kind));
  return cell;
}

function accuracy() {
  const found = DATA.comparison;
  if (!found) return;
  show("accuracy");
  const box = byId("accuracy-tables");
  const share = (value) => (value === null ? "–" : percent(value));
  const worst = ({ worst_error: error, worst_off_s: off }) => (error === null ? "–" : off === 0 ? signed(0) : `${signed(error)} (${difference(off)})`);
  const where = ({ worst: at }) => (at ? `${at.action}, device ${at.device}` : "–");
  box.append(table("Durations", ["kind", "actions", "predicted", "measured", "bias", "median error", "worst error", "worst action"],
    found.kinds.filter((kind) => !isMessage(kind.kind)).map((kind) => [kindCell(kind.kind), String(kind.count),
      seconds(kind.predicted_s), seconds(kind.measured_s), signed(kind.bias), share(kind.median_error), worst(kind), where(kind)])));
  const devices = [["step", seconds(DATA.step.predicted), seconds(DATA.step.measured), signed(DATA.step.error)]];
  devices.push(...found.bubbles.map((bubble) => [`device ${bubble.device}, bubble`, percent(bubble.predicted),
    percent(bubble.measured), `${signed(bubble.predicted - bubble.measured).replace(`${NO_BREAK}%`, "")} points`]));
  const totals = new Set(found.memory.map((row) => row.kind)).size > 2; // of one kind, the total is that kind
  for (const row of found.memory.filter((each) => totals || each.kind !== "total")) {
    devices.push([`device ${row.device}, peak ${row.kind}`, bytes(row.peak.predicted), bytes(row.peak.measured), signed(row.peak.error)]);
  }
  box.append(table("Step and devices", ["", "predicted", "measured", "error"], devices));
  if (found.transfers.length) box.append(transferTable(found.transfers));
  box.append(...statements(found));
}

const isMessage = (kind) => /^(SEND|RECV)/.test(kind);
const difference = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${seconds(Math.abs(value), 3)}`;

// Messages: when they started and ended, and how long they took where the transport reported that.
function transferTable(transfers) {
  const times = (off) => `${seconds(off.median_s, 3)}, worst ${difference(off.worst_s)}`;
  const took = ({ moved }) => (moved === null ? "not reported"
    : `${seconds(moved.predicted_s, 3)} / ${seconds(moved.measured_s, 3)}, ${signed(moved.bias)}`);
  return table("Messages: how far predicted starts and ends are from the measured ones",
    ["kind", "messages", "starts off by (median)", "ends off by (median)", "worst at", "transfers, predicted / measured"],
    transfers.map((kind) => [kindCell(kind.kind), String(kind.count), times(kind.start), times(kind.end),
      kind.end.worst ? `${kind.end.worst.action}, device ${kind.end.worst.device}` : "–", took(kind)]));
}

function statements(found) {
  const lines = [];
  if (!found.same_plan) lines.push(["Plans", "the two traces ran different plans"]);
  lines.push(["Order", found.order.length === 0 ? "every queue ran in the predicted order"
    : found.order.map((d) => `device ${d.device}, ${d.queue}: ${d.differing} positions differ, first ${d.position} `
      + `(${d.predicted} predicted, ${d.measured} ran)`).join("; ")]);
  for (const [name, only] of [["Only predicted", found.only_predicted], ["Only measured", found.only_measured]]) {
    if (only.length === 0) continue;
    const some = only.slice(0, 6).map((item) => `${item.action} on device ${item.device}`).join(", ");
    lines.push([name, only.length > 6 ? `${some} and ${only.length - 6} more` : some]);
  }
  if (found.transfers.some((kind) => kind.moved === null)) {
    lines.push(["Messages", "this transport does not report when a transfer ran: a measured message ends when its reader has "
      + "waited for it, so its duration includes that wait and is not compared with the time on the link"]);
  }
  return lines.map(([name, text]) => element("p", { class: "statement" }, element("strong", {}, `${name} `), text));
}

function checks() {
  if (DATA.checks.length === 0) return;
  show("checks");
  for (const check of DATA.checks) {
    const [state, mark, word] = check.verdict === null ? ["told", "·", "noted"]
      : check.verdict ? ["passed", "✓", "passed"]
      : check.about === "prediction" ? ["missed", "!", "missed"] : ["failed", "✗", "failed"];
    byId("check-list").append(element("li", { class: state },
      element("span", { class: "mark", title: word, "aria-label": word }, mark),
      element("span", {}, check.name), element("span", { class: "value" }, check.value)));
  }
}

function plan() {
  if (!DATA.plan.known) {
    byId("plan").hidden = true;
    return;
  }
  const { stages, schedule, edges, tied, recompute, offload } = DATA.plan;
  const words = [`Schedule ${schedule}.`];
  if (edges.length) words.push(`${plural(edges.length, "edge")} between stages, ${bytes(edges.reduce((sum, e) => sum + e.bytes, 0))} of activations a microbatch.`);
  for (const weight of tied) words.push(`${weight.name} is shared by stages ${weight.stages.join(" and ")}.`);
  if (recompute.length) words.push(`Recomputed: ${recompute.map((s) => `stage ${s}`).join(", ")}.`);
  const leaving = ({ stage, bytes: size, storages, microbatches }) => (
    `stage ${stage} (${plural(storages, "storage")}, ${bytes(size)}, of ${microbatches} microbatches)`);
  if (offload.length) words.push(`Offloaded: ${offload.map(leaving).join(", ")}.`);
  byId("plan-hint").textContent = words.join(" ");
  const most = Math.max(...stages.map((s) => (s.forward || 0) + (s.backward || 0)), 0);
  for (const stage of stages) byId("plan-stages").append(stageCard(stage, most));
}

function stageCard(stage, most) {
  const facts = [plural(stage.operators, "operator")];
  if (stage.parameterBytes !== null) facts.push(`${bytes(stage.parameterBytes)} of parameters`);
  else facts.push(plural(stage.parameters, "parameter"));
  const card = element("div", { class: "stage", "data-stage": stage.index },
    element("h3", {}, `Stage ${stage.index}`, element("span", {}, `device ${stage.device}`)), element("p", {}, facts.join(", ")));
  if (most > 0) {
    const width = (time) => ({ width: `${(100 * time) / most}%` });
    card.append(element("p", {}, `forward ${seconds(stage.forward, 3)}, backward ${seconds(stage.backward, 3)}`),
      element("div", { class: "weight", title: "forward and backward time, next to the slowest stage's" }, element("i", {},
        element("b", { style: { ...width(stage.forward), background: "var(--kind-f)" } }),
        element("b", { style: { ...width(stage.backward), background: "var(--kind-b)" } }))));
  }
  card.append(element("p", { class: "modules" }, element("code", {}, stage.modules)));
  return card;
}

function notes() {
  if (DATA.notes.length) show("notes");
  for (const note of DATA.notes) byId("note-list").append(element("li", {}, note));
}

// The stages that run a module whose name has this text, in any case.
function matchingStages(text) {
  const wanted = text.toLowerCase();
  const has = (stage) => (stage.names ?? [stage.modules]).some((name) => name.toLowerCase().includes(wanted));
  return new Set(DATA.plan.stages.filter((stage) => stage.modules !== undefined && has(stage)).map((stage) => stage.index));
}
