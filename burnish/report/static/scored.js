// The rollouts that were scored last, while the run samples: a line a prompt, with the rewards of its samples, and their texts when opened.

let openGroups = new Set(); // prompts whose samples are shown; they stay open when newer rollouts come

function drawScored(box, rollouts, known) {
  const groups = new Map();
  for (const one of rollouts) {
    if (!groups.has(one.group)) groups.set(one.group, []);
    groups.get(one.group).push(one);
  }
  const range = [...known];
  for (const { reward } of rollouts) if (isNumber(reward)) range.splice(0, 2, Math.min(range[0], reward), Math.max(range[1], reward));
  openGroups = new Set([...openGroups].filter((name) => groups.has(name)));
  const steps = [...new Set(rollouts.map((one) => one.step))].sort((a, b) => a - b);
  const title = make("div", null, "scored-title");
  title.append(make("b", "Scored just now"), make("span", count(rollouts.length) + " rollouts of step " + steps.join(", ") + ", newest first", "dim"));
  box.replaceChildren(title, ...[...groups].map(([name, members]) => scoredGroup(name, members.sort((a, b) => a.sample - b.sample), { range })));
}

function scoredGroup(name, members, scale) {
  const row = make("details"), head = make("summary"), dots = make("span", null, "dots");
  for (const one of members) dots.append(make("i", null, "dot-reward " + rewardClass(scale, one.reward)));
  const rewards = members.map((one) => one.reward).filter(isNumber), mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const prompt = make("span", visible(members[0].prompt.replace(/\s+/g, " ").slice(-160)), "line-text");
  head.append(dots, make("b", show(mean)), prompt);
  row.append(head);
  const fill = () => {
    if (row.childElementCount > 1) return;
    const cards = make("div", null, "cards");
    cards.append(...members.map((one) => scoredCard(one, scale)));
    row.append(marked(members[0].prompt, null), cards);
  };
  row.open = openGroups.has(name);
  if (row.open) fill();
  row.addEventListener("toggle", () => {
    if (row.open) openGroups.add(name);
    else openGroups.delete(name);
    if (row.open) fill();
  });
  return row;
}

function scoredCard(one, scale) {
  const card = make("article", null, "card"), head = make("div", null, "head");
  head.append(chip("reward " + show(one.reward), "reward " + rewardClass(scale, one.reward)), chip(count(one.length) + " tokens"), chip("ended by " + visible(one.finish)));
  card.append(head);
  if (one.turns) {
    const said = one.turns.map((turn) => [turn.who, turn.text, turn.state ?? null, turn.reward ?? null, turn.branch, turn.after ?? null]);
    card.append(conversation(said, null, {}, (reward) => rewardClass(scale, reward)));
  } else card.append(marked(one.completion, null));
  if (one.error) card.append(make("div", "it has no score", "bad"), marked(one.error, null));
  return card;
}
