// The form: a question, field by field. Every field is an option of `panpipe schedule` or `panpipe plan`.

const CHOICES = JSON.parse(document.getElementById("data").textContent);

const GB = 1e9;
const slider = (name, label, min, max, step, more = {}) => ({ name, label, min, max, step, type: "slider", ...more });
const select = (name, label, options, more = {}) => ({ name, label, options, type: "select", ...more });
const text = (name, label, more = {}) => ({ name, label, type: "text", ...more });

function uniformFields(question) {
  const family = CHOICES.schedules.find((each) => each.name === question.schedule);
  const names = CHOICES.schedules.map((each) => each.name);
  const set = Object.entries(question.parameters ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");
  if (CHOICES.grid) return ["schedule", "devices", "microbatches"].map((name) => select(name, name,
    CHOICES.grid[name].map(String), { number: name !== "schedule", about: name === "schedule" ? family.summary : "" }));
  return [
    select("schedule", "schedule", [...names, "auto"], { about: [family ? family.summary : "the fastest one that a search finds", set].filter(Boolean).join("; ") }),
    slider("devices", "devices", 1, CHOICES.largest.devices, 1, { most: CHOICES.most.devices }),
    slider("microbatches", "microbatches", 1, CHOICES.largest.microbatches, 1, { most: CHOICES.most.microbatches }),
    select("chunks", "stages of a device", [["", "usual"], ...[1, 2, 3, 4, 6, 8].map(String)], { number: true }),
    slider("memory_limit", "memory limit", 1, Math.max(2 * question.devices, 4), 0.5,
      { none: "none", most: 4096, about: "in one device's saved tensors for one microbatch" }),
    slider("forward", "F, a device and microbatch", 0, 4, 0.05, { most: 1000, about: "all times are in one unit of your choice" }),
    slider("backward_input", "I, input gradients", 0, 4, 0.05, { most: 1000 }),
    slider("backward_weight", "W, weight gradients", 0, 4, 0.05, { most: 1000 }),
    slider("comm", "message between devices", 0, 2, 0.05, { most: 1000 }),
    slider("freed_by_input", "share of memory that I frees", 0, 1, 0.05),
    slider("host_copy", "copy to the host and back", 0, 8, 0.25, { most: 1000, about: "above 0, schedules that offload take part" }),
  ];
}

function planFields(question) {
  const source = modelSource(question);
  const ranks = [1, 2, 4, 8, 16, 32].map(String);
  return [
    { name: "source", label: "model", type: "source", value: source },
    text("cluster", "cluster", { list: CHOICES.clusters, required: true,
      about: "a name such as 4x8xA100-80GB, cpu:N for this machine, or a cluster file" }),
    slider("microbatches", "microbatches of a step", 1, 128, 1, { most: 4096 }),
    slider("memory_limit", "memory limit", 1, 192, 1, { none: "the device's", scale: GB, unit: "GB", most: 100000 }),
    text("recompute", "recompute", { list: ["none", "auto", "all", "attention", "every:2"], about: "by default where memory is short" }),
    select("offload", "offload", [["", "none"], "auto", "all"]),
    select("dtype", "precision", [["", "the model's"], ...CHOICES.dtypes], { only: source !== "graph" }),
    select("schedule", "schedule", ["auto", ...CHOICES.schedules.map((each) => each.name)]),
    { type: "more", label: "more", fields: [
      text("mesh", "mesh", { about: "auto, or pp=N,dp=N" }),
      text("shard", "replicas share", { list: ["none", "optimizer", "gradients", "parameters", "parameters:8", "auto"], required: true,
        about: "optimizer, gradients or parameters; with :N in groups of N replicas (HSDP)" }),
      select("chunks", "stages of a device", [["", "any number"], ...[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 80, 96].map(String)], { number: true }),
      select("kernels", "kernels", ["eager", "compiled", "fused"], { only: source !== "graph" }),
      select("tp", "tensor ranks", ranks, { number: true, only: source !== "graph" }),
      select("tp_overlap", "of their collectives overlap", ["none", "backward", "all"], { only: question.tp > 1 }),
      select("sequence_parallel", "they share tokens, too", [["false", "no"], ["true", "yes"]], { truth: true, only: question.tp > 1 && source === "bundled" }),
      select("cp", "context ranks", ranks, { number: true, only: source === "bundled" }),
      select("cp_order", "their tokens", ["zigzag", "contiguous"], { only: question.cp > 1 }),
      select("ep", "expert ranks", ranks, { number: true, only: source === "bundled" }),
      select("layers", "stages end between", [["", "by default"], ["true", "layers"], ["false", "operators"]], { truth: true }),
      slider("batch", "samples of a step", 1, 512, 1, { none: "one a microbatch", most: 1e6, only: source === "bundled" }),
      slider("sequence", "tokens of a sample", 128, 8192, 128, { none: "as published", most: 1e6, only: source === "bundled" }),
      select("optimizer", "optimizer", [["", "adam-master"], ...CHOICES.optimizers], { only: source !== "graph" }),
      slider("host_memory", "host memory for offload", 8, 2048, 8, { none: "no limit", scale: GB, unit: "GB", most: 1e6 }),
      slider("budget", "plans to evaluate", 500, 50000, 500, { none: "by default", most: 1e7 }),
      slider("seed", "seed", 0, 20, 1, { most: 2 ** 31 - 1 }),
    ] },
  ];
}

const modelSource = (question) => (question.graph != null ? "graph" : (question.model ?? "").includes(":") ? "factory" : "bundled");

const DEFAULTS = CHOICES.defaults;
const NEW_PLAN = { ...DEFAULTS.plan, ...(CHOICES.graph ? { graph: CHOICES.graph } : { model: CHOICES.models[0] }) };

const complete = (question) => ({ ...DEFAULTS[question.kind], ...question });

// Shows a question; ``changed`` is called with the next one, and whether the user is still moving a slider.
function showForm(question, changed) {
  const form = byName("form");
  const focused = document.activeElement?.name;
  const fields = { uniform: uniformFields, plan: planFields, file: fileFields }[question.kind](question);
  const set = (name, value, moving = false) => {
    const next = { ...question, [name]: value };
    if (question.kind === "uniform" && ["schedule", "devices", "microbatches", "chunks"].includes(name)) next.parameters = {};
    if (question.kind === "plan") delete next.rank;
    changed(next, moving);
  };
  const replace = (next) => changed(next, false);
  form.replaceChildren(tabs(question, replace), ...fields.flatMap((field) => fieldNode(field, question, set, replace)));
  if (focused) form.querySelector(`[name="${CSS.escape(focused)}"]`)?.focus();
}

const byName = (id) => document.getElementById(id);

function tabs(question, replace) {
  const kinds = [["uniform", "uniform stages"], ...(CHOICES.grid ? [] : [["plan", "a model"]]), ...(CHOICES.results.length ? [["file", "results"]] : [])];
  return element("div", { class: "tabs", role: "group" }, ...kinds.map(([kind, label]) => {
    const button = element("button", { type: "button", "aria-pressed": String(question.kind === kind) }, label);
    button.addEventListener("click", () => question.kind !== kind && replace(kind === "plan" ? NEW_PLAN : DEFAULTS[kind]));
    return button;
  }));
}

function fileFields(question) {
  return [select("number", "result", CHOICES.results.map((title, i) => [String(i), title]), { number: true, value: String(question.number) })];
}

function fieldNode(field, question, set, replace) {
  if (field.only === false) return [];
  if (field.type === "more") {
    const open = field.fields.some((each) => question[each.name] !== DEFAULTS[question.kind][each.name]);
    return [element("details", open ? { open: "" } : {}, element("summary", {}, field.label),
      ...field.fields.flatMap((each) => fieldNode(each, question, set, replace)))];
  }
  const make = { slider: sliderNode, select: selectNode, text: textNode, source: sourceNode }[field.type];
  const about = field.about ? [element("span", { class: "about" }, field.about)] : [];
  return [element("label", { class: "field" }, ...make(field, question, set, replace), ...about)];
}

const nameNode = (label, ...more) => element("span", { class: "name" }, element("span", {}, label), ...more);

function sliderNode(field, question, set) {
  const scale = field.scale ?? 1;
  const value = question[field.name] == null ? null : question[field.name] / scale;
  const top = field.none ? field.max + field.step : field.max; // the right end means none
  const number = element("input", { type: "number", name: `${field.name}-number`, min: field.min, max: field.most ?? field.max, step: "any",
    placeholder: field.none ?? "", "aria-label": `${field.label}, as a number` });
  const range = element("input", { type: "range", name: field.name, min: field.min, max: top, step: field.step, "aria-label": field.label });
  number.value = value ?? "";
  range.value = value ?? top;
  const whole = field.step === 1;
  range.addEventListener("input", () => {
    const moved = Number(range.value);
    const none = field.none && moved >= top;
    number.value = none ? "" : moved;
    set(field.name, none ? null : moved * scale, true);
  });
  range.addEventListener("change", () => set(field.name, number.value === "" ? null : Number(number.value) * scale));
  number.addEventListener("change", () => {
    if (number.validity.badInput || (number.value === "" ? !field.none : !number.checkValidity())) {
      refuse(`${field.label} is ${number.value || "no number"}: give a number from ${field.min} to ${field.most ?? field.max}.`);
      return;
    }
    const typed = number.value === "" ? null : (whole ? Math.round(Number(number.value)) : Number(number.value)) * scale;
    range.value = typed === null ? top : typed / scale;
    set(field.name, typed);
  });
  return [nameNode(field.unit ? `${field.label}, ${field.unit}` : field.label, number), range];
}

function selectNode(field, question, set) {
  const options = field.options.map((option) => (Array.isArray(option) ? option : [option, option]));
  const node = element("select", { name: field.name }, ...options.map(([value, label]) => element("option", { value }, label)));
  node.value = field.value ?? (question[field.name] == null ? "" : String(question[field.name]));
  node.addEventListener("change", () => set(field.name, node.value === "" ? null : field.number || field.truth ? JSON.parse(node.value) : node.value));
  return [nameNode(field.label), node];
}

function textNode(field, question, set) {
  const id = `list-${field.name}`;
  const node = element("input", { type: "text", name: field.name, spellcheck: "false", ...(field.list ? { list: id } : {}) });
  node.value = question[field.name] ?? "";
  node.addEventListener("change", () => {
    const typed = node.value.trim();
    if (typed || !field.required) set(field.name, typed || null);
    else refuse(`${field.label || "model"} is empty: name one.`);
  });
  const list = field.list ? [element("datalist", { id }, ...field.list.map((value) => element("option", { value })))] : [];
  return [nameNode(field.label), node, ...list];
}

// Where the model is from. A function of the user's is called only after a click.
function sourceNode(field, question, set, replace) {
  const kinds = [["bundled", "bundled"], ["factory", "a function, module:factory"], ["graph", "an operator-graph file"]];
  const node = element("select", { name: "source" }, ...kinds.map(([value, label]) => element("option", { value }, label)));
  node.value = field.value;
  const none = { ...question, model: null, graph: null, rank: undefined };
  const ofModel = ["batch", "sequence", "dtype", "optimizer", "kernels", "tp", "tp_overlap", "sequence_parallel", "cp", "cp_order", "ep"];
  const unset = Object.fromEntries(ofModel.map((option) => [option, undefined]));
  node.addEventListener("change", () => replace({ bundled: { ...none, model: CHOICES.models[0] }, factory: { ...none, model: "module:factory" },
    graph: { ...none, ...unset, graph: CHOICES.graph ?? "graph.json" } }[node.value]));
  const name = field.value === "graph" ? "graph" : "model";
  const own = field.value === "bundled" ? selectNode(select("model", "", CHOICES.models), question, set)[1]
    : textNode(text(name, "", { required: true }), question, set)[1];
  return [nameNode(field.label), node, element("span", { class: "about" }), own];
}
