"""The parts of the HTML page that never change: its style sheet, its script and the frame that holds them.

What a model wrote reaches the page as JSON in a data block, and the script puts it on screen only through
`textContent` and `title`, or escaped where a table shows single tokens, so no completion can become markup. The content
security policy allows this one script by its hash and no connection to anywhere, should that ever be got wrong.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1d2129; --dim: #667; --card: #f6f7f9; --edge: #dde1e7; --hot: 214, 69, 31;
  --c0: #2463c9; --c1: #d9661f; --c2: #2b8a4b; --c3: #9b3fb5; --c4: #b8860b; --c5: #c0305c; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171c; --fg: #e4e7ec; --dim: #99a1ad; --card: #1d2229; --edge: #333a45;
  --hot: 255, 120, 70; --c0: #6ea3ff; --c1: #ff9a57; --c2: #62c983; --c3: #d18ae6; --c4: #e3b94c; --c5: #f2789c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 16px; background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5em; margin: 0.2em 0; overflow-wrap: anywhere; } h2 { font-size: 1.15em; margin: 1.6em 0 0.5em; }
.dim { color: var(--dim); }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 10px; }
.numbers div { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 10px 12px; }
.numbers b { display: block; font-size: 1.35em; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); gap: 12px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 8px; min-width: 0; }
figcaption { font-weight: 600; font-size: 0.9em; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; touch-action: pan-y; }
.grid { stroke: var(--edge); } .tick { fill: var(--dim); font-size: 11px; } .cursor { stroke: var(--dim); stroke-dasharray: 3 3; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.line.c3 { stroke: var(--c3); } .line.c4 { stroke: var(--c4); } .line.c5 { stroke: var(--c5); }
.dot.c0 { fill: var(--c0); } .dot.c1 { fill: var(--c1); } .dot.c2 { fill: var(--c2); }
.dot.c3 { fill: var(--c3); } .dot.c4 { fill: var(--c4); } .dot.c5 { fill: var(--c5); }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px; }
.swatch.c0 { background: var(--c0); } .swatch.c1 { background: var(--c1); } .swatch.c2 { background: var(--c2); }
.swatch.c3 { background: var(--c3); } .swatch.c4 { background: var(--c4); } .swatch.c5 { background: var(--c5); }
.legend { font-size: 0.78em; color: var(--dim); display: flex; flex-wrap: wrap; gap: 2px 12px; }
output { display: block; min-height: 1.5em; font-size: 0.78em; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } td, th { padding: 2px 14px 2px 0; text-align: left; }
.scroll { overflow-x: auto; } code { white-space: pre; } mark { background: rgba(var(--hot), 0.45); color: inherit; border-radius: 2px; }
pre { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 10px; overflow-x: auto; font-size: 13px; }
pre.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0; }
summary { cursor: pointer; }
.filters { display: flex; flex-wrap: wrap; gap: 8px; margin-bottom: 8px; }
.filters label { font-size: 0.85em; color: var(--dim); display: flex; gap: 4px; align-items: center; }
input, select, button { font: inherit; color: var(--fg); background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: 4px 8px; }
input[type=number] { width: 6em; }
.group { border: 1px solid var(--edge); border-radius: 8px; padding: 10px 12px; margin-bottom: 12px; }
.sample { border-top: 1px solid var(--edge); padding: 6px 0; }
.sample summary span { margin-right: 12px; font-variant-numeric: tabular-nums; }
.bad { color: rgb(var(--hot)); }
.tokens span { border-radius: 2px; }
"""

SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
function make(tag, text, name) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (name) node.className = name;
  return node;
}
const show = (value) => value === null || value === undefined ? "none" : String(Math.round(value * 1000) / 1000);

for (const figure of document.querySelectorAll("figure.chart")) {
  const chart = data.charts[Number(figure.dataset.chart)];
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor"), output = figure.querySelector("output");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * chart.width;
    const inner = chart.width - chart.left - chart.right;
    const step = chart.x[0] + (x - chart.left) / inner * (chart.x[1] - chart.x[0]);
    const found = [];
    let at = null;
    for (const [name, points] of Object.entries(chart.series)) {
      let best = points[0];
      for (const point of points) if (Math.abs(point[0] - step) < Math.abs(best[0] - step)) best = point;
      if (at === null || Math.abs(best[0] - step) < Math.abs(at - step)) at = best[0];
      found.push(name + " " + best[1] + (chart.hints.length ? "" : " (step " + best[0] + ")"));
    }
    const place = chart.left + (at - chart.x[0]) / (chart.x[1] - chart.x[0]) * inner;
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    output.textContent = (chart.hints.length ? chart.hints[at] + "; " : "") + found.join(", ");
  });
}

function tokens(sample) {
  const box = make("pre", null, "text tokens");
  if (!sample.pieces.length) { box.textContent = sample.text || ""; return box; }
  sample.pieces.forEach((piece, index) => {
    if (sample.cut && index === sample.head) box.append(make("em", " [... " + sample.cut + " tokens left out ...] ", "dim"));
    const span = make("span", piece);
    const logp = sample.logp[index];
    if (logp !== null && logp !== undefined) {
      const shade = Math.min(0.85, Math.max(0, -logp) / 5);
      span.style.backgroundColor = "rgba(var(--hot), " + shade.toFixed(2) + ")";
      span.title = JSON.stringify(piece) + "  log-prob " + logp.toFixed(3) + "  probability " + Math.exp(logp).toFixed(3);
    }
    box.append(span);
  });
  return box;
}

function sampleNode(sample) {
  const node = make("details", null, "sample"), head = make("summary");
  head.append(make("span", "reward " + show(sample.reward), sample.reward === null ? "bad" : ""));
  if (sample.advantage !== null) head.append(make("span", "advantage " + show(sample.advantage)));
  if (sample.accuracy !== null) head.append(make("span", "accuracy " + show(sample.accuracy)));
  head.append(make("span", sample.length + " tokens", "dim"));
  if (sample.truncated) head.append(make("span", "truncated", "bad"));
  for (const [name, value] of Object.entries(sample.parts))
    head.append(make("span", name + " " + (typeof value === "number" ? show(value) : JSON.stringify(value)), "dim"));
  node.append(head, tokens(sample));
  if (sample.text && sample.pieces.length) node.append(make("div", "as text:", "dim"), make("pre", sample.text, "text"));
  if (sample.error) node.append(make("div", "the scorer failed:", "bad"), make("pre", sample.error, "text"));
  return node;
}

function groupNode(group, samples) {
  const node = make("section", null, "group");
  node.append(make("div", "step " + group.step + ", " + group.kind + ", " + (group.source || "") + ", prompt " + group.group, "dim"));
  node.append(make("pre", group.prompt, "text"));
  if (group.answer !== null) node.append(make("div", "expected: " + group.answer));
  samples.forEach((sample, index) => {
    const child = sampleNode(sample);
    child.open = index === 0;
    node.append(child);
  });
  return node;
}

const PAGE = 20;
let limit = PAGE;
function matching() {
  const step = byId("step").value, kind = byId("kind").value, words = byId("search").value.toLowerCase();
  const low = byId("low").value, high = byId("high").value;
  const result = [];
  for (const group of data.groups) {
    if ((step && String(group.step) !== step) || (kind && group.kind !== kind)) continue;
    const about = (group.prompt + "\\n" + (group.answer || "")).toLowerCase();
    const samples = group.samples.filter((sample) => {
      if ((low !== "" || high !== "") && sample.reward === null) return false;
      if (low !== "" && sample.reward < Number(low)) return false;
      if (high !== "" && sample.reward > Number(high)) return false;
      return !words || about.includes(words) || (sample.text || sample.pieces.join("")).toLowerCase().includes(words);
    });
    if (samples.length) result.push([group, samples]);
  }
  return result;
}
function render() {
  const found = matching();
  const count = found.reduce((sum, entry) => sum + entry[1].length, 0);
  byId("count").textContent = count + " samples of " + found.length + " prompts";
  byId("rollouts").replaceChildren(...found.slice(0, limit).map((entry) => groupNode(...entry)));
  byId("more").hidden = found.length <= limit;
}
function options(id, values) {
  for (const value of values) { const node = make("option", value); node.value = value; byId(id).append(node); }
}
if (data.groups.length) {
  options("step", [...new Set(data.groups.map((group) => group.step))].sort((a, b) => a - b));
  options("kind", [...new Set(data.groups.map((group) => group.kind))].sort());
  for (const id of ["step", "kind", "low", "high", "search"])
    byId(id).addEventListener("input", () => { limit = PAGE; render(); });
  byId("more").addEventListener("click", () => { limit += PAGE; render(); });
  const last = data.groups[data.groups.length - 1].step;
  byId("step").value = String(last);
  render();
}
"""

FILTERS = """<div class="filters">
<label>step <select id="step"><option value="">all</option></select></label>
<label>kind <select id="kind"><option value="">all</option></select></label>
<label>reward from <input id="low" type="number" step="any"></label>
<label>to <input id="high" type="number" step="any"></label>
<label>text <input id="search" type="search"></label>
</div>
<p class="dim">A darker token was less likely when it was sampled; point at it for its log-prob. <span id="count"></span></p>
<noscript><p>Sample rollouts are shown by this page's script, which is switched off.</p></noscript>
<div id="rollouts"></div><button id="more" hidden>show more</button>"""


def frame(title: str, body: str, data: str) -> str:
    """The whole document. `body` is markup, escaped by its maker; `data` is JSON from `data_block`."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{data}</script>\n<script>{SCRIPT}</script>\n</body></html>\n'
    )


def data_block(text: str) -> str:
    """JSON that can stand inside a script element: no character of it can end the element or begin a comment."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
