// Puts the page together.

byId("summary").textContent = DATA.summary;
figures();
if (DATA.traces.some((trace) => trace.events.start.length > 0)) {
  show("step");
  legend();
  const indexes = DATA.traces.map(indexed);
  indexes.forEach((index, i) => gantt(byId("charts"), index, indexes[1 - i]));
}
idleCauses();
memoryCharts();
linkChart();
accuracy();
curves();
checks();
plan();
notes();
byId("footer").textContent = `Written by panpipe. Plan ${DATA.plan.hash.slice(0, 12)}.`;

const box = byId("communication").querySelector("input");
box.checked = communication;
byId("communication").hidden = DATA.queues.every((queues) => queues.every((queue) => queue === COMPUTE));
box.addEventListener("change", () => {
  communication = box.checked;
  repaint();
});
for (const button of document.querySelectorAll("[data-zoom]")) {
  const act = { in: () => zoom(0.6), out: () => zoom(1 / 0.6), all: () => look(0, FULL) }[button.dataset.zoom];
  button.addEventListener("click", act);
}
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = new Map();
  shades = new Map();
  repaint();
});
window.addEventListener("scroll", repaint, { passive: true });
new ResizeObserver(repaint).observe(document.body);
repaint();
