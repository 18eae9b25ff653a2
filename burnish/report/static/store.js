// The samples of one run: an index that grows, and blocks of texts and tokens that are loaded when they are looked at.
// burnish/report/sample_blocks.py says how they are written.

const CACHED = 96; // blocks kept
const COLUMNS = ["widths", "logp", "advantages", "gap", "entropy", "mask"];

class Store {
  constructor(source, run) {
    Object.assign(this, { source, path: "runs/" + run, generation: 0, leftOut: "" });
    this.begin();
  }

  begin() {
    Object.assign(this, { kinds: [], sources: [], finishes: [], groups: null, samples: null, groupOf: [], firstOfBlock: [], waiting: 0 });
    this.range = [Infinity, -Infinity]; // of rewards
    this.hasAccuracy = false;
    this.cache = new Map();
    this.searched = { words: null, found: new Set(), blocks: new Set() };
  }

  get numGroups() { return this.groups ? this.groups.first.length : 0; }
  get numSamples() { return this.groupOf.length; }

  // Load the next part of the index; whether anything changed. `isComplete` says whether more is to come.
  async update() {
    const since = this.numGroups, { generation } = this;
    const answer = await this.source.json(this.path + "/samples", { since, generation });
    if (this.numGroups !== since || this.generation !== generation) return false; // another answer came first
    const isAnew = answer.generation !== generation || answer.since < since;
    if (isAnew) this.begin();
    this.generation = answer.generation;
    const { kinds, sources, finishes } = answer;
    Object.assign(this, { kinds, sources, finishes, leftOut: answer.left_out, waiting: answer.waiting });
    this.append(answer.groups, answer.samples);
    this.isComplete = !answer.waiting && this.numGroups >= answer.num_groups;
    return isAnew || answer.groups.first.length > 0;
  }

  append(groups, samples) {
    const before = this.numGroups;
    if (!this.groups) Object.assign(this, { groups, samples });
    else {
      for (const [name, column] of Object.entries(groups)) for (const value of column) this.groups[name].push(value);
      for (const [name, column] of Object.entries(samples)) for (const value of column) this.samples[name].push(value);
    }
    for (let g = before; g < this.numGroups; g++) {
      for (let s = this.groups.first[g]; s < this.end(g); s++) this.groupOf.push(g);
      if (this.firstOfBlock.length <= this.groups.block[g]) this.firstOfBlock.push([g, this.groups.first[g]]);
    }
    for (const reward of samples.reward) if (isNumber(reward)) this.range = [Math.min(this.range[0], reward), Math.max(this.range[1], reward)];
    this.hasAccuracy = this.hasAccuracy || samples.accuracy.some(isNumber);
  }

  end(group) {
    return group + 1 < this.groups.first.length ? this.groups.first[group + 1] : this.samples.number.length;
  }

  members(group) {
    return Array.from({ length: this.end(group) - this.groups.first[group] }, (_, k) => this.groups.first[group] + k);
  }

  blockOf(sample) {
    return this.groups.block[this.groupOf[sample]];
  }

  // The block if it is here; what was used last stays longest.
  ready(key) {
    const found = this.cache.get(key);
    if (found === undefined || found instanceof Promise) return null;
    this.cache.delete(key);
    this.cache.set(key, found);
    return found;
  }

  load(key) {
    const { cache, generation } = this;
    if (cache.has(key)) return Promise.resolve(this.ready(key) || cache.get(key));
    const isText = key[0] === "x", number = Number(key.slice(1));
    const loading = this.source.bytes(this.path + (isText ? "/texts/" : "/tokens/") + number, { generation }).then((bytes) => {
      if (this.cache !== cache) throw new RefusedError(409, "the samples of this run were numbered anew"); // this block is of the old numbers
      const block = isText ? parsed(bytes) : tokenBlock(bytes, this, number);
      cache.delete(key);
      cache.set(key, block);
      for (const old of cache.keys()) {
        if (cache.size <= CACHED) break;
        if (!(cache.get(old) instanceof Promise)) cache.delete(old);
      }
      return block;
    });
    cache.set(key, loading);
    loading.catch(() => cache.delete(key)); // asked for again when it is looked at next
    return loading;
  }

  textsReady(sample) {
    const block = this.blockOf(sample), texts = this.ready("x" + block);
    return texts && this.pick(texts, block, sample);
  }

  async texts(sample) {
    const block = this.blockOf(sample);
    return this.pick(await this.load("x" + block), block, sample);
  }

  pick(texts, block, sample) {
    const [group, first] = this.firstOfBlock[block], k = sample - first, g = this.groupOf[sample] - group;
    return { prompt: texts.prompt[g], answer: texts.answer[g], text: texts.text[k], whole: texts.whole[k], parts: texts.parts[k], turns: texts.turns[k], role: texts.role[k], lastWords: texts.lastWords[k], events: texts.events[k], error: texts.error[k], pictures: texts.pictures };
  }

  async tokens(sample) {
    const block = this.blockOf(sample);
    return (await this.load("t" + block))[sample - this.firstOfBlock[block][1]];
  }

  // The samples of some blocks that have the words in a text, prompt, answer, conversation or error. What was searched is remembered.
  async search(blocks, words, pattern) {
    if (this.searched.words !== words) this.searched = { words, found: new Set(), blocks: new Set() };
    const { searched } = this, open = blocks.filter((block) => !searched.blocks.has(block));
    if (this.source.isLive && open.length) {
      const last = open[open.length - 1] + 1;
      const answer = await this.source.json(this.path + "/search", { words, first: open[0], last });
      for (const sample of answer.found) searched.found.add(sample);
      for (let block = open[0]; block < last; block++) searched.blocks.add(block);
    } else {
      for (const block of open) {
        for (const sample of await this.searchBlock(block, pattern)) searched.found.add(sample);
        searched.blocks.add(block);
      }
    }
    return searched.found;
  }

  async searchBlock(block, pattern) {
    const texts = await this.load("x" + block), [group, first] = this.firstOfBlock[block], found = [];
    const about = texts.prompt.map((prompt, g) => pattern.test(prompt) || pattern.test(texts.answer[g] || ""));
    for (let k = 0; k < texts.text.length; k++) {
      const hit = about[this.groupOf[first + k] - group] || pattern.test(texts.text[k]);
      const others = [texts.whole[k], texts.error[k], texts.lastWords[k], ...(texts.turns[k] || []).map((one) => one[1]), ...texts.events[k].flat()];
      if (hit || others.some((text) => pattern.test(text || ""))) found.push(first + k);
    }
    return found;
  }
}

// Views of the bytes of each sample's tokens; numbers are made of them when a sample is shown.
function tokenBlock(bytes, store, block) {
  const next = store.firstOfBlock[block + 1];
  const num = (next ? next[1] : store.numSamples) - store.firstOfBlock[block][1];
  const sizes = new DataView(bytes.buffer, bytes.byteOffset);
  const parts = Array.from({ length: num }, () => ({}));
  let at = 4 * COLUMNS.length * num;
  COLUMNS.forEach((name, column) => {
    for (let k = 0; k < num; k++) {
      const size = sizes.getUint32(4 * (COLUMNS.length * k + column), true);
      parts[k][name] = bytes.subarray(at, at + size);
      at += size;
    }
  });
  return parts;
}

const logProb = (code) => (code === 255 ? null : -30 * (code / 254) ** 3);
const entropyValue = (code) => (code === 255 ? null : 30 * (code / 254) ** 3);
const maskValue = (code) => (code === 255 ? null : code === 1);
function signedValue(code) {
  if (code === 0) return null;
  if (code === 128) return 0;
  const size = 1e-5 * 10 ** ((Math.abs(code - 128) - 1) * 7 / 126);
  return code > 128 ? size : -size;
}
