// The values under the pointer, or under a cursor that the arrow keys move.

const charts = JSON.parse(byId("charts").textContent);

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] > step) high = middle; else low = middle;
  }
  return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
}

function readChart(figure, chart, step) {
  const inner = chart.width - chart.left - chart.right;
  const found = [];
  let at = null;
  for (const [name, points] of Object.entries(chart.series)) {
    const best = nearest(points, step);
    if (at === null || Math.abs(best[0] - step) < Math.abs(at - step)) at = best[0];
    found.push([name, best]);
  }
  const place = chart.left + (at - chart.x[0]) / (chart.x[1] - chart.x[0]) * inner;
  const cursor = figure.querySelector(".cursor");
  cursor.setAttribute("x1", place);
  cursor.setAttribute("x2", place);
  const head = chart.hints.length ? chart.hints[at] : "step " + at;
  const several = found.length > 1;
  figure.querySelector("output").textContent =
    head + ": " + found.map(([name, point]) => (several ? name + " " : "") + point[1] + (point[0] === at || chart.hints.length ? "" : " (step " + point[0] + ")")).join(", ");
  return at;
}

for (const figure of document.querySelectorAll("figure.chart")) {
  const chart = charts[Number(figure.dataset.chart)];
  const svg = figure.querySelector("svg");
  const steps = [...new Set(Object.values(chart.series).flatMap((points) => points.map((point) => point[0])))].sort((a, b) => a - b);
  let at = null;
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * chart.width;
    const inner = chart.width - chart.left - chart.right;
    at = readChart(figure, chart, chart.x[0] + (x - chart.left) / inner * (chart.x[1] - chart.x[0]));
  });
  figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
    if (!move) return;
    event.preventDefault();
    const now = at === null ? (move > 0 ? -1 : steps.length) : steps.indexOf(at);
    at = readChart(figure, chart, steps[Math.min(steps.length - 1, Math.max(0, now + move))]);
  });
}
