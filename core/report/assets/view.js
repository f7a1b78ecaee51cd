// The span of time in sight, the pointer's time and the microbatch that is lit. Reports with one view are linked: they
// show the same span, and a cursor at the same time.

const SHORTEST = 1 / 20000; // of the whole span
const NEAR = 300; // pixels beyond the window that are painted in advance
const BATCH_MS = 12; // of painting charts out of sight, at a time

function timeView() {
  const charts = new Set();
  const spans = new Map(); // report → the time it shows
  let waiting = false;
  let behind = false;
  const view = { from: 0, to: 1e-9, full: 1e-9, cursor: null, lit: null, kept: null, found: null, selection: null };

  // A report that shows this much time; the span follows if it was the whole.
  view.include = (report, time) => {
    const whole = view.from === 0 && view.to === view.full;
    if (time === null) spans.delete(report);
    else spans.set(report, time);
    view.full = Math.max(1e-9, ...spans.values()) * 1.01;
    if (whole) [view.from, view.to] = [0, view.full];
    else view.look(view.from, view.to);
  };

  // A chart is {canvas, paint}; paint draws all of it. Returns a function that removes it.
  view.add = (chart) => {
    charts.add(chart);
    chart.stale = true;
    return () => charts.delete(chart);
  };

  const inSight = ({ canvas }) => {
    const box = canvas.getBoundingClientRect();
    return box.bottom >= -NEAR && box.top <= window.innerHeight + NEAR;
  };
  const draw = (chart) => {
    chart.stale = false;
    chart.paint();
  };

  // Paint what is in sight, in the next frame.
  view.repaint = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      for (const chart of charts) if (inSight(chart)) draw(chart);
    });
  };

  // Paint everything anew: first what is in sight, then the rest, a few milliseconds at a time, so that a page that is
  // printed or photographed as a whole has all charts.
  view.redraw = () => {
    for (const chart of charts) chart.stale = true;
    view.repaint();
    if (!behind) {
      behind = true;
      setTimeout(view.paintRest, 30);
    }
  };
  view.paintRest = () => {
    const end = performance.now() + BATCH_MS;
    for (const chart of charts) {
      if (!chart.stale) continue;
      if (performance.now() > end) {
        setTimeout(view.paintRest, 0);
        return;
      }
      draw(chart);
    }
    behind = false;
  };
  view.paintAll = () => {
    for (const chart of charts) draw(chart);
  };

  view.look = (from, to) => {
    const length = Math.min(Math.max(to - from, view.full * SHORTEST), view.full);
    view.from = Math.min(Math.max(from, 0), view.full - length);
    view.to = view.from + length;
    view.redraw();
    view.onlook?.();
  };
  view.all = () => view.look(0, view.full);
  view.zoom = (factor, around = (view.from + view.to) / 2) => (
    view.look(around - (around - view.from) * factor, around + (view.to - around) * factor));
  view.move = (share) => {
    const by = (view.to - view.from) * share;
    view.look(view.from + by, view.to + by);
  };

  listen(view);
  return view;
}

// W and S zoom around the cursor, A and D move, as in Perfetto; so do + and −, and the arrows.
const KEYS = {
  w: (view) => view.zoom(0.7, view.cursor ?? undefined), s: (view) => view.zoom(1 / 0.7, view.cursor ?? undefined),
  a: (view) => view.move(-0.15), d: (view) => view.move(0.15),
  "+": (view) => view.zoom(0.6), "=": (view) => view.zoom(0.6), "-": (view) => view.zoom(1 / 0.6), 0: (view) => view.all(),
  ArrowLeft: (view) => view.move(-0.2), ArrowRight: (view) => view.move(0.2),
  Escape: (view) => { view.kept = view.found = null; view.all(); },
};
const ONLY_ON_CHARTS = new Set(["ArrowLeft", "ArrowRight", "Escape"]);

function listen(view) {
  window.addEventListener("keydown", (event) => {
    const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    const typing = event.target.closest("input, select, textarea, [contenteditable]");
    const elsewhere = ONLY_ON_CHARTS.has(event.key) && !event.target.closest("canvas");
    if (!act || typing || elsewhere || event.ctrlKey || event.metaKey || event.altKey) return;
    act(view);
    event.preventDefault();
  });
  window.addEventListener("scroll", view.repaint, { passive: true });
  window.addEventListener("resize", view.redraw);
  const scheme = () => {
    forgetColours();
    view.redraw();
  };
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", scheme);
  // Paper is light, and has every chart.
  window.addEventListener("beforeprint", () => {
    document.documentElement.classList.add("paper");
    forgetColours();
    view.cursor = null;
    view.paintAll();
  });
  window.addEventListener("afterprint", () => {
    document.documentElement.classList.remove("paper");
    scheme();
  });
}
