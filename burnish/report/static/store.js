// The samples: an index that is read at once, and blocks that are inflated when they are looked at. burnish/report/embedded_samples.py
// says how they are written.

const CACHED = 96; // inflated blocks kept; about 300,000 characters each

async function inflate(id) {
  const letters = atob(byId(id).textContent);
  const bytes = new Uint8Array(letters.length);
  for (let k = 0; k < letters.length; k++) bytes[k] = letters.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Store {
  constructor(index) {
    Object.assign(this, index);
    this.numGroups = this.groups.first.length;
    this.numSamples = this.samples.number.length;
    this.groupOf = new Uint32Array(this.numSamples);
    this.firstOfBlock = []; // group and sample that a block begins with
    for (let g = 0; g < this.numGroups; g++) {
      this.groupOf.fill(g, this.groups.first[g], this.end(g));
      if (this.firstOfBlock.length <= this.groups.block[g]) this.firstOfBlock.push([g, this.groups.first[g]]);
    }
    this.cache = new Map();
  }

  static async open() {
    return new Store(JSON.parse(new TextDecoder().decode(await inflate("samples-index"))));
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
    if (this.cache.has(key)) return Promise.resolve(this.ready(key) || this.cache.get(key));
    const loading = inflate("block-" + key).then((bytes) => {
      const block = key[0] === "x" ? JSON.parse(new TextDecoder().decode(bytes)) : tokenBlock(bytes, this, Number(key.slice(1)));
      this.cache.delete(key);
      this.cache.set(key, block);
      for (const old of this.cache.keys()) {
        if (this.cache.size <= CACHED) break;
        if (!(this.cache.get(old) instanceof Promise)) this.cache.delete(old);
      }
      return block;
    });
    this.cache.set(key, loading);
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
    return { prompt: texts.prompt[g], answer: texts.answer[g], text: texts.text[k], whole: texts.whole[k], parts: texts.parts[k], turns: texts.turns[k], role: texts.role[k], lastWords: texts.lastWords[k], events: texts.events[k], error: texts.error[k] };
  }

  async tokens(sample) {
    const block = this.blockOf(sample);
    return (await this.load("t" + block))[sample - this.firstOfBlock[block][1]];
  }

  // Which samples of a block have the words in their text, prompt, answer, conversation or error.
  async search(block, pattern) {
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
  const sizes = new DataView(bytes.buffer);
  const parts = Array.from({ length: num }, () => []);
  let at = 16 * num;
  for (let column = 0; column < 4; column++) {
    for (let k = 0; k < num; k++) {
      const size = sizes.getUint32(16 * k + 4 * column, true);
      parts[k].push(bytes.subarray(at, at + size));
      at += size;
    }
  }
  return parts.map(([widths, logp, advantages, gap]) => ({ widths, logp, advantages, gap }));
}

const logProb = (code) => (code === 255 ? null : -30 * (code / 254) ** 3);
function signedValue(code) {
  if (code === 0) return null;
  if (code === 128) return 0;
  const size = 1e-5 * 10 ** ((Math.abs(code - 128) - 1) * 7 / 126);
  return code > 128 ? size : -size;
}
