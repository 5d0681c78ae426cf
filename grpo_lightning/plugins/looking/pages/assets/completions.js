// Completions side by side, every token an element that can be pointed at.

const FOLD_AT = 900;
const unfolded = new Set();
let drawnTokens = [];

// How many tokens of a folded completion are drawn.
function foldedLength(tokens) {
  let characters = 0;
  for (let t = 0; t < tokens.length; t++) {
    characters += tokens.pieces[t].length + 1;
    if (characters > FOLD_AT) return Math.max(t, 1);
  }
  return tokens.length;
}

// By token: [{name, value}] of the segments that end with it.
function segmentEnds(completion) {
  const ends = new Map();
  for (const [name, segments] of Object.entries(completion.segments || {})) {
    segments.forEach(([end, value], index) => ends.set(end, [...(ends.get(end) || []), { name, value, index }]));
  }
  return ends;
}

function tokenElement(completion, t, hits) {
  const { tokens } = completion;
  const element = h("span", { class: "token", tabindex: -1, "data-token": t }, shown(tokens.pieces[t]));
  if (tokens.context && tokens.context[t]) element.classList.add("context");
  if (hits.has(t)) element.classList.add("hit");
  Object.assign(element, { completion, t });
  drawnTokens.push(element);
  return element;
}

const segmentMark = ({ name, value, index }) => h("span", { class: "segment", title: `end of segment ${index + 1} of ${name}: ${number(value)}`, "aria-hidden": "true" }, number(value));

function drawText(completion) {
  const { tokens } = completion;
  const open = unfolded.has(completion);
  const length = open ? tokens.length : foldedLength(tokens);
  const hits = searchHits(tokens);
  const ends = segmentEnds(completion);
  const body = h("div", { class: open ? "text" : "text folded", dir: "ltr" });
  const tokensOf = (first, last) => Array.from({ length: last - first + 1 }, (_, i) => [tokenElement(completion, first + i, hits), (ends.get(first + i) || []).map(segmentMark)]);
  fill(body, {}, [drawTurns(completion, length, tokensOf)]);
  if (!tokens.length) body.append(h("span", { class: "empty" }, "no tokens"));
  const toggle = () => { if (open) unfolded.delete(completion); else unfolded.add(completion); drawContent(); };
  const isLong = length < tokens.length || open || foldedLength(tokens) < tokens.length;
  return [body, isLong && h("button", { type: "button", class: "fold", onclick: toggle }, open ? "fold" : `show all ${plural(tokens.length, "token")}`)];
}

function drawScores(completion) {
  return Object.entries(completion.scores).map(([name, score]) => {
    const status = completion.statuses[name];
    return h("span", { class: score === null ? "score failed" : "score" }, h("span", { class: "name" }, name), " ", h("b", {}, score === null ? "failed" : number(score)), status && status !== "ok" && h("em", {}, ` ${status}`));
  });
}

// Why rewards have their values: the reply of a judge, the tests that failed.
function drawNotes(completion) {
  return Object.entries(completion.notes || {}).map(([name, text]) => h("details", { class: "note" }, h("summary", {}, name), h("pre", {}, text)));
}

function drawCompletion(completion, label) {
  const [kind, sign, word] = verdictOf(completion);
  const { tokens } = completion;
  const faded = isFiltered() && !matches(completion);
  const reason = completion.finish_reason === "length" ? "✂ truncated" : completion.finish_reason;
  const [text, fold] = drawText(completion);
  return h("article", { class: `completion ${kind}${faded ? " other" : ""}`, "data-completion": completion.number },
    h("header", {},
      h("span", { class: "index" }, label || labelOf(completion)), branchOf(completion),
      h("span", { class: `verdict ${kind}`, title: completion.grader ? `by ${completion.grader}` : null }, `${sign} ${word}`),
      h("span", { class: "reward", title: "weighted sum of the rewards" }, completion.reward === null ? "failed" : number(completion.reward))),
    text, fold,
    h("footer", {}, drawScores(completion), drawOutcome(completion), h("span", { class: completion.finish_reason === "length" ? "finish cut" : "finish" }, reason), h("span", {}, plural(tokens.sampled.length, "token")), completion.answer !== null && h("span", { class: "answer" }, "answer ", h("q", {}, oneLine(completion.answer, 40)))), drawNotes(completion));
}

// The head of a group: question, gold answer, mean reward, and the prompt as the model saw it. A note stands instead of
// the numbers of one step.
function drawHead(group, note) {
  const facts = [];
  const ofStep = note === undefined;
  if (ofStep && isNumber(group.mean)) facts.push(h("span", { title: REWARD_ABOUT }, rewardOf(group)));
  if (ofStep && group.completions.length) facts.push(h("span", {}, countRight(group), group.completions[0].grader ? ` by ${group.completions[0].grader}` : ""));
  if (ofStep && group.kind === "train") facts.push(h("span", { title: MOVED_ABOUT }, "moved ", h("b", {}, number(movement(group))), " nats per token"));
  if (group.source) facts.push(h("span", { title: "where the question comes from: data set and row" }, oneLine(group.source, 60)));
  if (note) facts.push(h("span", {}, note));
  return h("div", { class: "head" },
    h("h1", { dir: "ltr" }, oneLine(group.question, 400)),
    h("p", { class: "facts" }, h("span", {}, "gold ", h("b", {}, oneLine(group.gold, 80))), facts),
    (group.images || []).filter((address) => address.startsWith("data:image/")).map((address) => h("img", { class: "shown", src: address, alt: "image of the prompt" })),
    h("details", {}, h("summary", {}, `prompt, ${plural(group.num_prompt_tokens, "token")}`), h("pre", { dir: "ltr" }, shown(group.prompt))));
}

function drawTokensView() {
  const group = currentGroup();
  if (!group) return [h("p", { class: "empty large" }, currentStep() ? "No group to show: change the filters, or go to another step." : "No step to show.")];
  if (!group.completions.length) return [drawHead(group), h("p", { class: "empty large" }, "This group has no completions.")];
  return [drawHead(group), h("div", { class: group.completions.some(({ conversation }) => conversation) ? "completions talks" : "completions" }, group.completions.map((completion) => drawCompletion(completion)))];
}

// Colours the tokens that are drawn, and fades those outside of the brush.
function paint() {
  const quantity = colour();
  const scale = currentScale();
  const brush = brushRange();
  for (const element of drawnTokens) {
    const { tokens } = element.completion;
    const value = quantity.value(tokens, element.t);
    element.style.backgroundColor = scale.colour(value);
    element.classList.toggle("faded", Boolean(brush) && !(value >= brush[0] && value <= brush[1]));
    const side = quantity.id === "clip" ? value : 0;
    element.classList.toggle("at-upper", side === 1);
    element.classList.toggle("at-lower", side === -1);
  }
}

function drawColours() {
  const step = currentStep();
  const kind = showsAnswers() ? "validation" : "train";
  const groups = [...(step ? step.groups : []), state.view === "follow" ? followedPrompt() : null].filter((group) => group && group.kind === kind);
  const buttons = QUANTITIES.map((quantity) => {
    const missing = quantity.kind !== "none" && step && !groups.some((group) => valuesOf(quantity, group.completions.slice(0, 1)).length);
    return h("button", { type: "button", "data-colour": quantity.id, "aria-pressed": String(quantity.id === colour().id), disabled: missing, title: missing ? (kind === "validation" ? "validation answers have no such number" : "not recorded at this step") : aboutOf(quantity), onclick: () => chooseColour(quantity.id) },
      h("kbd", {}, quantity.key), quantity.name);
  });
  byId("colours").replaceChildren(h("div", { class: "segmented", role: "toolbar", "aria-label": "Colour tokens by" }, buttons));
}
