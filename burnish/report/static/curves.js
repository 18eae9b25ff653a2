// The curves of one run or of several: points that are loaded and then added to, and the charts that show them.

class RunCurves {
  constructor(source, run) {
    Object.assign(this, { source, run });
    this.parts = { main: this.none(), other: this.none() };
  }

  none() {
    return { generation: 0, rows: 0, charts: [], series: new Map() };
  }

  // Load what was added to metrics.jsonl. A resumed run begins anew.
  async update(name) {
    const part = this.parts[name];
    const answer = await this.source.json("runs/" + this.run + "/metrics/" + name, { since: part.rows, generation: part.generation });
    if (answer.since === 0 || answer.generation !== part.generation) part.series = new Map();
    else if (answer.since !== part.rows) return; // another answer came first
    Object.assign(part, { generation: answer.generation, rows: answer.rows, charts: answer.charts });
    for (const [metric, points] of Object.entries(answer.series)) {
      const known = part.series.get(metric);
      if (known) for (const point of points) known.push(point);
      else part.series.set(metric, points);
    }
  }
}

// The charts of a part of the page. `shown` are the runs to draw: { name, colour, curves }.
class ChartBoard {
  constructor(part, box) {
    Object.assign(this, { part, box, charts: new Map() });
    this.observer = part === "other" ? new IntersectionObserver((entries) => this.see(entries), { rootMargin: "200px" }) : null;
  }

  // A chart that is far from sight is drawn when it comes near.
  see(entries) {
    for (const { target, isIntersecting } of entries) {
      const chart = target.chart, isNew = isIntersecting && !chart.isNear;
      chart.isNear = isIntersecting;
      if (isNew) chart.draw();
    }
  }

  show(shown) {
    const titles = [...new Set(shown.flatMap((run) => run.curves.parts[this.part].charts.map((chart) => chart.title)))];
    if (this.part === "other") titles.sort();
    for (const [title, chart] of this.charts) {
      if (titles.includes(title)) continue;
      chart.figure.remove();
      if (this.observer) this.observer.unobserve(chart.figure);
      this.charts.delete(title);
    }
    titles.forEach((title, place) => {
      if (!this.charts.has(title)) this.add(title);
      const { figure } = this.charts.get(title);
      if (this.box.children[place] !== figure) this.box.insertBefore(figure, this.box.children[place] || null);
      this.fill(this.charts.get(title), title, shown);
    });
  }

  add(title) {
    const chart = new Chart(title);
    chart.figure.chart = chart;
    this.charts.set(title, chart);
    if (!this.observer) return;
    chart.isNear = false;
    this.observer.observe(chart.figure);
  }

  // One run: a colour a metric. Several runs: a colour a run, and a dash pattern a metric.
  fill(chart, title, shown) {
    const lines = [], isAlone = shown.length === 1;
    const names = [...new Set(shown.flatMap((run) => (run.curves.parts[this.part].charts.find((one) => one.title === title) || { names: [] }).names))];
    for (const run of shown) {
      names.forEach((name, k) => {
        const points = run.curves.parts[this.part].series.get(name);
        if (!points) return;
        const label = isAlone ? name : run.name + (names.length > 1 ? " " + name : "");
        lines.push({ label, points, colour: isAlone ? k : run.colour, dash: isAlone ? 0 : k });
      });
    }
    const legend = isAlone ? lines.map(({ label, colour }) => ({ label, colour })) : names.map((label, dash) => ({ label, dash }));
    chart.setLines(lines, names.length > 1 ? legend : []);
    if (chart.at !== null && chart.isNear && lines.length) chart.read(chart.at);
  }
}
