// What a run is and how it fares: its state, headline numbers, health, memory, the tokens on which sampler and trainer disagree, events, notes.

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds)), two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return whole + "s";
  return whole < 3600 ? Math.floor(whole / 60) + "m" + two(whole % 60) + "s" : Math.floor(whole / 3600) + "h" + two(Math.floor(whole % 3600 / 60)) + "m";
}

const SILENT = 30; // seconds after which the page says how long nothing was heard of a run

// The present step: what is being done, how fast, and how much is left.
function drawStatus(run) {
  const box = byId("status"), { numbers } = run, bar = make("progress");
  const parts = [chip(run.state, "state " + run.state.replace(" ", "-"))];
  if (run.total) {
    Object.assign(bar, { max: run.total, value: run.step });
    bar.setAttribute("aria-label", "steps done");
    parts.push(bar);
  }
  const say = (text, name) => parts.push(make("span", text, name));
  say("step " + count(run.step) + (run.total ? " of " + count(run.total) : ""));
  if (run.phase) say((run.phase_step > run.step ? "now step " + count(run.phase_step) + ": " : "now: ") + visible(run.phase), "phase");
  if (isNumber(numbers["s/step"])) say(show(numbers["s/step"]) + " s a step");
  if (isNumber(numbers["tokens/s"])) say(count(Math.round(numbers["tokens/s"])) + " tokens/s");
  if (isNumber(run.left_s)) say(duration(run.left_s) + " left");
  if (run.state === "running" && run.silent_s > SILENT) say("last heard of " + duration(run.silent_s) + " ago", "bad");
  box.hidden = false;
  box.replaceChildren(...parts);
}

let drawnParts = {}; // of the overview, so that a part that is the same stays as it is: opened, selected, pointed at

function drawOverview(overview) {
  const drawIf = (part, draw) => {
    const value = JSON.stringify(overview[part]);
    if (drawnParts[part] === value) return;
    drawnParts[part] = value;
    draw(overview[part]);
  };
  byId("name").textContent = visible(overview.name);
  drawIf("headline", drawHeadline);
  drawIf("damaged", (texts) => byId("damaged").replaceChildren(...texts.map((text) => make("p", visible(text), "bad"))));
  drawIf("health", (health) => byId("health").replaceChildren(healthBox(health)));
  drawIf("breakdown", drawBreakdown);
  drawIf("memory", (figures) => byId("memory").replaceChildren(...memoryLine(figures)));
  drawIf("profiles", drawProfiles);
  drawIf("worst_tokens", drawWorstTokens);
  reveal("mismatch", overview.profiles.length || overview.worst_tokens.length);
  drawIf("events", drawEvents);
  drawIf("scalings", drawScalings);
  drawIf("notes", drawNotes);
}

function drawHeadline(boxes) {
  byId("headline").replaceChildren(...boxes.map(([label, value, hint]) => {
    const box = make("div", visible(label));
    box.append(make("b", value), make("span", visible(hint), "dim"));
    return box;
  }));
}

function drawBreakdown(breakdown) {
  const isOpen = byId("breakdown").querySelector("details")?.open || false;
  byId("breakdown").replaceChildren();
  if (!breakdown) return;
  const box = folded(breakdown.title, scroll(table(["mode", "rows", "before", "after"], breakdown.rows.map((row) => row.map(visible)))));
  box.open = isOpen;
  byId("breakdown").append(box);
}

// Measurements in the folder of the run: each with its chart, as an image that runs no script, and its table.
function drawScalings(measurements) {
  reveal("scaling", measurements.length);
  byId("scaling-parts").replaceChildren(...measurements.map(({ name, data, model, questions, chart, columns, rows }) => {
    const figure = make("figure"), image = make("img", null, "drawing");
    figure.append(make("figcaption", visible(data) + ", " + count(questions) + " questions, " + visible(model)));
    if (chart) {
      image.src = "data:image/svg+xml," + encodeURIComponent(chart);
      image.alt = "accuracy by mean tokens a question";
      figure.append(image);
    }
    figure.append(folded("All strategies and budgets (" + visible(name) + ")", scroll(table(columns, rows.map((row) => row.map(visible))))));
    return figure;
  }));
}

// Pages of all measurements in the folders that were named.
function drawScalingLinks(ids) {
  byId("scaling-links").hidden = !ids.length;
  byId("scaling-list").replaceChildren(...ids.map((id) => {
    const item = make("li"), link = make("a", visible(id));
    link.href = "scaling/" + id.split("/").map(encodeURIComponent).join("/");
    item.append(link);
    return item;
  }));
}

function drawNotes({ lines, total }) {
  const left = total - lines.length;
  byId("note-lines").textContent = (left > 0 ? "[" + count(left) + " earlier lines are in log.txt]\n" : "") + lines.map(visible).join("\n");
}

function scroll(node) {
  const box = make("div", null, "scroll");
  box.append(node);
  return box;
}

function healthBox({ items, total }) {
  const box = make("div", null, total ? "health ill" : "health");
  if (!total) box.textContent = "Health: nothing left its healthy range.";
  else {
    const list = make("ul");
    list.append(...items.map(({ cause, seen, remedy }) => {
      const item = make("li");
      item.append(make("b", visible(cause)), make("div", visible(seen), "dim"), make("div", "Try: " + visible(remedy)));
      return item;
    }));
    box.append("Health: " + total + " to look at", list);
    if (total > items.length) box.append(make("p", "The last " + items.length + " of " + total + "; all are in log.txt.", "dim"));
  }
  return box;
}

function memoryLine(figures) {
  if (!figures.length) return [];
  const text = figures.map(([name, last, most]) => visible(name.replace(/^memory\/|_gib$/g, "")) + " " + show(last) + (most > last * 1.005 ? " (at most " + show(most) + ")" : ""));
  return [make("p", "Memory in GiB: " + text.join(" \u00b7 "), "dim")];
}

// Text on one line, with line breaks and control characters as escape sequences.
const oneLine = (text) => visible(JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"'));
const CONTEXT = 120; // characters shown of what stands around a token

function tokenInContext({ before, text, after }) {
  const code = make("code");
  code.append(oneLine(before || "").slice(-CONTEXT), make("mark", oneLine(text || "").slice(0, CONTEXT)), oneLine(after || "").slice(0, CONTEXT));
  return code;
}

let profileCharts = [];

function drawProfiles(profiles) {
  const known = new Map(profileCharts.map((chart) => [chart.title, chart]));
  profileCharts = profiles.map((profile) => {
    const chart = known.get(profile.title) || new Chart(profile.title, profile), lines = Object.entries(profile.series);
    Object.assign(chart.data, { places: profile.places, hints: profile.hints });
    const drawn = lines.map(([label, points], k) => ({ label, points, colour: k, dash: 0 }));
    chart.setLines(drawn, drawn.length > 1 ? drawn.map(({ label, colour }) => ({ label, colour })) : []);
    return chart;
  });
  if (profileCharts.some((chart) => known.get(chart.title) !== chart) || known.size !== profileCharts.length) byId("profiles").replaceChildren(...profileCharts.map((chart) => chart.figure));
}

function drawWorstTokens(worst) {
  if (!worst.length) return byId("worst-tokens").replaceChildren();
  const about = "The tokens on which sampler and trainer disagree most, in the first step that has any, in that of the largest gap and in the last: the log-prob each gave, "
    + "and trainer less sampler. All steps are in samples/worst_tokens.jsonl.";
  const rows = worst.map((row) => [String(row.step), visible(row.group), String(row.sample), String(row.position), tokenInContext(row), String(row.token),
    short(row.behaviour_logp), short(row.trainer_logp), short(row.gap), row.weight === null ? "" : show(row.weight)]);
  const names = ["step", "prompt", "sample", "position", "in context", "token id", "sampler", "trainer", "gap", "weight"];
  byId("worst-tokens").replaceChildren(make("p", about, "dim"), scroll(table(names, rows)));
}

function drawEvents(events) {
  reveal("events", events.length);
  byId("event-table").replaceChildren(table(["kind", "number", "first in", "example"], events.map((event) => {
    const example = make("div", visible(event.message));
    if (event.traceback) example.append(folded("traceback", make("pre", visible(event.traceback), "text")));
    return [visible(event.kind), show(event.number), visible("step " + event.step + ", " + event.sample + ", " + event.what), example];
  })));
}

function reveal(part, isShown) {
  byId(part).hidden = !isShown;
  document.querySelector('nav a[href="#' + part + '"]').hidden = !isShown;
}
