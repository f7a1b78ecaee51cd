// The address of the page has all of its state, after the #: the questions of its sides, the pipeline of the frontier,
// the span in sight, the module searched for. The server never sees it.

function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  const value = (name) => {
    try {
      return found.has(name) ? JSON.parse(found.get(name)) : null;
    } catch {
      return null;
    }
  };
  const question = (name) => (value(name)?.kind ? value(name) : null);
  return { a: question("a"), b: question("b"), side: found.get("side") === "b" ? "b" : "a", base: question("base"),
    span: Array.isArray(value("span")) ? value("span") : null, find: found.get("find") || "" };
}

let addressTimer = null;

// A new entry of the browser's history is written at once, a change of the present one when no slider moves.
function writeAddress(state, isNew) {
  clearTimeout(addressTimer);
  const write = () => {
    const parts = new URLSearchParams();
    for (const name of ["a", "b", "base", "span"]) if (state[name]) parts.set(name, JSON.stringify(state[name]));
    if (state.b && state.side === "b") parts.set("side", "b");
    if (state.find) parts.set("find", state.find);
    history[isNew ? "pushState" : "replaceState"](null, "", `#${parts}`);
  };
  if (isNew) write();
  else addressTimer = setTimeout(write, 80);
}
