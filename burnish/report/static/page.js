// The page as a whole: which run is shown, which are drawn together, and, on the live page, what is asked for when files have changed.

const POLL_MS = 1000; // between two looks at the list of runs
const HIDDEN_POLL_MS = 10000; // while nobody looks at the page

class Page {
  constructor(source) {
    this.source = source;
    this.pollMs = POLL_MS;
    this.focus = null; // id of the run that is shown
    this.compared = []; // ids of the runs whose curves are drawn; a run keeps its place, and so its colour
    this.runs = [];
    this.curves = new Map();
    this.configs = new Map();
    this.stamps = new Map(); // what was loaded, by run and part
    this.store = null;
    this.boards = { main: new ChartBoard("main", byId("main-charts")), other: new ChartBoard("other", byId("other-charts")) };
    this.explorer = new Explorer();
    this.table = new RunTable((id) => this.choose(id), (id, isOn) => this.compare(id, isOn));
    listenToControls();
    byId("other").addEventListener("toggle", () => this.load());
    addEventListener("hashchange", () => this.fromAddress());
  }

  // #run=ID&with=ID&with=ID
  fromAddress() {
    const options = new URLSearchParams(location.hash.slice(1)), id = options.get("run"), isKnown = (one) => this.runs.some((run) => run.id === one);
    if (!id || !isKnown(id)) return null;
    const compared = [id, ...options.getAll("with").filter((one) => one !== id && isKnown(one))];
    if (id === this.focus && compared.join("|") === this.compared.join("|")) return null;
    this.compared = compared;
    return this.show(id);
  }

  toAddress() {
    if (!this.source.isLive) return;
    const options = new URLSearchParams([["run", this.focus], ...this.compared.filter((id) => id !== this.focus).map((id) => ["with", id])]);
    history.replaceState(null, "", "#" + options);
  }

  choose(id) {
    if (!this.compared.includes(id)) this.compared = this.compared.map((one) => (one === this.focus ? id : one));
    this.show(id);
  }

  compare(id, isOn) {
    if (isOn) this.compared.push(id);
    else if (this.compared.length > 1) this.compared.splice(this.compared.indexOf(id), 1);
    if (!this.compared.includes(this.focus)) return this.show(this.compared[0]);
    this.toAddress();
    this.table.compared = this.compared;
    this.table.update(this.runs);
    return this.load();
  }

  show(id) {
    if (!this.compared.length) this.compared = [id];
    if (id !== this.focus) {
      this.store = new Store(this.source, id);
      this.explorer.open(this.store);
      this.stamps.delete("overview");
      this.stamps.delete("samples");
      this.stamps.delete("scored");
    }
    this.focus = id;
    Object.assign(this.table, { focus: id, compared: this.compared });
    this.table.update(this.runs);
    this.toAddress();
    return this.load();
  }

  // Look at the list of runs, then load what has changed.
  async look() {
    const { runs, scalings } = await this.source.json("runs");
    this.runs = runs;
    byId("runs").hidden = !this.source.isLive;
    if (this.isDue("scaling links", scalings.join("|"))) drawScalingLinks(scalings);
    const isKnown = (id) => this.runs.some((run) => run.id === id);
    this.compared = this.compared.filter(isKnown);
    if (!this.runs.length) return;
    this.table.update(this.runs);
    if (this.focus === null) await this.fromAddress();
    if (isKnown(this.focus)) await this.load();
    else await this.show(this.firstRun());
  }

  // The run that a reader most likely wants: one that trains, else the one that wrote last.
  firstRun() {
    const age = (run) => (run.silent_s === null ? Infinity : run.silent_s);
    const sorted = [...this.runs].sort((a, b) => (b.state === "running") - (a.state === "running") || age(a) - age(b) || 0);
    return sorted[0].id;
  }

  // Whether a part must be loaded, because a file changed that it is made from.
  isDue(part, stamp) {
    if (this.stamps.get(part) === stamp) return false;
    this.stamps.set(part, stamp);
    return true;
  }

  async load() {
    const run = this.runs.find((one) => one.id === this.focus);
    if (this.source.isLive) {
      drawStatus(run);
      document.title = visible(run.name) + " " + run.step + (run.total ? "/" + run.total : "");
    }
    await Promise.all([this.loadOverview(run), this.loadCurves(), this.loadConfig(), this.loadScored(run), this.loadSamples(run)]);
    document.body.dataset.loaded = Number(document.body.dataset.loaded || 0) + 1;
  }

  async loadOverview(run) {
    const { metrics, log, worst, scalings } = run.stamps;
    if (!this.isDue("overview", [run.id, metrics, log, worst, scalings].join())) return;
    const overview = await this.source.json("runs/" + run.id);
    if (run.id !== this.focus) return;
    drawOverview(overview);
    byId("title").textContent = visible(overview.name);
    this.gatherCharts();
  }

  async loadCurves() {
    const shown = this.shownRuns(), parts = byId("other").open ? ["main", "other"] : ["main"];
    const loads = [];
    for (const { id, stamps, curves } of shown) {
      for (const part of parts) if (this.isDue("metrics/" + part + "/" + id, stamps.metrics)) loads.push(curves.update(part));
    }
    await Promise.all(loads);
    const drawn = shown.map((run) => run.id + run.colour).join() + parts.join();
    if (!loads.length && drawn === this.drawn) return;
    this.drawn = drawn;
    for (const part of parts) this.boards[part].show(this.shownRuns());
    byId("run-legend").replaceChildren(...(shown.length > 1 ? shown : []).map((run) => {
      const entry = make("span");
      entry.append(make("i", null, "swatch c" + run.colour % NUM_COLOURS), visible(run.id));
      return entry;
    }));
    this.gatherCharts();
  }

  gatherCharts() {
    setCharts([...this.boards.main.charts.values(), ...this.boards.other.charts.values(), ...profileCharts]);
  }

  shownRuns() {
    return this.compared.map((id, colour) => {
      if (!this.curves.has(id)) this.curves.set(id, new RunCurves(this.source, id));
      const run = this.runs.find((one) => one.id === id);
      return { id, name: id, colour, stamps: run.stamps, curves: this.curves.get(id) };
    });
  }

  async loadConfig() {
    const shown = this.shownRuns(), due = shown.filter((run) => this.isDue("config/" + run.id, run.stamps.config));
    await Promise.all(due.map(async ({ id, stamps }) => {
      this.configs.set(id, { ...await this.source.json("runs/" + id + "/config"), stamp: stamps.config });
    }));
    // Another load may have asked for a config that is still on its way: what is drawn is known by what has come.
    const known = shown.filter((run) => this.configs.has(run.id));
    if (!this.isDue("config", known.map((run) => run.id + this.configs.get(run.id).stamp).join() + this.focus)) return;
    if (this.configs.has(this.focus)) drawConfig(known.map((run) => ({ name: run.id, keys: this.configs.get(run.id).keys })), this.configs.get(this.focus));
  }

  // The rollouts of the present step, on the page of a run that trains.
  async loadScored(run) {
    byId("scored").hidden = run.state !== "running" || !run.stamps.scored || !this.source.isLive;
    if (byId("scored").hidden || !this.isDue("scored", run.id + run.stamps.scored)) return;
    const { rollouts } = await this.source.json("runs/" + run.id + "/scored");
    if (run.id === this.focus) drawScored(byId("scored"), rollouts, this.store.range);
  }

  // A large index comes in several parts: the first is shown at once, and the list is complete when the last has come.
  async loadSamples(run) {
    if (!this.isDue("samples", run.id + run.stamps.samples)) return;
    const { store, explorer } = this;
    let isFirst = !store.numSamples, hasChanged = false;
    do {
      hasChanged = await store.update() || hasChanged;
      if (store !== this.store) return;
      if (isFirst || store.isComplete) {
        if (isFirst || hasChanged) await explorer.refresh(!isFirst);
        isFirst = false;
      }
    } while (!store.isComplete);
  }

  async follow() {
    for (;;) {
      const started = performance.now();
      try {
        await this.look();
        byId("connection").textContent = "";
      } catch (error) {
        this.stamps.clear(); // what was not loaded is loaded again
        const isChange = error.status === 404 || error.status === 409; // of a run while it was read
        if (!isChange) byId("connection").textContent = error.message;
        if (!(error instanceof RefusedError)) throw error;
      }
      const pause = document.hidden ? HIDDEN_POLL_MS : this.pollMs;
      await new Promise((resolve) => setTimeout(resolve, Math.max(100, pause - (performance.now() - started))));
    }
  }
}

const page = new Page(findSource());
if (page.source.isLive) page.follow();
else if (typeof DecompressionStream === "undefined") byId("connection").textContent = "This browser is too old to unpack the data of this page (it has no DecompressionStream).";
else page.look().catch((error) => {
  byId("connection").textContent = "The data of this page could not be unpacked: " + error;
  throw error;
});
