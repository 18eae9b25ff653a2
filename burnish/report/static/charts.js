// A chart of lines over steps, drawn as SVG: one cursor over all charts of steps, zoom by dragging, smoothing, a logarithmic scale.
// Charts of places (buckets, not steps) have a cursor of their own and no zoom.

const FAR = 6; // pixels that a mouse moves before it selects steps instead of clicking
const NUM_COLOURS = 6;
const DRAWN_POINTS = 800; // about two a pixel
const FEW_POINTS = 20; // a line of so few has dots
const SIZES = { left: 62, right: 12, top: 12, bottom: 26, width: 460, height: 240 };
const SVG = "http://www.w3.org/2000/svg";
const plain = () => ({ low: -Infinity, high: Infinity, weight: 0, isLog: false });
let look = plain(); // the steps in sight and how they are drawn, the same for all charts

const dashName = (dash) => (dash ? " d" + Math.min(3, dash) : "");

// A line has a label, points, a colour from 0 on, and a dash pattern from 0 on.
class Chart {
  constructor(title, options = {}) {
    this.figure = make("figure", null, "chart");
    this.figure.tabIndex = 0;
    this.svg = this.node("svg", { viewBox: [0, 0, SIZES.width, SIZES.height].join(" "), role: "img", "aria-label": visible(title) });
    const caption = make("figcaption", visible(title));
    this.output = make("output");
    this.legend = make("div", null, "legend");
    caption.append(this.note = make("span", "", "dim"));
    this.figure.append(caption, this.svg, this.legend, this.output);
    Object.assign(this, { title, data: { ...SIZES, places: options.places || [], hints: options.hints || [], x: [0, 1] }, lines: [], steps: [], at: null, isNear: true });
    this.isOfSteps = !this.data.places.length;
    listen(this);
  }

  // `legend` has a label with a colour or a dash pattern for each entry.
  setLines(lines, legend) {
    this.lines = lines;
    this.steps = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
    const [low, high] = this.steps.length ? bounds([this.steps[0], this.steps[this.steps.length - 1]], false) : [0, 1];
    this.data.x = [low, high];
    this.figure.classList.toggle("several", lines.length > 1);
    this.legend.replaceChildren(...legend.map(({ label, colour, dash }) => {
      const entry = make("span");
      entry.append(make("i", null, colour === undefined ? "stroke" + dashName(dash) : "swatch c" + colour % NUM_COLOURS), visible(label));
      return entry;
    }));
    if (this.isNear) this.draw();
  }

  get range() {
    const [low, high] = this.data.x;
    return this.isOfSteps ? [Math.max(low, look.low), Math.min(high, look.high)] : [low, high];
  }

  node(tag, attributes, name, text) {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (name) node.setAttribute("class", name);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  draw() {
    const { width, height, left, right, top, bottom, places } = this.data, [low, high] = this.range;
    const cut = (points) => thinned(this.isOfSteps ? inSight(points, low, high) : points, DRAWN_POINTS);
    const raw = this.lines.map((line) => cut(line.points));
    const weight = this.isOfSteps ? look.weight : 0; // smoothed over all points, then cut to those in sight
    const soft = this.lines.map((line, k) => (weight ? cut(smoothed(line.points, weight)) : raw[k]));
    const values = [...raw, ...(weight ? soft : [])].flat().map((point) => point[1]), hidden = look.isLog ? raw.flat().filter((p) => !(p[1] > 0)).length : 0;
    const span = high > low ? bounds(values, look.isLog) : null;
    const cursor = this.node("line", { y1: top, y2: height - bottom, x1: -9, x2: -9 }, "cursor");
    if (span === null) {
      const why = values.length && high > low ? "no value above zero" : "no points in these steps";
      this.note.textContent = "";
      this.svg.replaceChildren(this.node("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "tick", why), cursor);
      return;
    }
    const x = (step) => this.place(step).toFixed(1);
    const y = (value) => (height - bottom - part(value, span, look.isLog) * (height - top - bottom)).toFixed(1);
    const nodes = [];
    for (const value of look.isLog ? logTicks(...span) : ticks(...span, 4)) {
      nodes.push(this.node("line", { x1: left, x2: width - right, y1: y(value), y2: y(value) }, "grid"));
      nodes.push(this.node("text", { x: left - 6, y: Number(y(value)) + 4, "text-anchor": "end" }, "tick", short(value)));
    }
    const names = places.length ? places.map((name, k) => [k, name]) : ticks(low, high, 5).filter(Number.isInteger).map((k) => [k, k]);
    for (const [step, name] of names) nodes.push(this.node("text", { x: x(step), y: height - 8, "text-anchor": "middle" }, "tick", name));
    const inner = this.node("svg", { x: left, y: 0, width: width - left - right, height, viewBox: [left, 0, width - left - right, height].join(" ") });
    const shown = (points) => (look.isLog ? points.filter((point) => point[1] > 0) : points);
    const line = (points, name) => inner.append(this.node("polyline", { points: shown(points).map((p) => x(p[0]) + "," + y(p[1])).join(" ") }, name));
    raw.forEach((points, k) => {
      const { colour, dash } = this.lines[k], name = "c" + colour % NUM_COLOURS + dashName(dash);
      line(points, "line " + name + (weight ? " faint" : ""));
      if (weight) line(soft[k], "line " + name);
      if (FEW_POINTS >= points.length) for (const p of shown(points)) inner.append(this.node("circle", { cx: x(p[0]), cy: y(p[1]), r: 2.5 }, "dot " + name + (weight ? " faint" : "")));
    });
    this.note.textContent = hidden ? " " + count(hidden) + (hidden === 1 ? " point" : " points") + " at or below 0 not shown" : "";
    this.svg.replaceChildren(...nodes, inner, cursor);
  }

  place(step) {
    const { left, right, width } = this.data;
    return left + part(step, this.range, false) * (width - left - right);
  }

  stepAt(event) {
    const box = this.svg.getBoundingClientRect(), { left, right, width } = this.data, [low, high] = this.range;
    const share = ((event.clientX - box.left) / box.width * width - left) / (width - left - right);
    return Math.min(high, Math.max(low, low + share * (high - low)));
  }

  // The step of a point of this chart that is nearest to a step.
  snap(step) {
    return nearest(this.steps.map((s) => [s]), step)[0];
  }

  // The cursor at a step, and under the chart what each line has there.
  read(step) {
    const { hints } = this.data, [low, high] = this.range, cursor = this.svg.querySelector(".cursor");
    this.at = step;
    const place = step >= low && high >= step ? this.place(step) : -9;
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    const several = this.lines.length > 1;
    const texts = this.lines.map(({ label, points }) => {
      const [at, value] = nearest(points, step), soft = look.weight && this.isOfSteps ? smoothed(points, look.weight) : null;
      const more = soft ? " (smoothed " + short(nearest(soft, step)[1]) + ")" : "";
      return (several ? visible(label) + " " : "") + short(value) + more + (at === step || hints.length ? "" : " (step " + at + ")");
    });
    this.output.textContent = (hints.length ? hints[step] : "step " + step) + ": " + texts.join(", ");
  }
}

let allCharts = []; // those on the page
let ofSteps = [];

function setCharts(charts) {
  allCharts = charts;
  ofSteps = charts.filter((chart) => chart.isOfSteps);
}

function point(chart, step) {
  for (const one of chart.isOfSteps ? ofSteps : [chart]) {
    if (!one.isNear || !one.lines.length) continue;
    one.output.setAttribute("aria-live", one === chart ? "polite" : "off"); // one voice, not that of every chart
    one.read(step);
  }
}

const redraw = settled(0, () => {
  for (const chart of allCharts) {
    if (!chart.isNear) continue;
    chart.draw();
    if (chart.at !== null) chart.read(chart.at);
  }
  byId("smoothing-value").textContent = look.weight;
});

// Whole steps from low to high in sight; all of them where that is everything or nothing.
function zoom(from, to) {
  const low = Math.floor(from), high = Math.ceil(to);
  const first = Math.min(...ofSteps.map((chart) => chart.data.x[0])), last = Math.max(...ofSteps.map((chart) => chart.data.x[1]));
  look.low = low > first ? low : -Infinity;
  look.high = last > high ? high : Infinity;
  if (!(look.high > look.low)) Object.assign(look, { low: -Infinity, high: Infinity });
  byId("zoom-low").value = look.low === -Infinity ? "" : look.low;
  byId("zoom-high").value = look.high === Infinity ? "" : look.high;
  redraw();
}

// In or out by a factor, around the cursor where there is one.
function zoomBy(factor, chart = ofSteps[0]) {
  if (!chart) return;
  const [low, high] = chart.range, middle = chart.at !== null && chart.at >= low && high >= chart.at ? chart.at : (low + high) / 2;
  if (1 / factor > (high - low) / 2) return; // fewer than two steps are no curve
  zoom(middle - (middle - low) / factor, middle + (high - middle) / factor);
}

// Dragging with a mouse or a pen selects steps; a finger moves the cursor, and leaves scrolling up and down to the page.
function listen(chart) {
  const { svg, figure } = chart;
  let start = null, box = null;
  const end = () => { if (box) box.remove(); start = box = null; };
  svg.addEventListener("pointerdown", (event) => {
    point(chart, chart.snap(chart.stepAt(event)));
    if (!chart.isOfSteps || event.pointerType === "touch" || event.button) return;
    event.preventDefault(); // no text is selected
    figure.focus({ preventScroll: true });
    svg.setPointerCapture(event.pointerId);
    start = [event.clientX, chart.stepAt(event)];
  });
  svg.addEventListener("pointermove", (event) => {
    point(chart, chart.snap(chart.stepAt(event)));
    if (start === null || FAR > Math.abs(event.clientX - start[0])) return;
    if (!box) svg.append(box = chart.node("rect", { y: chart.data.top, height: chart.data.height - chart.data.top - chart.data.bottom }, "selected"));
    const ends = [chart.place(start[1]), chart.place(chart.stepAt(event))].sort((a, b) => a - b);
    box.setAttribute("x", ends[0]);
    box.setAttribute("width", ends[1] - ends[0]);
  });
  svg.addEventListener("pointerup", (event) => {
    const ends = box && [start[1], chart.stepAt(event)].sort((a, b) => a - b);
    end();
    if (ends) zoom(...ends);
  });
  svg.addEventListener("pointercancel", end);
  if (chart.isOfSteps) svg.addEventListener("dblclick", () => zoom(-Infinity, Infinity));
  figure.addEventListener("keydown", (event) => {
    const zooms = { "+": () => zoomBy(2, chart), "=": () => zoomBy(2, chart), "-": () => zoomBy(0.5, chart), 0: () => zoom(-Infinity, Infinity) };
    const steps = chart.steps.filter((step) => step >= chart.range[0] && chart.range[1] >= step);
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !(move && steps.length) && !(chart.isOfSteps && zooms[event.key])) return;
    event.preventDefault();
    if (!move) return zooms[event.key]();
    const now = chart.at === null ? (move > 0 ? -1 : steps.length) : steps.indexOf(chart.snap(chart.at));
    point(chart, steps[Math.min(steps.length - 1, Math.max(0, now + move))]);
  });
}

function listenToControls() {
  const field = (name) => Number(byId(name).value), bound = (name, none) => (byId(name).value === "" ? none : field(name));
  byId("smoothing").addEventListener("input", () => { look.weight = field("smoothing"); redraw(); });
  byId("log-scale").addEventListener("input", () => { look.isLog = byId("log-scale").checked; redraw(); });
  for (const name of ["zoom-low", "zoom-high"]) byId(name).addEventListener("change", () => zoom(bound("zoom-low", -Infinity), bound("zoom-high", Infinity)));
  byId("zoom-in").addEventListener("click", () => zoomBy(2));
  byId("zoom-out").addEventListener("click", () => zoomBy(0.5));
  byId("controls").addEventListener("reset", () => { look = plain(); redraw(); });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
}
