// An episode with an environment as a conversation: turns of the model, observations, branches, and what went wrong.

const LONG_STATE = 60;

// Where a branch begins: behind an earlier turn, behind the prompt, or nowhere.
function branchText(branch, after) {
  if (after === null) return "branch " + branch + ": a new conversation";
  return "branch " + branch + " continues after " + (after ? "turn " + after : "the prompt");
}

// Calls of tools and what they returned, as most chat templates mark them, stand out from the words around them.
const MARKS = /\x3c(tool_call|tool_response)>([\s\S]*?)\x3c\/\1>/g;

// Images stand where their placeholders were. Their names are hexadecimal, and the files are PNG that the run wrote.
const PICTURES = /\x3cimage:([0-9a-f]{16})>/g;

function pictured(text, pattern, pictures) {
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(PICTURES)) {
    if (!Object.hasOwn(pictures, match[1])) continue;
    if (text.slice(at, match.index).trim()) parts.push(marked(text.slice(at, match.index), pattern));
    const image = make("img", null, "picture");
    image.src = "data:image/png;base64," + pictures[match[1]];
    image.alt = image.title = "image " + match[1];
    parts.push(image);
    at = match.index + match[0].length;
  }
  if (!parts.length || text.slice(at).trim()) parts.push(marked(text.slice(at), pattern));
  return parts;
}

function spoken(text, pattern, pictures) {
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(MARKS)) {
    if (text.slice(at, match.index).trim()) parts.push(...pictured(text.slice(at, match.index), pattern, pictures));
    const box = make("div", null, "call");
    box.append(make("div", match[1] === "tool_call" ? "tool call" : "tool result", "dim"), ...pictured(match[2].trim(), pattern, pictures));
    parts.push(box);
    at = match.index + match[0].length;
  }
  if (!parts.length || text.slice(at).trim()) parts.push(...pictured(text.slice(at), pattern, pictures));
  return parts;
}

function conversation(said, pattern, pictures, rewardName) {
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
    entry.append(...spoken(text, pattern, pictures));
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
