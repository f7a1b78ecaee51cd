// Memory over time: one stack of kinds for each device or host and trace, on one scale per row, under its limit.

const MEMORY_HEIGHT = DATA.queues.length > MANY ? 104 : 150;
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
    + "Select a kind to leave it out.";
  for (const kind of memoryKinds()) byId("memory-legend").append(memorySwitch(kind));
  // One trace of many devices: two beside each other.
  if (drawn.length === 1 && DATA.queues.length > 2) byId("memory-charts").classList.add("columns");
  DATA.queues.forEach((_, device) => memoryRow(DEVICES, device, drawn));
  const offloading = DATA.traces.filter((trace) => trace.host.kinds.length > 0);
  DATA.hosts.forEach((_, host) => memoryRow(HOSTS, host, offloading));
  for (const kept of DATA.kept) byId("memory-kept").append(element("li", {}, keptLine(kept)));
}

function keptLine({ stage, microbatches, bytes: size, reason, waits_s: waits, copies_s: copies }) {
  const times = waits === null ? "" : ` (${seconds(waits[0], 3)} to ${seconds(waits[1], 3)}; ${seconds(copies, 3)})`;
  return `Stage ${stage} keeps ${bytes(size)} of ${microbatches} microbatches on the device: ${reason}${times}.`;
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
    repaint();
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

// Greatest visible sum over all traces of one row, and with it the scale of its charts.
function memoryScale(owners, traces, row) {
  let top = 0;
  for (const memory of traces.map(owners.of)) {
    const keep = memory.kinds.map((kind) => !hiddenKinds.has(kind));
    for (const held of memory.held[row] || []) {
      top = Math.max(top, held.reduce((sum, value, k) => sum + (keep[k] ? value : 0), 0));
    }
  }
  const limit = owners.limit(row);
  const near = limit !== undefined && limit <= top * 1.7 && hiddenKinds.size === 0;
  return { top: (near ? Math.max(top, limit) : top) * 1.08 || 1, limit, near };
}

function memoryChart(parent, owners, trace, row, all) {
  const label = `${trace.name} memory of ${owners.name(row)}`;
  const key = owners === DEVICES ? `${trace.name} ${row}` : `${trace.name} host ${row}`;
  const canvas = element("canvas", { role: "img", "aria-label": label, "data-memory": key });
  const name = trace.name === "predicted" ? "Predicted" : "Measured";
  parent.append(element("div", {}, ...(all.length > 1 ? [element("h4", {}, name)] : []), canvas));
  const plot = () => ({ left: 58, width: Math.max(canvas.clientWidth - 60, 10) });
  painted(canvas, MEMORY_HEIGHT, (context) => {
    paintMemory(context, plot(), owners.of(trace), row, memoryScale(owners, all, row));
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
  rows.push([`${trace.name} time`, seconds(time)]);
  return { title: `${owners.name(row)} holds`, colour: `var(--mem-saved)`, rows };
}

function paintMemory(context, plot, memory, device, scale) {
  const base = MEMORY_HEIGHT - 20;
  const x = (time) => plot.left + ((time - view.from) / (view.to - view.from)) * plot.width;
  const y = (value) => base - (value / scale.top) * (base - 6);
  paintMemoryAxes(context, plot, base, x, y, scale);
  context.save();
  context.beginPath();
  context.rect(plot.left, 0, plot.width, base);
  context.clip();
  paintStack(context, memory, device, x, y);
  paintPointer(context, plot, 0, base);
  context.restore();
  if (scale.limit === undefined) return;
  context.fillStyle = css(colour("--bad"));
  context.textAlign = "right";
  context.textBaseline = "bottom";
  if (scale.near) {
    for (let at = plot.left; at < plot.left + plot.width; at += 9) context.fillRect(at, y(scale.limit), 5, 1.5);
    context.textBaseline = y(scale.limit) < 18 ? "top" : "bottom";
    context.fillText(`limit ${bytes(scale.limit)}`, plot.left + plot.width - 2, y(scale.limit) + (y(scale.limit) < 18 ? 4 : -2));
  } else {
    context.fillStyle = css(colour("--faint"));
    context.textBaseline = "top";
    context.fillText(`limit ${bytes(scale.limit)} ↑`, plot.left + plot.width - 2, 0);
  }
}

function paintMemoryAxes(context, plot, base, x, y, scale) {
  context.textBaseline = "middle";
  context.textAlign = "right";
  const power = 10 ** Math.floor(Math.log10(scale.top / 2));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= scale.top / 3.2);
  for (let value = 0; value <= scale.top; value += step) {
    context.fillStyle = css(colour("--line"));
    context.fillRect(plot.left, Math.round(y(value)), plot.width, 1);
    context.fillStyle = css(colour("--faint"));
    context.fillText(value === 0 ? "0" : bytes(value), plot.left - 8, y(value));
  }
  context.textBaseline = "alphabetic";
  for (const tick of ticks(view.from, view.to, plot.width)) {
    const at = x(tick.time);
    context.textAlign = at - plot.left < 30 ? "left" : at > plot.left + plot.width - 34 ? "right" : "center";
    context.fillText(tick.text, at, MEMORY_HEIGHT - 4);
  }
}

// One step-shaped band for each kind, from the bottom up; the samples out of sight are left out.
function paintStack(context, memory, device, x, y) {
  const times = memory.times[device] || [];
  const held = memory.held[device] || [];
  const first = Math.max(lastBefore(times, view.from), 0);
  const last = Math.max(lastBefore(times, view.to), 0);
  if (times.length === 0) return;
  const floor = new Float64Array(last - first + 1);
  memory.kinds.forEach((kind, k) => {
    if (hiddenKinds.has(kind)) return;
    context.fillStyle = css(colour(memoryColour(kind)), 0.88);
    context.beginPath();
    const below = [];
    for (let i = first; i <= last; i += 1) {
      const left = x(times[i]);
      const right = i === times.length - 1 ? x(FULL) : x(times[i + 1]);
      const from = floor[i - first];
      floor[i - first] += held[i][k];
      context.lineTo(left, y(floor[i - first]));
      context.lineTo(right, y(floor[i - first]));
      below.push([left, y(from)], [right, y(from)]);
    }
    for (const [px, py] of below.reverse()) context.lineTo(px, py);
    context.fill();
  });
}
