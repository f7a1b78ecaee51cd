// Time against memory: every schedule is a point, and a click asks for it. The line joins those that no other beats.

const PLOT = { width: 620, widest: 760, height: 300, left: 62, right: 14, top: 28, bottom: 42 };

function bestOf(points) {
  const best = [];
  for (const point of [...points].sort((a, b) => a.memory - b.memory || a.time - b.time)) {
    if (!best.length || point.time < best[best.length - 1].time * (1 - 1e-9)) best.push(point);
  }
  return best;
}

// Draws the points in an element.
//   units: of time and memory, and their names; limit: of memory, or null; chosen: the question that is shown; choose: called with a point.
function drawFrontier(box, points, { units, limit, chosen, choose }) {
  if (points.length === 0) {
    box.replaceChildren();
    return;
  }
  PLOT.width = Math.min(box.clientWidth || PLOT.width, PLOT.widest);
  const time = (value) => amount(value, units.time, 3);
  const memory = (value) => amount(value, units.memory, 3);
  const xs = [...points.map((point) => point.memory), ...(limit === null ? [] : [limit])];
  const ys = points.map((point) => point.time);
  const [x, xTicks] = axis(Math.min(...xs), Math.max(...xs), PLOT.left, PLOT.width - PLOT.right);
  const [y, yTicks] = axis(Math.min(...ys), Math.max(...ys), PLOT.height - PLOT.bottom, PLOT.top);
  const frame = svg("svg", { viewBox: `0 0 ${PLOT.width} ${PLOT.height}`, width: PLOT.width, height: PLOT.height, role: "group", "aria-label": "Time against memory of all schedules" });
  for (const tick of yTicks) {
    frame.append(svg("line", { x1: PLOT.left, x2: PLOT.width - PLOT.right, y1: y(tick), y2: y(tick), class: "axis" }));
    frame.append(svg("text", { x: PLOT.left - 8, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick, units.time, 3)));
  }
  for (const tick of xTicks) frame.append(svg("text", { x: x(tick), y: PLOT.height - PLOT.bottom + 18, "text-anchor": "middle" }, tickText(tick, units.memory, 3)));
  frame.append(svg("text", { x: PLOT.width - PLOT.right, y: PLOT.height - 4, "text-anchor": "end" }, `memory of the fullest device${units.memoryIs} →`));
  frame.append(svg("text", { x: 0, y: 12 }, `↑ step time${units.timeIs}`));
  if (limit !== null) {
    frame.append(svg("line", { x1: x(limit), x2: x(limit), y1: PLOT.top, y2: PLOT.height - PLOT.bottom, class: "limit" }));
  }
  const best = bestOf(points);
  const steps = best.map((point, i) => `${i ? `H${x(point.memory).toFixed(1)}V` : `M${x(point.memory).toFixed(1)} `}${y(point.time).toFixed(1)}`);
  frame.append(svg("path", { d: steps.join(""), class: "best" }));
  const names = svg("g");
  const spots = [];
  const isChosen = (point) => sameQuestion(point.question, chosen);
  const ordered = [...points].sort((a, b) => isChosen(b) - isChosen(a) || best.includes(b) - best.includes(a));
  const places = ordered.map((point) => freeSpot([x(point.memory), y(point.time)], spots));
  const taken = spots.map(([px, py]) => [px - 4, py - 4, px + 4, py + 4]);
  ordered.forEach((point, number) => {
    const at = places[number];
    const kind = [point.family === "auto" ? "auto" : "", isChosen(point) ? "chosen" : ""].join(" ");
    const node = svg("circle", { cx: at[0], cy: at[1], r: best.includes(point) ? 6 : 4.5, class: `point ${kind}`, tabindex: 0, role: "button",
      "data-name": point.name, "data-family": point.family });
    const words = `${point.name}: ${time(point.time)}, ${memory(point.memory)}, bubble ${percent(point.bubble)}`;
    node.setAttribute("aria-label", words);
    node.append(svg("title", {}, words));
    node.addEventListener("click", () => choose(point));
    node.addEventListener("keydown", (event) => ["Enter", " "].includes(event.key) && choose(point));
    frame.append(node);
    nameNear(names, point, at, taken, isChosen(point));
  });
  frame.append(names);
  box.replaceChildren(frame);
}

// The point's place, or next to it where others of the same time and memory are, which would cover it.
function freeSpot([x, y], spots) {
  while (spots.some((spot) => Math.hypot(spot[0] - x, spot[1] - y) < 5)) x += 10;
  spots.push([x, y]);
  return [x, y];
}

// Write a point's name where no other name is: next to it, or above or below it, with a line to it.
function nameNear(names, point, [x, y], taken, chosen) {
  const label = shortName(point);
  const wide = (chosen ? 7.2 : 6.3) * label.length;
  const places = [0, 15, 30, 45, 60, 75, 90, 105, 120].flatMap((far) => [[x + 9, y - 7 - far, "start"], [x - 9, y - 7 - far, "end"],
    [x + 9, y + 16 + far, "start"], [x - 9, y + 16 + far, "end"]]);
  for (const [px, py, anchor] of places) {
    const left = anchor === "start" ? px : px - wide;
    const box = [left, py - 11, left + wide, py + 3];
    const inside = box[0] > PLOT.left && box[2] < PLOT.width && box[1] > 0 && box[3] < PLOT.height - PLOT.bottom + 4;
    if (!inside || taken.some((other) => box[0] < other[2] && box[2] > other[0] && box[1] < other[3] && box[3] > other[1])) continue;
    taken.push(box);
    if (Math.abs(py - y) > 16) names.append(svg("line", { x1: x, y1: y, x2: px - Math.sign(px - x), y2: py + (py < y ? 3 : -10), class: "lead-line" }));
    names.append(svg("text", { x: px, y: py, "text-anchor": anchor, class: `name ${chosen ? "chosen" : ""}` }, label));
    return;
  }
}

const shortName = (point) => (point.family === "auto" ? "auto" : point.family || point.name);

function axis(low, high, from, to) {
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  const [bottom, top] = [Math.max(low - pad, 0), high + pad];
  const step = roundStep((top - bottom) / 4);
  const ticks = [];
  for (let i = Math.ceil(bottom / step); i * step <= top; i += 1) ticks.push(i * step);
  return [(value) => from + ((value - bottom) / (top - bottom)) * (to - from), ticks];
}

const plainText = (question) => JSON.stringify(Object.entries(question ?? {}).filter(([, value]) => value != null
  && JSON.stringify(value) !== "{}").sort(([a], [b]) => (a < b ? -1 : 1)));

function sameQuestion(one, other) {
  return Boolean(one && other) && plainText(complete(one)) === plainText(complete(other));
}
