// Canvases of a report: their size, their time axis, pointers, and the details of what is under the pointer.

const MOST_PIXELS = 32000; // sides of a canvas: beyond, browsers draw nothing
const MOST_AREA = 1.2e8;

// A canvas of that height, painted when the view changes.
function painted(canvas, height, paint) {
  const chart = {
    canvas,
    paint: () => {
      const size = typeof height === "function" ? height() : height;
      const { context, width } = prepared(canvas, size);
      if (width > 0) paint(context, width);
    },
  };
  closing.push(view.add(chart));
}

// A canvas as sharp as the screen; returns its context, cleared, with its size in CSS pixels.
function prepared(canvas, height) {
  const width = canvas.clientWidth;
  const sharp = Math.max(window.devicePixelRatio || 1, 1);
  const ratio = Math.min(sharp, MOST_PIXELS / Math.max(height, width, 1), Math.sqrt(MOST_AREA / Math.max(width * height, 1)));
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  return { context, width };
}

// Times at which to write a label: round numbers, about one in every 110 pixels.
function ticks(from, to, width) {
  const rough = ((to - from) * 110) / Math.max(width, 110);
  const step = roundStep(rough);
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to; i += 1) found.push(i * step);
  const [scale, unit] = scaled(Math.max(to, step), TIME_UNITS);
  const places = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
  return found.map((time) => ({ time, text: `${(time / scale).toFixed(places)} ${TIME_UNITS === TIME_UNIT ? "" : unit}`.trim() }));
}

// ---- pointers ----
// A chart has its plot, {left, width}, and describes what is at a position. The rest is the same for all charts.

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
      view.move((centre - now) / plot().width);
      if (spread > 0) view.zoom(spread / Math.max(Math.abs(after[0] - after[1]), 1), time(now));
    } else if (Math.abs(x - start.x) > 4) {
      view.selection = [time(start.x), time(x)].sort((a, b) => a - b);
    }
  };
  const release = (event) => {
    if (start && view.selection) view.look(...view.selection);
    else if (start && event.type === "pointerup" && Math.abs(position(event)[0] - start.x) <= 4) {
      const found = describe(...position(event), time(position(event)[0]));
      view.kept = found && found.microbatch !== null && found.microbatch !== view.kept ? found.microbatch : null;
    }
    held.delete(event.pointerId);
    start = null;
    view.selection = null;
    view.redraw();
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
    view.repaint();
  });
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => {
    view.cursor = view.lit = null;
    tell(null);
    view.repaint();
  });
  canvas.addEventListener("dblclick", () => {
    view.kept = null;
    view.all();
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) view.zoom(Math.exp(event.deltaY * 0.004), time(position(event)[0]));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.move(event.deltaX / plot().width);
    else if (event.shiftKey) view.move(event.deltaY / plot().width);
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.tabIndex = 0;
}

// The details of what is under the pointer, {title, colour, rows: [[name, value], …]}, or nothing. They are at the edge
// of the window that is farther from the pointer, where they cover nothing near it.
function tell(found, event) {
  const details = byId("details");
  details.hidden = !found;
  if (!found) return;
  const title = element("h4", {}, element("i", { style: { background: found.colour } }), found.title);
  const list = element("dl");
  for (const [name, value] of found.rows) list.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  details.replaceChildren(title, list);
  const box = ROOT.getBoundingClientRect();
  details.style.left = `${Math.max(box.left, 0)}px`;
  details.style.width = `${Math.min(box.width, window.innerWidth)}px`;
  details.classList.toggle("top", event.clientY > window.innerHeight / 2);
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
