// Gantt charts: a group of rows for each device; in it a strip of phases, the compute row, and a thin row for each
// other queue. Hue is the kind, lighter shades are a device's later stages, the label is the microbatch.

const COMPUTE = "compute";
const MANY = 8; // devices, from which on rows are lower
const ROW = DATA.queues.length > MANY
  ? { phase: 2, compute: 20, queue: 6, gap: 2, group: 8, axis: 26 }
  : { phase: 3, compute: 28, queue: 9, gap: 3, group: 16, axis: 26 };
const chunks = new Map();
for (const stage of DATA.plan.stages) {
  chunks.set(stage.index, DATA.plan.stages.filter((s) => s.device === stage.device && s.index < stage.index).length);
}
const MOST_CHUNKS = Math.max(1, ...[...chunks.values()].map((chunk) => chunk + 1));
let communication = DATA.queues.length <= 4;
let matching = null; // the stages that a search found

function tone(kind, stage, microbatch) {
  const lighter = MOST_CHUNKS > 1 ? (0.5 * (chunks.get(stage) || 0)) / (MOST_CHUNKS - 1) : 0;
  return shade(kind, lighter, microbatch !== null && microbatch % 2 === 1);
}

// Events of each row, by start; found again from the other chart by their key.
function indexed(trace) {
  const events = trace.events;
  const rows = new Map();
  const keys = new Map();
  for (let i = 0; i < events.start.length; i += 1) {
    const row = `${events.device[i]} ${events.queue[i]}`;
    if (!rows.has(row)) rows.set(row, []);
    rows.get(row).push(i);
    keys.set(keyOf(events, i), i);
  }
  for (const row of rows.values()) row.sort((a, b) => events.start[a] - events.start[b] || a - b);
  const longest = events.start.reduce((most, start, i) => Math.max(most, events.end[i] - start), 0);
  return { trace, rows, keys, longest };
}

function keyOf(events, i) {
  return [events.device[i], events.kind[i], events.stage[i], events.microbatch[i], events.peer[i]].join(" ");
}

function layout(narrow) {
  const rows = [];
  let y = ROW.axis;
  DATA.queues.forEach((queues, device) => {
    const top = y;
    y += ROW.phase + ROW.gap;
    const names = queues.includes(COMPUTE) ? queues : [COMPUTE, ...queues];
    for (const queue of names) {
      if (queue !== COMPUTE && !communication) continue;
      const height = queue === COMPUTE ? ROW.compute : ROW.queue;
      rows.push({ device, queue, y, height, key: `${device} ${queue}`, top });
      y += height + ROW.gap;
    }
    y += ROW.group - ROW.gap;
  });
  return { rows, height: y - ROW.group + 6, left: narrow ? 62 : 116 };
}

function gantt(parent, index, other) {
  const { trace } = index;
  const canvas = element("canvas", { role: "img", "aria-label": `Gantt chart, ${trace.name}`, "data-chart": trace.name });
  const label = trace.name === "predicted" ? "Predicted" : "Measured";
  const detail = stepLine(trace);
  parent.append(element("div", { class: "chart" }, element("h3", {}, label, element("span", {}, detail)), canvas));
  let shape = layout(false);
  const plot = () => ({ left: shape.left, width: Math.max(canvas.clientWidth - shape.left - 2, 10) });

  painted(canvas, () => {
    shape = layout(canvas.clientWidth < 560);
    return shape.height;
  }, (context, width) => paintGantt(context, width, shape, plot(), index));
  follow(canvas, plot, (x, y, time) => {
    const row = shape.rows.find((r) => y >= r.y - 1 && y < r.y + r.height + 2);
    if (!row || x < shape.left) return null;
    const hit = hitEvent(index, row, time, (view.to - view.from) / plot().width);
    return hit === null ? null : describeEvent(index, other, hit);
  });
}

// The step time, which is the same everywhere in the report; a step that was traced may differ from the median.
function stepLine(trace) {
  const headline = trace.name === "predicted" ? DATA.step.predicted : DATA.step.measured;
  const own = Math.abs(trace.step / headline - 1) > 5e-4 ? `; the one drawn here took ${seconds(trace.step)}` : "";
  return `step ${seconds(headline)}${own}`;
}

function hitEvent(index, row, time, pixel) {
  const { events } = index.trace;
  let best = null;
  for (const i of index.rows.get(row.key) || []) {
    if (events.start[i] > time + pixel) break;
    if (Math.max(events.end[i], events.start[i] + pixel) >= time) best = i;
  }
  return best;
}

function describeEvent(index, other, i) {
  const { events } = index.trace;
  const kind = events.kind[i];
  const length = events.end[i] - events.start[i];
  const batch = events.microbatch[i] === null ? "" : ` · microbatch ${events.microbatch[i]}`;
  const rows = [["stage", `${events.stage[i]} on device ${events.device[i]}`]];
  if (events.peer[i] !== null) rows.push([kind.startsWith("SEND") ? "to" : "from", `stage ${events.peer[i]}`]);
  if (events.bytes[i]) rows.push(["bytes", bytes(events.bytes[i])]);
  rows.push([`${index.trace.name} start`, seconds(events.start[i])], ["end", seconds(events.end[i])]);
  rows.push(["duration", seconds(length)]);
  const j = other ? other.keys.get(keyOf(events, i)) : undefined;
  if (j !== undefined) {
    const found = other.trace.events;
    const theirs = found.end[j] - found.start[j];
    rows.push([`${other.trace.name} start`, seconds(found.start[j])], ["duration", seconds(theirs)]);
    const measured = other.trace.name === "measured";
    const off = (ours, own) => difference(measured ? ours - own : own - ours);
    if (isMessage(kind)) {
      // A measured message may end when its reader has waited for it: its duration is not that of the transfer.
      rows.push(["predicted starts off by", off(events.start[i], found.start[j])], ["ends off by", off(events.end[i], found.end[j])]);
    } else {
      const [guess, truth] = measured ? [length, theirs] : [theirs, length];
      if (truth > 0) rows.push(["error", guess === truth ? signed(0) : `${signed(guess / truth - 1)} (${difference(guess - truth)})`]);
    }
  } else if (other) rows.push([`not ${other.trace.name}`, ""]);
  return { title: `${kindName(kind)}${batch}`, colour: tone(kind, events.stage[i], null).fill, rows,
    microbatch: events.microbatch[i] };
}

function paintGantt(context, width, shape, plot, index) {
  const scale = plot.width / (view.to - view.from);
  const x = (time) => plot.left + (time - view.from) * scale;
  paintAxis(context, plot, shape.height, x, index.trace.step);
  paintNames(context, shape);
  context.save();
  context.beginPath();
  context.rect(plot.left, 0, plot.width, shape.height);
  context.clip();
  for (const row of shape.rows) {
    context.fillStyle = css(colour("--lane"));
    context.fillRect(plot.left, row.y, plot.width, row.height);
    if (row.queue === COMPUTE) paintPhases(context, row, index.trace.phases[row.device], x);
    paintRow(context, row, index, x, scale);
  }
  paintPointer(context, plot, ROW.axis - 4, shape.height);
  context.restore();
}

function paintAxis(context, plot, height, x, step) {
  context.textBaseline = "alphabetic";
  for (const tick of ticks(view.from, view.to, plot.width)) {
    const at = Math.round(x(tick.time));
    context.fillStyle = css(colour("--line"));
    context.fillRect(at, ROW.axis - 8, 1, height - ROW.axis + 8);
    context.fillStyle = css(colour("--faint"));
    context.textAlign = at - plot.left < 30 ? "left" : at > plot.left + plot.width - 34 ? "right" : "center";
    context.fillText(tick.text, at, 13);
  }
  const end = Math.round(x(step));
  if (end >= plot.left && end <= plot.left + plot.width) {
    context.fillStyle = css(colour("--ink"), 0.7);
    context.fillRect(end, ROW.axis - 8, 1.5, height - ROW.axis + 8);
  }
}

// Ascending numbers as text, three or more in a row as a range: "0, 3–6".
function ranges(numbers) {
  const runs = [];
  for (const number of numbers) {
    const run = runs[runs.length - 1];
    if (run && number === run[1] + 1) run[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([from, to]) => (from === to ? `${from}` : to === from + 1 ? `${from}, ${to}` : `${from}–${to}`)).join(", ");
}

function paintNames(context, shape) {
  const narrow = shape.left < 100;
  for (const row of shape.rows) {
    context.textBaseline = "middle";
    if (row.queue === COMPUTE) {
      const held = DATA.plan.held[row.device];
      context.textAlign = "left";
      context.fillStyle = css(colour("--ink"));
      context.font = "600 13px system-ui, sans-serif";
      context.fillText(narrow ? `dev ${row.device}` : `device ${row.device}`, 0, row.y + 8);
      context.fillStyle = css(colour("--faint"));
      context.font = "12px system-ui, sans-serif";
      const word = narrow ? "st" : held.length === 1 ? "stage" : "stages";
      context.fillText(`${word} ${ranges(held)}`, 0, row.y + 23, shape.left - 8);
    } else {
      context.textAlign = "right";
      context.fillStyle = css(colour("--faint"));
      context.font = "10px system-ui, sans-serif";
      const short = row.queue.replace("send to ", "→ ").replace("receive from ", "← ");
      context.fillText(narrow ? short : row.queue, shape.left - 8, row.y + row.height / 2 + 0.5);
    }
  }
  context.font = "12px system-ui, sans-serif";
}

function paintPhases(context, row, phases, x) {
  if (!phases) return;
  const parts = [[0, phases.warm, "--phase-warm"], [phases.warm, phases.cool, "--phase-steady"],
    [phases.cool, phases.end, "--phase-cool"]];
  for (const [from, to, name] of parts) {
    if (to <= from) continue;
    context.fillStyle = css(colour(name));
    context.fillRect(x(from) + 0.5, row.top, Math.max(x(to) - x(from) - 1, 1), ROW.phase);
  }
}

function paintRow(context, row, index, x, scale) {
  const { events } = index.trace;
  const bright = view.lit !== null ? view.lit : view.kept;
  const labelled = row.queue === COMPUTE;
  let painted = -Infinity;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const found = index.rows.get(row.key) || [];
  for (let at = firstInSight(index, found); at < found.length; at += 1) {
    const i = found[at];
    if (events.start[i] > view.to) break;
    if (events.end[i] < view.from) continue;
    const left = x(events.start[i]);
    const wide = (events.end[i] - events.start[i]) * scale;
    const right = left + Math.max(wide - (wide > 4 ? 1 : 0), 0.8);
    const isLit = (bright === null || events.microbatch[i] === bright) && (!matching || matching.has(events.stage[i]));
    // Below a third of a pixel of new ink nothing would be seen.
    if (right - painted < 0.34 && !((bright !== null || matching) && isLit)) continue;
    painted = Math.max(painted, right);
    const shown = tone(events.kind[i], events.stage[i], events.microbatch[i]);
    context.fillStyle = isLit ? shown.fill : shown.dim;
    context.fillRect(left, row.y, right - left, row.height);
    if (labelled && wide > 13 && isLit) paintLabel(context, row, events, i, Math.max(left, x(view.from)), right, shown.ink);
  }
}

// Position in a row of the first event that may be in sight: none before it lasts until the left edge.
function firstInSight(index, row) {
  const { start } = index.trace.events;
  let low = 0;
  let high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[row[middle]] < view.from - index.longest) low = middle + 1;
    else high = middle;
  }
  return low;
}

function paintLabel(context, row, events, i, left, right, ink) {
  const kind = events.kind[i];
  const batch = events.microbatch[i] === null ? "" : ` ${events.microbatch[i]}`;
  const stage = MOST_CHUNKS > 1 ? `  stage ${events.stage[i]}` : "";
  const choices = [`${kind}${batch}${stage}`, `${kind}${batch}`, batch.trim()];
  const room = Math.min(right, row.right || right) - left - 4;
  const text = choices.find((choice) => choice && context.measureText(choice).width <= room);
  if (!text) return;
  context.fillStyle = ink;
  context.fillText(text, (left + right) / 2, row.y + row.height / 2 + 0.5);
}
