// The explorer: filters above, found samples on one side, the chosen one with its group on the other.

const ROW = 62;

function chip(text, name) {
  return make("span", text, "chip " + (name || ""));
}

// The place of a reward between the lowest and the highest of the run, as a colour class of five.
function rewardClass({ range }, reward) {
  if (reward === null) return "bad";
  const [low, high] = range, share = high > low ? (reward - low) / (high - low) : 1;
  return "r" + Math.round(4 * Math.min(1, Math.max(0, share))); // the reward of one turn may be beyond those of episodes
}

function option(value, text) {
  const node = make("option", text);
  node.value = value;
  return node;
}

class Explorer {
  constructor() {
    this.store = null;
    this.searches = 0;
    this.want = wanted();
    this.sample = null;
    this.asGroup = false;
    this.matching = new Set();
    this.list = new VirtualList(byId("list"), ROW, (row, item) => this.drawRow(row, item), (item) => this.choose(item));
    const again = settled(120, () => this.refresh());
    for (const field of byId("filters").elements) field.addEventListener("input", again);
    for (const [name, colouring] of Object.entries(COLOURINGS)) byId("colour").append(option(name, colouring.label));
    byId("colour").value = "logp";
    byId("colour").addEventListener("input", () => this.showDetail());
    byId("filters").addEventListener("reset", () => setTimeout(() => this.refresh()));
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
  }

  // Show the samples of another run.
  open(store) {
    Object.assign(this, { store, sample: null, asGroup: false });
    this.searches++;
    for (const name of ["kind", "finish"]) byId(name).value = "";
    this.list.set([], -1);
    byId("detail").replaceChildren();
  }

  // The names that can be chosen may grow with the run.
  fill() {
    for (const [name, texts] of [["kind", this.store.kinds], ["finish", this.store.finishes]]) {
      const field = byId(name), chosen = field.value;
      field.replaceChildren(field.options[0], ...texts.map((text, k) => option(k, visible(text))));
      field.value = chosen;
    }
    byId("right").parentElement.hidden = !this.store.hasAccuracy; // graded rewards are neither right nor wrong
    byId("samples-note").textContent = this.store.leftOut;
  }

  // Find what the fields ask for. `stays`: new samples came, and the reader has not asked for anything else.
  async refresh(stays = false) {
    const { store } = this, search = ++this.searches, want = wanted(), isCurrent = () => search === this.searches;
    this.fill();
    if (!store.numSamples) {
      byId("count").textContent = store.waiting ? "reading the samples of this run" : "This run has written no samples yet.";
      document.body.dataset.settled = search;
      return;
    }
    let found = byIndex(store, want);
    if (want.pattern) {
      byId("explorer").setAttribute("aria-busy", "true");
      const progress = (share) => { byId("count").textContent = "searching: " + Math.round(100 * share) + "%"; };
      found = await byWords(store, found, want, isCurrent, progress);
      if (found === null) return;
    }
    byId("explorer").removeAttribute("aria-busy");
    if (want.order !== this.want.order) this.sample = null; // who asks for the best wants to see it
    this.want = want;
    found = ordered(store, found, want.order);
    const [text, rewards] = summary(store, found, want);
    byId("count").textContent = text + (store.waiting ? " \u00b7 " + count(store.waiting) + " older tables are being read" : "");
    histogram(byId("histogram"), rewards);
    this.isUnitGroup = want.unit === "groups";
    this.matching = new Set(found);
    const items = this.isUnitGroup ? [...new Set(found.map((s) => store.groupOf[s]))] : found;
    const chosen = this.sample === null ? -1 : items.indexOf(this.isUnitGroup ? store.groupOf[this.sample] : this.sample);
    this.asGroup = this.isUnitGroup || (this.asGroup && chosen >= 0);
    this.list.set(items, Math.max(0, chosen), stays);
    if (items.length && !(stays && chosen >= 0)) this.choose(items[this.list.chosen]);
    else if (!items.length) {
      this.sample = null;
      byId("detail").replaceChildren(make("p", "No sample is like that.", "dim"));
    }
    document.body.dataset.settled = search;
  }

  drawRow(row, item) {
    const { store } = this, first = this.isUnitGroup ? store.groups.first[item] : item;
    const group = store.groupOf[first], { samples, groups } = store;
    const head = make("div", null, "head");
    if (this.isUnitGroup) {
      for (const s of store.members(item).slice(0, 24)) head.append(make("i", null, "dot-reward " + rewardClass(store, samples.reward[s])));
      const rewards = store.members(item).map((s) => samples.reward[s]).filter(isNumber);
      head.append(make("b", show(rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null)));
    } else {
      head.append(chip(show(samples.reward[item]), "reward " + rewardClass(store, samples.reward[item])));
      if (samples.advantage[item] !== null) head.append(make("span", "adv " + signed(samples.advantage[item])));
      head.append(make("span", count(samples.length[item]) + " tokens"));
      if (store.finishes[samples.finish[item]] !== "stop") head.append(make("span", visible(store.finishes[samples.finish[item]]), "bad"));
    }
    head.append(make("span", "step " + groups.step[group] + " \u00b7 " + visible(store.kinds[groups.kind[group]]), "dim right"));
    const line = make("div", null, "line-text");
    row.append(head, line);
    const texts = store.textsReady(first);
    if (texts) this.drawSnippet(line, texts);
    else store.texts(first).then((found) => { if (row.isConnected) this.drawSnippet(line, found); });
  }

  drawSnippet(line, texts) {
    const { pattern } = this.want, text = this.isUnitGroup ? texts.prompt : texts.text;
    const [hit] = hits(text, pattern);
    const start = hit ? Math.max(0, hit[0] - 40) : 0, piece = text.slice(start, start + 240).replace(/\s+/g, " ");
    if (start) line.append("\u2026");
    const again = hits(piece, pattern)[0];
    if (!again) { line.append(visible(piece)); return; }
    line.append(visible(piece.slice(0, again[0])), make("mark", visible(piece.slice(...again))), visible(piece.slice(again[1])));
  }

  choose(item) {
    if (!this.isUnitGroup) this.sample = item;
    else this.sample = this.store.members(item).find((s) => this.matching.has(s));
    this.showDetail();
  }

  async showDetail() {
    const { store, sample } = this, colour = byId("colour").value;
    if (sample === null) return;
    const group = store.groupOf[sample], members = store.members(group);
    const chosen = this.asGroup ? members : [sample];
    const [texts, tokens] = await Promise.all([Promise.all(chosen.map((s) => store.texts(s))), Promise.all(chosen.map((s) => store.tokens(s)))]);
    if (this.store !== store || this.sample !== sample || byId("colour").value !== colour) return;
    const readout = make("output", "Point at a token, or move to the text and use the arrow keys.", "readout");
    const box = make("div", null, this.asGroup ? "cards" : "single");
    chosen.forEach((s, k) => box.append(this.card(s, texts[k], tokens[k], colour, readout)));
    byId("detail").replaceChildren(this.heading(sample, members), ...this.question(texts[0]), this.legend(colour, tokens), box, readout);
    byId("detail").dataset.sample = sample;
  }

  heading(sample, members) {
    const { store } = this, group = store.groupOf[sample], bar = make("header");
    const place = "step " + store.groups.step[group] + ", " + visible(store.kinds[store.groups.kind[group]]) + ", prompt " + visible(store.groups.name[group]);
    bar.append(make("h3", place));
    const toggle = make("div", null, "toggle");
    for (const [asGroup, text] of [[false, "sample " + (sample - members[0] + 1) + " of " + members.length], [true, "all " + members.length + " side by side"]]) {
      const button = make("button", text);
      button.type = "button";
      button.setAttribute("aria-pressed", this.asGroup === asGroup);
      button.addEventListener("click", () => { this.asGroup = asGroup; this.showDetail(); });
      toggle.append(button);
    }
    bar.append(toggle);
    return bar;
  }

  question(texts) {
    const prompt = make("details", null, "prompt");
    prompt.open = true;
    prompt.append(make("summary", "prompt"), ...pictured(texts.prompt, this.want.pattern, texts.pictures));
    if (texts.answer === null || texts.answer === "") return [prompt];
    const expected = make("p", "expected ", "expected");
    const bdi = make("code", visible(texts.answer));
    bdi.dir = "auto";
    expected.append(bdi);
    return [prompt, expected];
  }

  legend(colour, tokens) {
    const box = make("p", null, "scale");
    const { ends, signs, label } = COLOURINGS[colour];
    if (colour === "none") return box;
    const column = { logp: "logp", gap: "gap", entropy: "entropy", mask: "mask" }[colour];
    if (column && tokens.every((one) => !one[column].length)) {
      box.append(make("span", "No " + label + " was recorded for these tokens.", "dim"));
      return box;
    }
    box.append(label + ": ", make("span", ends[0]), make("i", null, signs ? "bar both" : "bar one"), make("span", ends[1]));
    return box;
  }

  card(sample, texts, tokens, colour, readout) {
    const { samples, finishes } = this.store, node = make("article", null, "card");
    const head = make("div", null, "head");
    head.append(chip("reward " + show(samples.reward[sample]), "reward " + rewardClass(this.store, samples.reward[sample])));
    if (samples.advantage[sample] !== null) head.append(chip("advantage " + signed(samples.advantage[sample])));
    if (samples.accuracy[sample] !== null) head.append(chip(samples.accuracy[sample] >= 1 ? "right" : "wrong", samples.accuracy[sample] >= 1 ? "" : "bad"));
    if (texts.role !== null) head.append(chip("role " + visible(texts.role)));
    head.append(chip(count(samples.length[sample]) + " tokens"), chip("ended by " + visible(finishes[samples.finish[sample]])));
    for (const [name, value] of Object.entries(texts.parts)) head.append(chip(visible(name) + " " + (isNumber(value) ? show(value) : visible(JSON.stringify(value))), "dim"));
    const { pattern } = this.want, coloured = colouredText(texts.text, tokens, colour, samples.advantage[sample], pattern, readout);
    node.append(head);
    if (texts.turns) node.append(conversation(texts.turns, pattern, texts.pictures, (reward) => rewardClass(this.store, reward)));
    if (texts.lastWords !== null) node.append(make("div", "the environment at the end", "dim"), marked(texts.lastWords, pattern, "text heard"));
    if (texts.events.length) node.append(eventList(texts.events, pattern));
    if (texts.turns) node.append(make("div", "all tokens that the model wrote", "dim"));
    node.append(coloured);
    if (!texts.turns && texts.whole !== null) node.append(make("div", "as the reward saw it", "dim"), marked(texts.whole, pattern));
    const failed = finishes[samples.finish[sample]] === "error" ? "the environment failed" : "the scorer failed";
    if (texts.error) node.append(make("div", failed, "bad"), marked(texts.error, pattern));
    if (this.asGroup && sample === this.sample) node.classList.add("chosen");
    return node;
  }
}
