// Use of the links over time: a strip for each direction of a link, as high as what it can move, busiest first.

const LINK = { height: 24, gap: 7, axis: 24 };
const MOST_LINKS = 24;

// Bytes that a link moved: the area under its rates.
function movedBytes(link) {
  return link.times.reduce((sum, time, i) => sum + link.rates[i] * ((i + 1 < link.times.length ? link.times[i + 1] : time) - time), 0);
}

function linkChart() {
  const used = DATA.links.filter((link) => link.limit !== null && link.times.length > 0)
    .map((link) => ({ ...link, moved: movedBytes(link), use: movedBytes(link) / (link.limit * DATA.traces[0].step) }))
    .sort((a, b) => b.use - a.use);
  if (used.length === 0) return;
  show("links");
  const rows = used.slice(0, MOST_LINKS);
  byId("links-hint").textContent = "What each direction of a link moves, as a share of its rate, on the same span of time as above; "
    + (used.length > rows.length ? `the ${rows.length} busiest of ${used.length}.` : "busiest first.");
  const canvas = element("canvas", { role: "img", "aria-label": "Use of the links over time", "data-links": "" });
  byId("links-chart").append(canvas);
  const left = () => (canvas.clientWidth < 560 ? 104 : 230);
  const plot = () => ({ left: left(), width: Math.max(canvas.clientWidth - left() - 52, 10) });
  const height = LINK.axis + rows.length * (LINK.height + LINK.gap);
  painted(canvas, height, (context, width) => {
    const x = (time) => plot().left + ((time - view.from) / (view.to - view.from)) * plot().width;
    paintAxis(context, plot(), height, x, DATA.traces[0].step);
    rows.forEach((link, i) => paintLink(context, link, LINK.axis + i * (LINK.height + LINK.gap), plot(), x, width));
    paintPointer(context, plot(), LINK.axis - 4, height);
  });
  follow(canvas, plot, (px, py, time) => {
    const link = rows[Math.floor((py - LINK.axis) / (LINK.height + LINK.gap))];
    return !link || px < plot().left || py < LINK.axis ? null : describeLink(link, time);
  });
}

function describeLink(link, time) {
  const at = lastBefore(link.times, time);
  const rate = at < 0 ? 0 : link.rates[at];
  return { title: link.name, colour: "var(--mem-communication)", rows: [["at", seconds(time)],
    ["moves", `${bytes(rate)}/s`], ["of", `${bytes(link.limit)}/s`], ["in use", percent(rate / link.limit)],
    ["moved in the step", bytes(link.moved)], ["mean use", percent(link.use)]] };
}

function paintLink(context, link, top, plot, x, width) {
  const base = top + LINK.height;
  context.fillStyle = css(colour("--lane"));
  context.fillRect(plot.left, top, plot.width, LINK.height);
  context.fillStyle = css(colour("--ink"));
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(fitted(context, link.name, plot.left - 10), 0, top + LINK.height / 2);
  context.fillStyle = css(colour("--faint"));
  context.textAlign = "right";
  context.fillText(percent(link.use), width, top + LINK.height / 2);
  context.save();
  context.beginPath();
  context.rect(plot.left, top, plot.width, LINK.height);
  context.clip();
  context.fillStyle = css(colour("--mem-communication"));
  for (let i = Math.max(lastBefore(link.times, view.from), 0); i < link.times.length && link.times[i] <= view.to; i += 1) {
    if (link.rates[i] === 0) continue;
    const from = x(link.times[i]);
    const to = x(i + 1 < link.times.length ? link.times[i + 1] : DATA.traces[0].step);
    const high = Math.max((LINK.height * link.rates[i]) / link.limit, 1);
    context.fillRect(from, base - high, Math.max(to - from, 0.6), high);
  }
  context.restore();
}

// A name shortened in its middle to the room that there is.
function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let keep = text.length - 1;
  while (keep > 4 && context.measureText(`${text.slice(0, keep >> 1)}…${text.slice(-(keep >> 1))}`).width > room) keep -= 1;
  return `${text.slice(0, keep >> 1)}…${text.slice(-(keep >> 1))}`;
}
