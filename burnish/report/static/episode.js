// An episode with an environment as a conversation: turns of the model, observations, branches, and what went wrong.

const LONG_STATE = 60;

// Where a branch begins: behind an earlier turn, behind the prompt, or nowhere.
function branchText(branch, after) {
  if (after === null) return "branch " + branch + ": a new conversation";
  return "branch " + branch + " continues after " + (after ? "turn " + after : "the prompt");
}

function conversation(said, pattern, rewardName) {
  const box = make("div", null, "episode"), hasRewards = said.some(([, , , reward]) => reward);
  let turns = 0;
  for (const [who, text, state, reward, branch, after] of said) {
    if (branch) box.append(make("div", branchText(branch, after), "branch"));
    const isModel = who === "model", entry = make("section", null, "entry " + (isModel ? "spoken" : "heard"));
    const head = make("div", null, "said");
    head.append(make("b", isModel ? "turn " + ++turns : visible(who)));
    if (state !== null && state.length <= LONG_STATE && !state.includes("\n")) head.append(make("span", "state " + visible(state), "dim"));
    if (isModel && hasRewards && isNumber(reward)) head.append(chip("reward " + show(reward), "reward " + rewardName(reward)));
    entry.append(head);
    if (state !== null && (state.length > LONG_STATE || state.includes("\n"))) entry.append(folded("state", marked(state, pattern)));
    entry.append(marked(text, pattern));
    box.append(entry);
  }
  return box;
}

function folded(title, inner) {
  const box = make("details");
  box.append(make("summary", title, "dim"), inner);
  return box;
}

// What went wrong in an episode, with the traceback folded below its message.
function eventList(events, pattern) {
  const box = make("div", null, "events");
  for (const [kind, what, message, traceback] of events) {
    const head = make("div", null, "said");
    head.append(make("b", visible(kind), "bad"), make("span", visible(what), "dim"));
    box.append(head, marked(message, pattern));
    if (traceback) box.append(folded("traceback", marked(traceback, pattern)));
  }
  return box;
}
