// One validation prompt over the whole run: a row per step, greedy first.

const keyOf = (group) => JSON.stringify([group.kind, group.question, group.gold]);

// Every prompt that is followed, by its key: [{key, question}].
function followedPrompts(run) {
  const prompts = new Map();
  for (const { step } of run.steps) {
    for (const group of (stepOf(0, step) || { groups: [] }).groups) {
      if (group.kind === "validation" && !prompts.has(keyOf(group))) prompts.set(keyOf(group), group);
    }
  }
  return [...prompts.values()];
}

function followedPrompt() {
  const prompts = followedPrompts(page.runs[0]);
  return prompts.find((group) => String(group.prompt_id) === state.prompt) || prompts[0] || null;
}

function drawFollow() {
  const prompts = followedPrompts(page.runs[0]);
  const chosen = followedPrompt();
  if (!chosen) return [h("p", { class: "empty large" }, "No validation prompts were recorded, so there is none to follow.")];
  const tabs = prompts.map((group) => h("button", { type: "button", class: "chip", "aria-pressed": String(group === chosen), onclick: () => change({ prompt: String(group.prompt_id) }) }, oneLine(group.question, 50)));
  const rows = page.runs[0].steps.map(({ step }) => drawFollowed(step, stepOf(0, step), keyOf(chosen))).filter(Boolean);
  return [h("div", { class: "chips prompts" }, tabs), drawHead(chosen, `${plural(rows.length, "recorded step")}`), h("div", { class: "follow" }, rows)];
}

function drawFollowed(number_, step, key) {
  const group = step && step.groups.find((candidate) => keyOf(candidate) === key);
  if (!group) return null;
  const completions = [...group.completions].sort((a, b) => Number(b.greedy) - Number(a.greedy));
  return h("div", { class: number_ === state.step ? "row chosen" : "row" },
    h("div", { class: "when" }, h("button", { type: "button", class: "link", onclick: () => change({ step: number_, group: group.index, view: "tokens" }) }, `step ${number_}`), h("span", {}, countRight(group)), isNumber(group.mean) && h("span", { title: REWARD_ABOUT }, rewardOf(group))),
    h("div", { class: "completions" }, completions.map((completion) => drawCompletion(completion, completion.greedy ? "greedy" : `sampled`))));
}
