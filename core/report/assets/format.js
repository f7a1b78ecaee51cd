// Numbers with units, and elements. Nothing here depends on the data of a page.

const NO_BREAK = "\u00a0"; // between a number and its unit

// The round number (1, 2 or 5 times a power of ten) at or above a distance between two ticks.
function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough * (1 - 1e-9));
}

function significant(value, digits = 3) {
  if (value === 0) return "0";
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(Math.min(places, 9));
}

function scaled(value, units) {
  const size = Math.abs(value);
  return units.find(([scale]) => size >= scale * 0.9995) || units[units.length - 1];
}

const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
// Times and sizes of a schedule of uniform stages: in the unit of its costs, and in saved tensors of one microbatch.
const TIME_UNIT = [[1, "time units", "time unit"]];
const MICROBATCH = [[1, "microbatches", "microbatch"]];

function quantity(value, units, digits) {
  if (value === 0) return { number: "0", unit: units[units === SECONDS ? 0 : units.length - 1][1] };
  const [scale, unit, one] = scaled(value, units);
  const number = significant(value / scale, digits);
  if (one === undefined) return { number, unit };
  return { number: String(Number(number)), unit: Number(number) === 1 ? one : unit };
}

function amount(value, units, digits) {
  const { number, unit } = quantity(value, units, digits);
  return unit ? `${number}${NO_BREAK}${unit}` : number;
}

// The number at a tick of an axis; uniform stages have their unit in the axis' title.
function tickText(value, units, digits) {
  return units[0].length > 2 ? quantity(value, units, digits).number : amount(value, units, digits);
}

function percent(value) {
  return `${(value * 100).toFixed(1)}${NO_BREAK}%`;
}

function signed(value) {
  if (value === null || value === undefined) return "–";
  const size = (Math.abs(value) * 100).toFixed(1);
  return `${size === "0.0" ? "" : value > 0 ? "+" : "−"}${size}${NO_BREAK}%`;
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(node.style, value);
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes = {}, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
