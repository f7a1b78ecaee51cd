// Numbers with units, colours from the style sheet, and elements.

const DATA = JSON.parse(document.getElementById("data").textContent);

function significant(value, digits = 3) {
  if (value === 0) return "0";
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(Math.min(places, 9));
}

function scaled(value, units) {
  const size = Math.abs(value);
  return units.find(([scale]) => size >= scale * 0.9995) || units[units.length - 1];
}

const TIME_UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const BYTE_UNITS = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];

function quantity(value, units, digits) {
  if (value === 0) return { number: "0", unit: units === TIME_UNITS ? "s" : "B" };
  const [scale, unit] = scaled(value, units);
  return { number: significant(value / scale, digits), unit };
}

function seconds(value, digits = 4) {
  const { number, unit } = quantity(value, TIME_UNITS, digits);
  return `${number} ${unit}`;
}

function bytes(value) {
  const { number, unit } = quantity(value, BYTE_UNITS, 3);
  return `${number} ${unit}`;
}

function percent(value) {
  return `${(value * 100).toFixed(1)} %`;
}

function signed(value) {
  if (value === null || value === undefined) return "–";
  return `${value >= 0 ? "+" : "−"}${(Math.abs(value) * 100).toFixed(1)} %`;
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

const byId = (id) => document.getElementById(id);

function show(id) {
  byId(id).hidden = false;
}

// ---- colours ----

const KIND_COLOURS = {
  F: "--kind-f", B: "--kind-b", I: "--kind-i", W: "--kind-w", RECOMPUTE: "--kind-recompute",
  SEND_F: "--kind-send-f", RECV_F: "--kind-send-f", SEND_B: "--kind-send-b", RECV_B: "--kind-send-b",
  OFFLOAD: "--kind-offload", RELOAD: "--kind-reload", STEP: "--kind-step",
  REDUCE_GRAD: "--kind-reduce", REDUCE_TIED: "--kind-reduce", SYNC: "--kind-reduce",
};
const KIND_NAMES = {
  F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights", RECOMPUTE: "recompute",
  SEND_F: "send activations", RECV_F: "receive activations", SEND_B: "send gradients", RECV_B: "receive gradients",
  OFFLOAD: "copy to host", RELOAD: "copy from host", STEP: "optimizer step",
  REDUCE_GRAD: "reduce gradients", REDUCE_TIED: "reduce tied weight", SYNC: "synchronise",
};
// A kind that another package declared has its letters as a name.
for (const kind of new Set(DATA.traces.flatMap((trace) => trace.events.kind))) {
  KIND_COLOURS[kind] ??= "--kind-copy";
  KIND_NAMES[kind] ??= kind;
}

let colours = new Map();

// A colour by its name in the style sheet, as [red, green, blue]; forgotten when the scheme changes.
function colour(name) {
  if (!colours.has(name)) {
    const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    colours.set(name, [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  }
  return colours.get(name);
}

function css(rgb, alpha = 1) {
  return `rgb(${rgb.map(Math.round).join(" ")} / ${alpha})`;
}

function mixed(a, b, share) {
  return a.map((value, i) => value * (1 - share) + b[i] * share);
}

function luminance([r, g, b]) {
  return (0.299 * r + 0.587 * g + 0.114 * b) / 255;
}

function memoryColour(kind) {
  const known = ["parameters", "gradients", "optimizer", "saved", "communication", "workspace", "offloaded"];
  return known.includes(kind) ? `--mem-${kind}` : "--kind-step";
}
