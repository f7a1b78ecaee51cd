// Colours by kind, from the style sheet.

const KIND_COLOURS = {
  F: "--kind-f", B: "--kind-b", I: "--kind-i", W: "--kind-w", RECOMPUTE: "--kind-recompute",
  SEND_F: "--kind-send-f", RECV_F: "--kind-send-f", SEND_B: "--kind-send-b", RECV_B: "--kind-send-b",
  OFFLOAD: "--kind-offload", RELOAD: "--kind-reload", STEP: "--kind-step",
  SCATTER_GRAD: "--kind-reduce", REDUCE_GRAD: "--kind-reduce", REDUCE_TIED: "--kind-reduce", SYNC: "--kind-reduce",
  UNSHARD: "--kind-reduce",
};
const KIND_NAMES = {
  F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights", RECOMPUTE: "recompute",
  SEND_F: "send activations", RECV_F: "receive activations", SEND_B: "send gradients", RECV_B: "receive gradients",
  OFFLOAD: "copy to host", RELOAD: "copy from host", STEP: "optimizer step",
  SCATTER_GRAD: "scatter gradients", REDUCE_GRAD: "reduce gradients", REDUCE_TIED: "reduce tied weight",
  SYNC: "synchronise", UNSHARD: "gather parameters",
};

// A kind that another package declared has its letters as a name.
const kindColour = (kind) => KIND_COLOURS[kind] ?? "--kind-copy";
const kindName = (kind) => KIND_NAMES[kind] ?? kind;

let colours = new Map();
let shades = new Map();

function forgetColours() {
  colours = new Map();
  shades = new Map();
}

// A colour by its name in the style sheet, as [red, green, blue].
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

// Hue is the kind; later chunks of a device are lighter, and odd microbatches a little.
function shade(kind, lighter, odd) {
  const key = `${kind} ${lighter} ${odd}`;
  if (!shades.has(key)) {
    const surface = colour("--surface");
    const rgb = mixed(mixed(colour(kindColour(kind)), surface, lighter), surface, odd ? 0.13 : 0);
    const ink = luminance(rgb) > 0.6 ? [20, 24, 28] : [255, 255, 255];
    shades.set(key, { fill: css(rgb), dim: css(rgb, 0.2), ink: css(ink) });
  }
  return shades.get(key);
}

function memoryColour(kind) {
  const known = ["parameters", "gradients", "optimizer", "saved", "communication", "workspace", "offloaded"];
  return known.includes(kind) ? `--mem-${kind}` : "--kind-step";
}
