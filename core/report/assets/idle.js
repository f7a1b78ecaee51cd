// Why not faster: the step as one bar, the time of computing and then each cause of idle time.

const CAUSE_COLOURS = {
  "fill and drain": "--cause-fill", "steady state": "--cause-steady", imbalance: "--cause-imbalance",
  messages: "--cause-messages", "shared links": "--cause-shared", "host copies": "--kind-offload", recomputation: "--kind-recompute",
  "memory limit": "--cause-memory", update: "--kind-step",
};

const LEAST = 5e-4; // share of the step below which a cause is not worth a line

function idleCauses(found) {
  if (!found || found.step_s <= 0) return;
  show("idle");
  byId("idle-bar").replaceChildren();
  byId("idle-causes").replaceChildren();
  const causes = found.causes.filter((cause) => cause.seconds >= LEAST * found.step_s).sort((a, b) => b.seconds - a.seconds);
  const { step_s: step, compute_s: compute } = found;
  byId("idle-hint").textContent = `A device computes ${percent(compute / step)} of the step on average, `
    + `and idles ${percent(found.idle_share)}. The time of a cause is how much shorter the step would be without it.`;
  const part = (name, time, tone) => element("i", { title: `${name}: ${percent(time / step)}`,
    style: { width: `${(100 * time) / step}%`, background: `var(${tone})` } });
  byId("idle-bar").setAttribute("aria-label", "The time of the step, by cause");
  byId("idle-bar").append(part("compute", compute, "--kind-f"),
    ...causes.map((cause) => part(cause.cause, cause.seconds, CAUSE_COLOURS[cause.cause])));
  const line = (name, words, time, tone, inner = "") => element("li", { class: inner },
    element("span", { class: "swatch", style: { background: `var(${tone})` } }), element("span", { class: "name" }, name),
    element("span", { class: "words" }, words), element("span", { class: "number" }, percent(time / step)),
    element("span", { class: "number" }, seconds(time, 3)));
  byId("idle-causes").append(line("compute", "forward and backward, the mean of all devices", compute, "--kind-f"));
  for (const cause of causes) {
    byId("idle-causes").append(line(cause.cause, cause.what, cause.seconds, CAUSE_COLOURS[cause.cause]));
    if (cause.cause !== "shared links") continue;
    for (const { link, seconds: lost } of found.contention_by_link) {
      byId("idle-causes").append(line(link, "", lost, "--lane", "inner"));
    }
  }
}
