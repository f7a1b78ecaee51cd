// What the pointer asks about: a microbatch over all devices, and what each device holds at a moment.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const chart = document.getElementById("chart");
const svg = chart.querySelector("svg");
const readout = document.getElementById("readout");
const invitation = readout.textContent;
const natural = svg.viewBox.baseVal.width;
let scale = 1;
let kept = null;

// --- one microbatch
function follow(microbatch) {
  svg.classList.toggle("following", microbatch !== null);
  for (const action of svg.querySelectorAll(".a")) action.classList.toggle("on", action.dataset.m === microbatch);
}

function tell(text) {
  readout.textContent = text ?? invitation;
  readout.classList.toggle("told", text !== undefined);
}

svg.addEventListener("pointerover", (event) => {
  const action = event.target.closest(".a");
  follow(action ? action.dataset.m : kept);
  if (action) tell(action.querySelector("title").textContent);
  else tell(kept === null ? undefined : `microbatch ${kept}`);
});
svg.addEventListener("click", (event) => {
  const action = event.target.closest(".a");
  kept = !action || kept === action.dataset.m ? null : action.dataset.m;
  follow(kept);
});

// --- one moment
function element(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const cursor = element("g", { class: "cursor", visibility: "hidden" });
const line = element("line", { y1: DATA.top, y2: DATA.bottom });
const held = DATA.curves.map((_, device) => element("text", { y: DATA.lanes[device] }));
cursor.append(line, ...held);
svg.append(cursor);

// The last entry of (time, held) at or before a moment.
function at(curve, time) {
  let low = 0;
  let high = curve.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (curve[middle][0] <= time) low = middle;
    else high = middle - 1;
  }
  return curve[low][1];
}

svg.addEventListener("pointermove", (event) => {
  const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
  const time = ((x - DATA.left) / DATA.width) * DATA.makespan;
  const inside = time >= 0 && time <= DATA.makespan;
  cursor.setAttribute("visibility", inside ? "visible" : "hidden");
  if (!inside) return;
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
  held.forEach((text, device) => {
    text.setAttribute("x", x + 5);
    text.textContent = Number(at(DATA.curves[device], time).toPrecision(4));
  });
});
svg.addEventListener("pointerleave", () => {
  cursor.setAttribute("visibility", "hidden");
  follow(kept);
  tell(kept === null ? undefined : `microbatch ${kept}`);
});

// --- size
const fitting = () => chart.clientWidth / natural;

function resize(next) {
  const middle = (chart.scrollLeft + chart.clientWidth / 2) / (natural * scale);
  scale = Math.min(Math.max(next, Math.min(fitting(), 1)), 4);
  svg.style.width = `${natural * scale}px`;
  svg.style.height = "auto";
  chart.scrollLeft = middle * natural * scale - chart.clientWidth / 2;
}

const zooms = { fit: fitting, in: () => scale * 1.4, out: () => scale / 1.4 };
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => resize(zooms[button.dataset.zoom]()));
}
document.querySelector(".tools").hidden = false;
// A long schedule starts readable; the whole of it is one button away.
resize(fitting() < 0.6 ? 1 : fitting());
