// The units of this report, and its elements by name.

const TIME_UNITS = DATA.units === "plain" ? TIME_UNIT : SECONDS;
const BYTE_UNITS = DATA.units === "plain" ? MICROBATCH : BYTES;
const seconds = (value, digits = 4) => amount(value, TIME_UNITS, digits);
const bytes = (value) => amount(value, BYTE_UNITS, DATA.units === "plain" ? 4 : 3);

const byId = (name) => ROOT.querySelector(`[data-id="${name}"]`);
const closing = []; // what ends with this report

function show(name) {
  byId(name).hidden = false;
}

function listenTo(target, name, act) {
  target.addEventListener(name, act);
  closing.push(() => target.removeEventListener(name, act));
}

// The time that the charts of this report end at.
DATA.end = Math.max(1e-9, ...DATA.traces.map((trace) => trace.events.end.reduce((a, b) => Math.max(a, b), trace.step)));
