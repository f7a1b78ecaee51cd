// Puts a report together, and returns what its page may do with it.

byId("summary").textContent = DATA.summary;
figures();
const indexes = DATA.traces.map(indexed);
if (DATA.traces.some((trace) => trace.events.start.length > 0)) {
  show("step");
  legend();
  indexes.forEach((index, i) => gantt(byId("charts"), index, indexes[1 - i]));
}
idleCauses(DATA.idle);
memoryCharts();
linkChart();
accuracy();
curves();
checks();
plan();
notes();
byId("footer").textContent = DATA.plan.hash ? `Written by panpipe. Plan ${DATA.plan.hash.slice(0, 12)}.` : "Written by panpipe.";

const box = byId("communication").querySelector("input");
box.checked = communication;
byId("communication").hidden = DATA.queues.every((queues) => queues.every((queue) => queue === COMPUTE));
box.addEventListener("change", () => {
  communication = box.checked;
  view.redraw();
});
for (const button of ROOT.querySelectorAll("[data-zoom]")) {
  const act = { in: () => view.zoom(0.6), out: () => view.zoom(1 / 0.6), all: view.all }[button.dataset.zoom];
  button.addEventListener("click", act);
}
const sized = new ResizeObserver(view.redraw);
sized.observe(ROOT);
closing.push(() => sized.disconnect(), () => view.include(ROOT, null));
view.include(ROOT, DATA.end);
view.redraw();

return {
  // Light the stages that run a module whose name has this text; returns how many there are.
  search: (text) => {
    matching = text ? matchingStages(text) : null;
    for (const card of ROOT.querySelectorAll(".stage")) {
      card.classList.toggle("dim", matching !== null && !matching.has(Number(card.dataset.stage)));
    }
    view.redraw();
    return matching === null ? null : matching.size;
  },
  showIdle: idleCauses,
  close: () => closing.forEach((act) => act()),
};
