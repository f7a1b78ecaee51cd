// Curves over the steps of training: loss, and measured step times with the prediction.

function curves() {
  if (DATA.losses.length === 0 && DATA.stepTimes.length === 0) return;
  show("training");
  if (DATA.losses.length > 0) lossCurve();
  if (DATA.stepTimes.length > 0) stepTimes();
}

// Axes of a curve: returns {frame, x, y}. Steps count from 1.
function axes(values, count, format, floor) {
  const known = values.filter((value) => value !== null);
  const low = floor === undefined ? Math.min(...known) : floor;
  const high = Math.max(...known);
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  const [least, most] = [floor === undefined ? low - pad : floor, high + pad];
  const step = roundStep((most - least) / 4);
  const [first, last] = [Math.floor(least / step + 1e-9), Math.ceil(most / step - 1e-9)];
  const [bottom, top] = [first * step, last * step];
  const frame = svg("svg", { viewBox: "0 0 540 240", role: "img" });
  const x = (i) => 62 + (count > 1 ? i / (count - 1) : 0.5) * 462;
  const y = (value) => 206 - ((value - bottom) / (top - bottom)) * 192;
  for (let i = first; i <= last; i += 1) {
    const value = i * step;
    frame.append(svg("line", { x1: 62, x2: 530, y1: y(value), y2: y(value), class: "axis" }));
    frame.append(svg("text", { x: 54, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  const marks = count > 1 ? [0, Math.floor((count - 1) / 2), count - 1] : [0];
  for (const i of new Set(marks)) {
    const name = i === 0 ? "step 1" : String(i + 1);
    frame.append(svg("text", { x: x(i), y: 228, "text-anchor": i === 0 ? "start" : i === count - 1 ? "end" : "middle" }, name));
  }
  return { frame, x, y };
}

function path(values, x, y) {
  let pen = "M";
  const words = [];
  values.forEach((value, i) => {
    if (value === null) { pen = "M"; return; }
    words.push(`${pen}${x(i).toFixed(1)} ${y(value).toFixed(1)}`);
    pen = "L";
  });
  return words.join("");
}

function lossCurve() {
  const losses = DATA.losses;
  const reference = DATA.referenceLosses;
  const all = [...losses, ...reference];
  const { frame, x, y } = axes(all, Math.max(losses.length, reference.length), (v) => significant(v, 3));
  frame.setAttribute("aria-label", "Loss of each training step");
  frame.append(svg("path", { d: path(losses, x, y), class: "curve" }));
  if (reference.length) frame.append(svg("path", { d: path(reference, x, y), class: "reference" }));
  const known = losses.filter((value) => value !== null);
  const words = known.length ? `${significant(known[0])} → ${significant(known[known.length - 1])} in ${plural(losses.length, "step")}` : "";
  byId("curves").append(titled("Loss", words, frame,
    reference.length ? [["--kind-f", "pipeline"], ["--kind-b", "one process"]] : []));
}

function stepTimes() {
  const times = DATA.stepTimes;
  const { frame, x, y } = axes([...times, DATA.step.predicted], times.length, (v) => seconds(v, 3), 0);
  frame.setAttribute("aria-label", "Measured time of each step");
  const rule = y(DATA.step.predicted);
  times.forEach((value, i) => {
    if (value === null) return;
    const dot = svg("circle", { cx: x(i), cy: y(value), r: times.length > 120 ? 2 : 4, class: "dot" });
    dot.append(svg("title", {}, `step ${i + 1}: ${seconds(value)}`));
    frame.append(dot);
  });
  frame.append(svg("line", { x1: 62, x2: 530, y1: rule, y2: rule, class: "rule" }));
  byId("curves").append(titled("Step time", `median ${seconds(DATA.step.measured)} of ${times.length}`, frame,
    [["--kind-f", "measured"], ["--kind-b", "predicted"]]));
}

function titled(title, words, frame, legend) {
  const items = legend.map(([name, text]) => element("span", { class: "item" },
    element("span", { class: "swatch thin", style: { background: `var(${name})` } }), text));
  const head = element("h3", {}, title, element("span", {}, words));
  return element("div", { class: "chart" }, head, frame, element("div", { class: "legend" }, ...items));
}
