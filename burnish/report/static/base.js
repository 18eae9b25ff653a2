"use strict";
// What every part of the page uses: making nodes, showing numbers, and making hostile text harmless to the eye.
// Text reaches the page through textContent alone, so that nothing a model wrote can become markup.

const byId = (id) => document.getElementById(id);

function make(tag, text, name) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (name) node.className = name;
  return node;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const show = (value) => (isNumber(value) ? String(Number(value.toPrecision(3))) : "none");
const signed = (value) => (isNumber(value) && value > 0 ? "+" : "") + show(value);
const count = (value) => value.toLocaleString("en");

// Characters that would be invisible, or would turn the text around them: controls as their pictures, directions by number.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

function visible(text) {
  return text.replace(UNSEEN, (character) => {
    const code = character.charCodeAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    if (code === 127) return "\u2421";
    return "\u27e8" + code.toString(16).toUpperCase().padStart(4, "0") + "\u27e9";
  });
}

// A link to a part that is folded unfolds it.
function unfold(place) {
  const folded = place && document.querySelector(place + " > details");
  if (folded) folded.open = true;
}

for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", () => unfold(link.hash));
if (/^#[a-z]+$/.test(location.hash)) unfold(location.hash);

function table(names, rows) {
  const node = make("table"), head = make("tr");
  head.append(...names.map((name) => make("th", name)));
  node.append(head);
  for (const cells of rows) {
    const row = make("tr");
    for (const cell of cells) {
      const box = make("td");
      box.append(cell);
      row.append(box);
    }
    node.append(row);
  }
  return node;
}

// Calls that come faster than they can be answered: only the last one is, after a moment of quiet.
function settled(delay, action) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, delay);
  };
}
