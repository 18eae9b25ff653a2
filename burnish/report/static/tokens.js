// A completion with its tokens coloured by one of their values; the value under the pointer or the token cursor is read out.

const COLOURINGS = {
  none: { label: "no colour" },
  logp: { label: "log-prob", ends: ["p = 1", "p = 0.01"], signs: false },
  entropy: { label: "entropy", ends: ["0", "3 nats"], signs: false },
  advantage: { label: "advantage", ends: ["\u2212" + "3", "+3"], signs: true },
  gap: { label: "mismatch", ends: ["trainer less sure", "trainer surer"], signs: true },
  mask: { label: "loss mask", ends: ["not in the loss", "in the loss"], signs: true },
};
const LONG = 6000; // tokens drawn at once

function shadeOf(kind, value) {
  if (value === null || value === undefined) return 0;
  if (kind === "logp") return -Math.min(1, -value / 4.6);
  if (kind === "entropy") return -Math.min(1, value / 3);
  if (kind === "mask") return value ? 0.35 : -0.6;
  if (kind === "advantage") return Math.max(-1, Math.min(1, value / 3));
  const size = Math.min(1, Math.max(0, (Math.log10(Math.abs(value) || 1e-9) + 4) / 4)); // 0.0001 to 1, by decades
  return value < 0 ? -size : size;
}

function paint(span, kind, value) {
  const shade = shadeOf(kind, value);
  if (Math.abs(shade) < 0.02) return;
  const colour = shade < 0 ? "--hot" : "--cool";
  span.style.backgroundColor = "rgba(var(" + colour + "), " + (0.1 + 0.7 * Math.abs(shade)).toFixed(2) + ")";
}

// The tokens of a sample: what each says, and its values where there are any.
function tokenList(text, tokens) {
  if (!tokens.widths.length) return null;
  const bytes = new TextEncoder().encode(text), decoder = new TextDecoder();
  const list = [];
  let at = 0, width = 0;
  for (const byte of tokens.widths) {
    width += byte;
    if (byte === 255) continue;
    const k = list.length;
    list.push({
      text: decoder.decode(bytes.subarray(at, at + width)),
      logp: k < tokens.logp.length ? logProb(tokens.logp[k]) : null,
      advantage: k < tokens.advantages.length ? signedValue(tokens.advantages[k]) : null,
      gap: k < tokens.gap.length ? signedValue(tokens.gap[k]) : null,
      entropy: k < tokens.entropy.length ? entropyValue(tokens.entropy[k]) : null,
      mask: k < tokens.mask.length ? maskValue(tokens.mask[k]) : null,
    });
    at += width;
    width = 0;
  }
  return list;
}

function describe(token, place) {
  const about = (value) => "\u2248" + signed(value);
  const parts = ["token " + (place + 1), JSON.stringify(visible(token.text))];
  if (token.logp !== null) parts.push("log-prob " + about(token.logp), "probability \u2248" + show(Math.exp(token.logp)));
  if (token.entropy !== null) parts.push("entropy \u2248" + show(token.entropy));
  if (token.advantage !== null) parts.push("advantage " + about(token.advantage));
  if (token.gap !== null) parts.push("trainer less sampler " + (token.gap === 0 ? "below 0.00001" : about(token.gap)));
  if (token.mask !== null) parts.push(token.mask ? "in the loss" : "not in the loss");
  return parts.join(" \u00b7 ");
}

// Where the words are in a text, as [start, end) pairs.
function hits(text, pattern) {
  if (!pattern) return [];
  const found = [];
  for (const match of text.matchAll(new RegExp(pattern.source, pattern.flags + "g"))) {
    found.push([match.index, match.index + match[0].length]);
    if (found.length === 1000) break;
  }
  return found;
}

// Plain text in a block, with what was searched for marked.
function marked(text, pattern, name) {
  const box = make("pre", null, name || "text");
  box.dir = "auto";
  let at = 0;
  for (const [start, end] of hits(text, pattern)) {
    box.append(visible(text.slice(at, start)), make("mark", visible(text.slice(start, end))));
    at = end;
  }
  box.append(visible(text.slice(at)));
  return box;
}

function colouredText(text, tokens, kind, advantage, pattern, readout) {
  const list = tokenList(text, tokens);
  if (list === null) return marked(text, pattern, "text tokens");
  if (advantage !== null) for (const token of list) if (!tokens.advantages.length) token.advantage = advantage;
  const box = make("pre", null, "text tokens");
  box.dir = "auto";
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "tokens; arrow keys move from one to the next");
  const found = hits(text, pattern);
  let at = 0, hit = 0, drawn = 0, current = -1;
  const draw = (end) => {
    const some = document.createDocumentFragment();
    for (; drawn < end; drawn++) {
      const token = list[drawn], span = make("span", visible(token.text));
      if (kind !== "none") paint(span, kind, token[kind]);
      while (hit < found.length && found[hit][1] <= at) hit++;
      if (hit < found.length && found[hit][0] < at + token.text.length) span.className = "hit";
      at += token.text.length;
      some.append(span);
    }
    box.append(some);
    if (drawn < list.length) {
      const more = make("button", "show the other " + count(list.length - drawn) + " tokens");
      more.addEventListener("click", () => { more.remove(); draw(list.length); });
      box.append(more);
    }
  };
  draw(Math.min(list.length, LONG));
  const read = (place) => {
    if (place < 0 || place >= drawn) return;
    if (current >= 0) box.children[current].classList.remove("at");
    box.children[place].classList.add("at");
    current = place;
    readout.textContent = describe(list[place], place);
  };
  box.addEventListener("pointerover", (event) => {
    if (event.target.tagName === "SPAN") read(Array.prototype.indexOf.call(box.children, event.target));
  });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    if (!move) return;
    event.preventDefault();
    read(Math.min(drawn - 1, Math.max(0, current + move)));
    box.children[current].scrollIntoView({ block: "nearest" });
  });
  return box;
}
