// One side of the page: a question, its answer, and the report that draws it.

class Side {
  constructor(name, view, activate) {
    this.name = name;
    this.view = view;
    this.question = null;
    this.answer = null;
    this.shown = null; // the question that it answers
    this.report = null;
    this.running = null; // aborts the question in flight
    this.again = false;
    this.slowTimer = null; // after which slow answers are asked for
    this.root = element("article", { class: "panel", "data-side": name, hidden: "" });
    this.root.addEventListener("pointerdown", () => activate(this.name));
    byName("panels").append(this.root);
  }

  // Draw an answer in place of the last one.
  draw(answer, find) {
    this.answer = answer;
    this.report?.close();
    const title = element("h1", {}, answer.report.title);
    const misfit = answer.misfit ? [element("p", { class: "misfit" }, `Does not fit: ${answer.misfit}`)] : [];
    this.root.replaceChildren(title, ...misfit, byName("sections").content.cloneNode(true));
    this.root.hidden = false;
    this.root.classList.remove("stale");
    this.report = drawReport(answer.report, this.root, this.view);
    return this.report.search(find);
  }

  // Take the answer away: it is not that of the form any more.
  clear() {
    this.report?.close();
    this.report = this.answer = this.shown = null;
    this.root.replaceChildren();
    this.root.hidden = true;
  }

  // End the question in flight.
  stop() {
    this.running?.abort();
    this.running = this.question = null;
    this.again = false;
    this.root.classList.remove("stale");
  }
}
