// Which samples are shown, and in what order: cheap questions are asked of the index, words of the texts, block by block.

function wanted() {
  const value = (id) => byId(id).value.trim();
  const bound = (id, none) => (value(id) === "" || Number.isNaN(Number(value(id))) ? none : Number(value(id)));
  const words = byId("search").value;
  return {
    kind: value("kind"),
    finish: value("finish"),
    right: value("right"),
    steps: [bound("step-low", -Infinity), bound("step-high", Infinity)],
    rewards: [bound("reward-low", -Infinity), bound("reward-high", Infinity)],
    order: value("order"),
    unit: value("unit"),
    words: words.trim() ? words : "",
    pattern: words.trim() ? new RegExp(words.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&"), "iu") : null,
  };
}

function byIndex(store, want) {
  const { groups, samples } = store, found = [];
  const unbounded = want.rewards[0] === -Infinity && want.rewards[1] === Infinity;
  for (let g = 0; g < store.numGroups; g++) {
    if (want.kind !== "" && groups.kind[g] !== Number(want.kind)) continue;
    if (groups.step[g] < want.steps[0] || groups.step[g] > want.steps[1]) continue;
    for (let s = groups.first[g]; s < store.end(g); s++) {
      if (want.finish !== "" && samples.finish[s] !== Number(want.finish)) continue;
      const accuracy = samples.accuracy[s], reward = samples.reward[s];
      if (want.right !== "" && (accuracy === null || accuracy >= 1 !== (want.right === "1"))) continue;
      if (!unbounded && (reward === null || reward < want.rewards[0] || reward > want.rewards[1])) continue;
      found.push(s);
    }
  }
  return found;
}

// Those of the samples that have the words. Another search that began meanwhile ends this one (null).
async function byWords(store, samples, want, isCurrent, progress) {
  const blocks = [...new Set(samples.map((sample) => store.blockOf(sample)))].sort((a, b) => a - b), each = store.source.blocksPerSearch;
  let found = new Set(), shown = performance.now();
  for (let k = 0; k < blocks.length; k += each) {
    found = await store.search(blocks.slice(k, k + each), want.words, want.pattern);
    if (!isCurrent()) return null;
    if (performance.now() - shown > 50) {
      progress(Math.min(1, (k + each) / blocks.length));
      await new Promise((resolve) => setTimeout(resolve));
      shown = performance.now();
    }
  }
  return samples.filter((sample) => found.has(sample));
}

// Samples are numbered as they were found, so that age is sorted by the step, too.
function ordered(store, samples, order) {
  const { reward, advantage, length } = store.samples;
  const step = (s) => store.groups.step[store.groupOf[s]];
  const last = (value) => (value === null ? -Infinity : value);
  const key = {
    oldest: (s) => step(s),
    newest: (s) => -step(s),
    best: (s) => -last(reward[s]),
    worst: (s) => (reward[s] === null ? Infinity : reward[s]),
    longest: (s) => -length[s],
    shortest: (s) => length[s],
    up: (s) => -last(advantage[s]),
    down: (s) => (advantage[s] === null ? Infinity : advantage[s]),
  }[order];
  const keys = new Float64Array(store.numSamples);
  for (const sample of samples) keys[sample] = key(sample);
  return samples.sort((a, b) => keys[a] - keys[b] || a - b || 0);
}

function summary(store, samples, want) {
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
  const of = (name) => samples.map((s) => store.samples[name][s]).filter(isNumber);
  const groups = new Set(samples.map((s) => store.groupOf[s])).size;
  const parts = [count(samples.length) + " of " + count(store.numSamples) + " samples", count(groups) + " prompts"];
  const rewards = of("reward"), accuracies = of("accuracy");
  if (rewards.length) parts.push("mean reward " + show(mean(rewards)));
  if (accuracies.length) parts.push("accuracy " + show(100 * mean(accuracies)) + "%");
  if (samples.length) parts.push("mean length " + show(mean(of("length"))));
  return [parts.join(" \u00b7 "), rewards];
}

function histogram(box, rewards) {
  box.replaceChildren();
  if (rewards.length < 2) return;
  let low = Infinity, high = -Infinity;
  for (const reward of rewards) {
    low = Math.min(low, reward);
    high = Math.max(high, reward);
  }
  const bins = new Array(24).fill(0);
  for (const reward of rewards) bins[high > low ? Math.min(23, Math.floor((reward - low) / (high - low) * 24)) : 12]++;
  const most = Math.max(...bins);
  for (const bin of bins) {
    const bar = make("i");
    bar.style.height = (bin ? Math.max(6, 100 * bin / most) : 0) + "%";
    box.append(bar);
  }
  box.dataset.low = show(low);
  box.dataset.high = show(high);
  box.setAttribute("aria-label", "rewards from " + show(low) + " to " + show(high));
}
