// Memory over time: one stack of kinds for each device or host and trace, on one scale per row, under its limit.

const MEMORY_HEIGHT = DATA.queues.length > MANY ? 116 : 162;
const HEAD = 18; // pixels above the plot, for the limit
const FOOT = 20; // pixels below it, for times
const MOST_ROWS = 24; // devices whose memory is drawn at first
const STATE = ["parameters", "gradients", "optimizer"]; // kinds that keep their size during a step
const hiddenKinds = new Set();

// What has memory: its name, its samples in a trace, its limit, and its peaks in words.
const DEVICES = { name: (row) => `device ${row}`, of: (trace) => trace.memory,
  limit: (row) => DATA.limits[row], line: (row) => peakLine(row) };
const HOSTS = { name: (row) => DATA.hosts[row].name, of: (trace) => trace.host,
  limit: (row) => DATA.hosts[row].limit ?? undefined, line: (row) => hostLine(row) };

function memoryKinds() {
  return [...new Set(DATA.traces.flatMap((trace) => trace.memory.kinds))];
}

function memoryCharts() {
  const drawn = DATA.traces.filter((trace) => trace.memory.kinds.length > 0);
  if (drawn.length === 0) return;
  show("memory");
  const hosts = DATA.hosts.length ? ", and what devices have on their hosts" : "";
  byId("memory-hint").textContent = `What each device holds, by kind${hosts}, on the same span of time as above. `
    + (DATA.units === "plain" ? "Sizes are in microbatches: one device's saved tensors for one. Times are in the unit of F." : "Select a kind to hide it.");
  for (const kind of memoryKinds()) byId("memory-legend").append(memorySwitch(kind));
  byId("memory-measured").textContent = unmeasuredLine();
  // One trace of many devices: two next to each other.
  if (drawn.length === 1 && DATA.queues.length > 2) byId("memory-charts").classList.add("columns");
  const rows = fullestFirst(drawn);
  for (const device of rows.slice(0, MOST_ROWS).sort((a, b) => a - b)) memoryRow(DEVICES, device, drawn);
  if (rows.length > MOST_ROWS) memoryRest(rows.slice(MOST_ROWS).sort((a, b) => a - b), drawn);
  const offloading = DATA.traces.filter((trace) => trace.host.kinds.length > 0);
  DATA.hosts.forEach((_, host) => memoryRow(HOSTS, host, offloading));
  if (DATA.kept.length > 0) show("memory-kept");
  for (const kept of DATA.kept) byId("memory-kept-list").append(element("li", {}, keptLine(kept)));
}

// Devices, those with the highest peak first.
function fullestFirst(drawn) {
  const peak = (row) => Math.max(0, ...drawn.flatMap((trace) => (
    (trace.memory.held[row] || []).map((held) => held.reduce((a, b) => a + b, 0)))));
  const peaks = DATA.queues.map((_, row) => peak(row));
  return DATA.queues.map((_, row) => row).sort((a, b) => peaks[b] - peaks[a] || a - b);
}

function memoryRest(rows, drawn) {
  const text = `Show the memory of all ${DATA.queues.length} devices; these are the ${MOST_ROWS} fullest`;
  const button = element("button", { type: "button", class: "more" }, text);
  button.addEventListener("click", () => {
    button.remove();
    for (const device of rows) memoryRow(DEVICES, device, drawn);
    view.redraw();
  });
  byId("memory-charts").after(button);
}

// Why a measured chart has fewer kinds than the predicted one; empty if it has all.
function unmeasuredLine() {
  const [predicted, measured] = DATA.traces;
  if (!measured || predicted.memory.kinds.length === 0) return "";
  if (measured.memory.kinds.length === 0) {
    return "The measured trace has no samples of memory: trace a step with pipe.trace_step to record saved tensors.";
  }
  const missing = predicted.memory.kinds.filter((kind) => !measured.memory.kinds.includes(kind));
  if (missing.length === 0) return "";
  const state = missing.filter((kind) => STATE.includes(kind));
  const drawn = state.length ? ` Its ${listed(state)} keep their size during a step: the measured charts have the predicted `
    + "ones, hatched, below what was measured." : "";
  return `Only ${listed(measured.memory.kinds)} memory was measured: a step counts the tensors that it saves for its `
    + `backward when they are allocated and freed, and counts no others.${drawn}`;
}

function listed(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}`;
}

function keptLine({ stage, microbatches, bytes: size, reason, waits_s: waits, copies_s: copies }) {
  const [shortest, longest] = (waits ?? [0, 0]).map((time) => seconds(time, 3));
  const range = shortest === longest ? shortest : `${shortest} to ${longest}`;
  const times = waits === null ? "" : ` (${range}; the copies ${seconds(copies, 3)})`;
  return `Stage ${stage}, ${bytes(size)} of each of ${microbatches} microbatch${microbatches === 1 ? "" : "es"}: ${reason}${times}.`;
}

function memoryRow(owners, row, drawn) {
  const columns = element("div", { class: "columns" });
  const title = element("h3", {}, owners.name(row), element("span", {}, owners.line(row)));
  byId("memory-charts").append(element("div", { class: "memory-row" }, title, columns));
  for (const trace of drawn) memoryChart(columns, owners, trace, row, drawn);
}

function memorySwitch(kind) {
  const button = element("button", { type: "button", class: "item", "aria-pressed": "true" },
    element("span", { class: "swatch", style: { background: `var(${memoryColour(kind)})` } }), kind);
  button.addEventListener("click", () => {
    if (!hiddenKinds.delete(kind)) hiddenKinds.add(kind);
    button.setAttribute("aria-pressed", String(!hiddenKinds.has(kind)));
    view.redraw();
  });
  return button;
}

function peakLine(device) {
  const [predicted, measured] = DATA.peaks.devices;
  const of = DATA.peaks.whole ? "" : ` (${DATA.peaks.kinds.join(", ")})`;
  const words = [];
  if (predicted && predicted[device] !== undefined) words.push(`predicted ${bytes(predicted[device])}`);
  if (measured && measured[device] !== undefined) words.push(`measured ${bytes(measured[device])}`);
  if (words.length === 2 && measured[device] > 0) words.push(signed(predicted[device] / measured[device] - 1));
  return words.length ? `peak${of} ${words.join(", ")}` : "";
}

function hostLine(row) {
  const words = DATA.traces.filter((trace) => trace.host.kinds.length > 0).map((trace) => {
    const peak = Math.max(0, ...(trace.host.held[row] || []).map((held) => held[0]));
    return `${trace.name} ${bytes(peak)}`;
  });
  const arena = DATA.hosts[row].arena === null ? "" : `, arenas ${bytes(DATA.hosts[row].arena)}`;
  return `peak of offloaded tensors ${words.join(", ")}${arena}`;
}

// State that a trace does not have and the prediction has: {kind, bytes} of a device, from the bottom up.
function assumedState(owners, trace, row) {
  const [predicted] = DATA.traces;
  if (owners !== DEVICES || trace === predicted) return [];
  return predicted.memory.kinds.flatMap((kind, k) => {
    const missing = STATE.includes(kind) && !trace.memory.kinds.includes(kind) && !hiddenKinds.has(kind);
    const first = (predicted.memory.held[row] || [])[0];
    return missing && first && first[k] > 0 ? [{ kind, bytes: first[k] }] : [];
  });
}

// Greatest visible sum over all traces of one row, and with it the scale of its charts.
function memoryScale(owners, traces, row) {
  let top = 0;
  for (const trace of traces) {
    const memory = owners.of(trace);
    const below = assumedState(owners, trace, row).reduce((sum, state) => sum + state.bytes, 0);
    const keep = memory.kinds.map((kind) => !hiddenKinds.has(kind));
    for (const held of memory.held[row] || []) {
      top = Math.max(top, below + held.reduce((sum, value, k) => sum + (keep[k] ? value : 0), 0));
    }
  }
  const limit = owners.limit(row);
  const near = limit !== undefined && limit <= top * 1.7 && hiddenKinds.size === 0;
  return { top: (near ? Math.max(top, limit) : top) * 1.04 || 1, limit, near };
}

function memoryChart(parent, owners, trace, row, all) {
  const label = `${trace.name} memory of ${owners.name(row)}`;
  const key = owners === DEVICES ? `${trace.name} ${row}` : `${trace.name} host ${row}`;
  const canvas = element("canvas", { role: "img", "aria-label": label, "data-memory": key });
  const name = trace.name === "predicted" ? "Predicted" : "Measured";
  parent.append(element("div", {}, ...(all.length > 1 ? [element("h4", {}, name)] : []), canvas));
  const plot = () => ({ left: 62, width: Math.max(canvas.clientWidth - 64, 10) });
  painted(canvas, MEMORY_HEIGHT, (context) => {
    paintMemory(context, plot(), owners, trace, row, memoryScale(owners, all, row));
  });
  follow(canvas, plot, (x, y, time) => (x < plot().left ? null : describeMemory(owners, trace, row, time)));
}

function lastBefore(times, time) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function describeMemory(owners, trace, row, time) {
  const memory = owners.of(trace);
  const at = lastBefore(memory.times[row] || [], time);
  if (at < 0) return null;
  const held = memory.held[row][at];
  const rows = memory.kinds.map((kind, k) => [kind, bytes(held[k])]).reverse();
  if (held.length > 1) rows.push(["total", bytes(held.reduce((a, b) => a + b, 0))]);
  const limit = owners.limit(row);
  if (limit !== undefined) rows.push(["limit", bytes(limit)]);
  rows.push([`${trace.name} time`, seconds(time)]);
  return { title: `${owners.name(row)} holds`, colour: `var(--mem-saved)`, rows };
}

function paintMemory(context, plot, owners, trace, row, scale) {
  const base = MEMORY_HEIGHT - FOOT;
  const x = (time) => plot.left + ((time - view.from) / (view.to - view.from)) * plot.width;
  const y = (value) => base - (value / scale.top) * (base - HEAD);
  paintMemoryAxes(context, plot, base, x, y, scale);
  context.save();
  context.beginPath();
  context.rect(plot.left, HEAD, plot.width, base - HEAD);
  context.clip();
  const below = paintAssumed(context, plot, assumedState(owners, trace, row), y);
  paintStack(context, owners.of(trace), row, x, y, below);
  paintPointer(context, plot, HEAD, base);
  context.restore();
  if (scale.limit !== undefined) paintLimit(context, plot, y, scale);
}

// The limit's line; its label is above the plot, where there is no curve.
function paintLimit(context, plot, y, scale) {
  const right = plot.left + plot.width;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillStyle = css(colour(scale.near ? "--bad" : "--faint"));
  const text = `limit ${bytes(scale.limit)}${scale.near ? "" : ", above this chart"}`;
  context.fillText(text, right - 2, HEAD / 2 - 1);
  if (!scale.near) return;
  const start = right - 2 - context.measureText(text).width;
  for (let at = start - 24; at < start - 8; at += 9) context.fillRect(at, HEAD / 2 - 2, 5, 1.5);
  for (let at = plot.left; at < right; at += 9) context.fillRect(at, y(scale.limit) - 0.75, 5, 1.5);
}

function paintMemoryAxes(context, plot, base, x, y, scale) {
  context.textBaseline = "middle";
  context.textAlign = "right";
  const step = roundStep(scale.top / 3.2);
  for (let value = 0; value <= scale.top; value += step) {
    context.fillStyle = css(colour("--line"));
    context.fillRect(plot.left, Math.round(y(value)), plot.width, 1);
    context.fillStyle = css(colour("--faint"));
    context.fillText(value === 0 ? "0" : tickText(value, BYTE_UNITS, 3), plot.left - 8, y(value));
  }
  context.textBaseline = "alphabetic";
  for (const tick of ticks(view.from, view.to, plot.width)) {
    const at = x(tick.time);
    context.textAlign = at - plot.left < 30 ? "left" : at > plot.left + plot.width - 34 ? "right" : "center";
    context.fillText(tick.text, at, MEMORY_HEIGHT - 4);
  }
}

// State that was not measured, hatched in its predicted size; returns its height in bytes.
function paintAssumed(context, plot, state, y) {
  let floor = 0;
  for (const { kind, bytes: size } of state) {
    const [top, bottom] = [y(floor + size), y(floor)];
    context.strokeStyle = css(colour(memoryColour(kind)), 0.6);
    context.save();
    context.beginPath();
    context.rect(plot.left, top, plot.width, bottom - top);
    context.clip();
    context.beginPath();
    for (let at = plot.left - (bottom - top); at < plot.left + plot.width; at += 7) {
      context.moveTo(at, bottom);
      context.lineTo(at + (bottom - top), top);
    }
    context.stroke();
    context.restore();
    context.strokeRect(plot.left - 1, top, plot.width + 2, bottom - top);
    floor += size;
  }
  return floor;
}

// One step-shaped band for each kind, from the bottom up; the samples out of sight are left out.
function paintStack(context, memory, row, x, y, below) {
  const times = memory.times[row] || [];
  const held = memory.held[row] || [];
  const first = Math.max(lastBefore(times, view.from), 0);
  const last = Math.max(lastBefore(times, view.to), 0);
  if (times.length === 0) return;
  const floor = new Float64Array(last - first + 1).fill(below);
  const end = x(DATA.end);
  memory.kinds.forEach((kind, k) => {
    if (hiddenKinds.has(kind)) return;
    context.fillStyle = css(colour(memoryColour(kind)), 0.88);
    context.beginPath();
    const under = [];
    for (let i = first; i <= last; i += 1) {
      const left = x(times[i]);
      const right = i === times.length - 1 ? end : x(times[i + 1]);
      const from = floor[i - first];
      floor[i - first] += held[i][k];
      context.lineTo(left, y(floor[i - first]));
      context.lineTo(right, y(floor[i - first]));
      under.push([left, y(from)], [right, y(from)]);
    }
    for (const [px, py] of under.reverse()) context.lineTo(px, py);
    context.fill();
  });
}
