// The list of runs with their states, which of them are drawn together, and what their configs have different.

class RunTable {
  constructor(onFocus, onCompare) {
    Object.assign(this, { onFocus, onCompare, rows: new Map(), runs: [], focus: null, compared: [] });
    byId("runs-filter").addEventListener("input", () => this.filter());
  }

  // Draw the list; rows that are there are only changed, so that focus and pointer stay.
  update(runs) {
    this.runs = runs;
    for (const [id, row] of this.rows) {
      if (runs.some((run) => run.id === id)) continue;
      row.item.remove();
      this.rows.delete(id);
    }
    for (const run of runs) {
      if (!this.rows.has(run.id)) this.rows.set(run.id, this.makeRow(run));
      const { item, name, about, box, swatch } = this.rows.get(run.id);
      byId("run-list").append(item);
      name.textContent = visible(run.id);
      name.setAttribute("aria-current", run.id === this.focus);
      const figure = ["reward", "loss"].find((key) => isNumber(run.numbers[key]));
      const parts = [run.state, count(run.step) + (run.total ? "/" + count(run.total) : "")];
      if (figure) parts.push(figure + " " + show(run.numbers[figure]));
      about.textContent = parts.join(" \u00b7 ");
      about.className = "dim state-" + run.state.replace(" ", "-");
      const place = this.compared.indexOf(run.id);
      box.checked = place >= 0;
      swatch.className = "swatch" + (place >= 0 ? " c" + place % NUM_COLOURS : "");
    }
    this.filter();
  }

  makeRow(run) {
    const item = make("li"), label = make("label"), box = make("input"), swatch = make("i", null, "swatch"), name = make("button"), about = make("div");
    box.type = "checkbox";
    box.setAttribute("aria-label", "draw the curves of " + visible(run.id));
    name.type = "button";
    label.append(box, swatch);
    item.append(label, name, about);
    box.addEventListener("change", () => this.onCompare(run.id, box.checked));
    name.addEventListener("click", () => this.onFocus(run.id));
    return { item, name, about, box, swatch };
  }

  filter() {
    const words = byId("runs-filter").value.trim().toLowerCase();
    for (const [id, { item }] of this.rows) item.hidden = words !== "" && !id.toLowerCase().includes(words);
  }
}

// The keys in which configs differ, one column a config.
function differences(configs) {
  const keys = [...new Set(configs.flatMap((config) => Object.keys(config)))].sort();
  return keys.filter((key) => new Set(configs.map((config) => config[key])).size > 1);
}

function drawConfig(shown, focused) {
  byId("config-text").textContent = focused.text;
  const earlier = focused.earlier.map((config) => ({ name: config.name, keys: config.keys }));
  const columns = shown.length > 1 ? shown : [...earlier, { name: "config.yaml", keys: focused.keys }];
  const box = byId("config-diff");
  box.replaceChildren();
  if (columns.length < 2) return;
  const keys = differences(columns.map((column) => column.keys));
  box.append(make("h2", shown.length > 1 ? "Config: what differs between these runs" : "Config: what changed when this run went on"));
  if (!keys.length) return box.append(make("p", "All " + columns.length + " configs are the same.", "dim"));
  const rows = keys.map((key) => [make("code", visible(key)), ...columns.map((column) => make("code", key in column.keys ? visible(column.keys[key]) : "not set"))]);
  box.append(scroll(table(["key", ...columns.map((column) => visible(column.name))], rows)));
}
