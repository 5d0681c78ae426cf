// The same prompt in two runs, side by side.

// The record of a prompt in the other run: of the step nearest to this one.
function counterpart(group) {
  if (group.counterpart === undefined) group.counterpart = findCounterpart(group);
  return group.counterpart;
}

function findCounterpart(group) {
  const steps = [...page.runs[1].steps].sort((a, b) => Math.abs(a.step - group.step.step) - Math.abs(b.step - group.step.step));
  for (const { step } of steps) {
    const match = (stepOf(1, step) || { groups: [] }).groups.find((candidate) => keyOf(candidate) === keyOf(group));
    if (match) return match;
  }
  return null;
}

function drawSide(run, group, empty) {
  const title = h("h2", {}, run.name, group && h("span", { class: "fact" }, ` step ${group.step.step}`));
  if (!group) return h("div", { class: "side" }, title, h("p", { class: "empty" }, empty));
  const facts = [];
  if (isNumber(group.mean)) facts.push(h("span", { title: REWARD_ABOUT }, rewardOf(group)));
  if (group.kind === "validation") facts.push(h("span", {}, countRight(group)));
  if (group.kind === "train") facts.push(h("span", {}, `moved ${number(movement(group))} nats per token`));
  return h("div", { class: "side" }, title, h("p", { class: "fact facts" }, facts),
    h("div", { class: "completions" }, group.completions.map((completion) => drawCompletion(completion))));
}

function drawCompare() {
  if (!page.runs[1]) return [h("p", { class: "empty large" }, "One run is open. To compare it: grpo inspect RUN --compare RUN2")];
  const group = currentGroup();
  if (!group) return [h("p", { class: "empty large" }, "No group to compare at this step.")];
  const [run, other] = page.runs;
  return [drawHead(group, "in two runs"), h("div", { class: "compare" }, drawSide(run, group), drawSide(other, counterpart(group), "This prompt has no record there. Validation prompts that both runs follow have one at every recorded step."))];
}
