// What all charts share: the span of time in sight, the pointer's time, and the microbatch that is lit.

const FULL = Math.max(...DATA.traces.flatMap((trace) => [trace.step, ...trace.events.end.slice(-1)]),
  ...DATA.traces.map((trace) => trace.events.end.reduce((a, b) => Math.max(a, b), 0)), 1e-9) * 1.01;
const SHORTEST = FULL / 20000;

const view = { from: 0, to: FULL, cursor: null, lit: null, kept: null, selection: null };
const painters = [];
const NEAR = 300; // pixels beyond the window that are painted in advance
let waiting = false;

function repaint() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const paint of painters) paint();
  });
}

// A canvas of that height, painted whenever the view changes, as long as it is in sight: of many charts few are.
function painted(canvas, height, paint) {
  painters.push(() => {
    const size = typeof height === "function" ? height() : height;
    canvas.style.height = `${size}px`;
    const box = canvas.getBoundingClientRect();
    if (box.bottom < -NEAR || box.top > window.innerHeight + NEAR) return;
    const { context, width } = prepared(canvas, size);
    paint(context, width);
  });
}

function look(from, to) {
  const length = Math.min(Math.max(to - from, SHORTEST), FULL);
  view.from = Math.min(Math.max(from, 0), FULL - length);
  view.to = view.from + length;
  repaint();
}

function zoom(factor, around = (view.from + view.to) / 2) {
  look(around - (around - view.from) * factor, around + (view.to - around) * factor);
}

function move(share) {
  const by = (view.to - view.from) * share;
  look(view.from + by, view.to + by);
}

// Times at which to write a label: round numbers, about one in every 110 pixels.
function ticks(from, to, width) {
  const rough = ((to - from) * 110) / Math.max(width, 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to; i += 1) found.push(i * step);
  const [scale, unit] = scaled(Math.max(to, step), TIME_UNITS);
  const places = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
  return found.map((time) => ({ time, text: `${(time / scale).toFixed(places)} ${unit}` }));
}

// A canvas as sharp as the screen; returns its context, cleared, with its size in CSS pixels.
function prepared(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  return { context, width };
}

// ---- pointers ----
// A chart says where its plot lies: {left, width}. Everything else about pointers is the same for all.

function follow(canvas, plot, describe) {
  const held = new Map();
  let start = null;
  const time = (x) => {
    const { left, width } = plot();
    return view.from + ((x - left) / width) * (view.to - view.from);
  };
  const position = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const drag = (event) => {
    const [x] = position(event);
    if (event.pointerType === "touch" || start.moves) {
      const before = [...held.values()];
      const centre = before.reduce((sum, point) => sum + point, 0) / before.length;
      const spread = before.length > 1 ? Math.abs(before[0] - before[1]) : 0;
      held.set(event.pointerId, x);
      const after = [...held.values()];
      const now = after.reduce((sum, point) => sum + point, 0) / after.length;
      move((centre - now) / plot().width);
      if (spread > 0) zoom(spread / Math.max(Math.abs(after[0] - after[1]), 1), time(now));
    } else if (Math.abs(x - start.x) > 4) {
      view.selection = [time(start.x), time(x)].sort((a, b) => a - b);
    }
  };
  const release = (event) => {
    if (start && view.selection) look(...view.selection);
    else if (start && event.type === "pointerup" && Math.abs(position(event)[0] - start.x) <= 4) {
      const found = describe(...position(event), time(position(event)[0]));
      view.kept = found && found.microbatch !== null && found.microbatch !== view.kept ? found.microbatch : null;
    }
    held.delete(event.pointerId);
    start = null;
    view.selection = null;
    repaint();
  };
  canvas.addEventListener("pointerdown", (event) => {
    const [x] = position(event);
    held.set(event.pointerId, x);
    start = { x, moves: event.shiftKey };
    if (event.pointerType !== "touch") canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (start && held.has(event.pointerId)) drag(event);
    const [x, y] = position(event);
    view.cursor = x >= plot().left ? time(x) : null;
    const found = start && (view.selection || start.moves) ? null : describe(x, y, time(x));
    view.lit = found && found.microbatch !== undefined ? found.microbatch : null;
    tell(found, event);
    repaint();
  });
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => {
    view.cursor = view.lit = null;
    tell(null);
    repaint();
  });
  canvas.addEventListener("dblclick", () => {
    view.kept = null;
    look(0, FULL);
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.004), time(position(event)[0]));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / plot().width);
    else if (event.shiftKey) move(event.deltaY / plot().width);
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.tabIndex = 0;
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => look(0, FULL),
      ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), Escape: () => { view.kept = null; look(0, FULL); } };
    if (!act[event.key] || event.ctrlKey || event.metaKey) return;
    act[event.key]();
    event.preventDefault();
  });
}

// The tooltip: {title, colour, rows: [[name, value], …]}, or nothing.
function tell(found, event) {
  const tip = byId("tip");
  tip.hidden = !found;
  if (!found) return;
  const title = element("h4", {}, element("i", { style: { background: found.colour } }), found.title);
  const list = element("dl");
  for (const [name, value] of found.rows) list.append(element("dt", {}, name), element("dd", {}, value));
  tip.replaceChildren(title, list);
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 18 + box.width > window.innerWidth ? event.clientX - 14 - box.width : event.clientX + 18;
  const top = Math.min(event.clientY + 16, window.innerHeight - box.height - 8);
  tip.style.left = `${Math.max(left, 6)}px`;
  tip.style.top = `${Math.max(top, 6)}px`;
}

// The shared cursor and the span that is being selected.
function paintPointer(context, plot, top, bottom) {
  const at = (t) => plot.left + ((t - view.from) / (view.to - view.from)) * plot.width;
  if (view.selection) {
    const [a, b] = view.selection.map(at);
    context.fillStyle = css(colour("--kind-f"), 0.14);
    context.fillRect(a, top, b - a, bottom - top);
  } else if (view.cursor !== null && view.cursor >= view.from && view.cursor <= view.to) {
    context.fillStyle = css(colour("--ink"), 0.45);
    context.fillRect(Math.round(at(view.cursor)), top, 1, bottom - top);
  }
}
