// Keys for everything.

const KEYS = [
  ["↑ ↓", "group before, after"], ["← →", "step before, after"], ["Home End", "first, last step"],
  ["1 … 9, 0", "colour; 0 is plain"], ["j k", "token after, before"], ["J K", "completion after, before"],
  ["n N", "next token by size of the coloured number, back"], ["Enter", "pin the token, or let it go"],
  ["b", "select the lowest tenth, the highest, none"], ["x", "objective closer or whole"], ["e", "show long completions whole, or fold"],
  ["r w t u", "filter right, wrong, truncated, clipped"], ["!", "filter failed rewards"], ["/", "search"], [">", "smallest |Δ log p|"],
  ["s", "next order of the groups"], ["f", "follow a prompt over the run"], ["[ ]", "followed prompt before, after"], ["c", "compare two runs"], ["d", "dark, light"],
  ["Esc", "leave what is open, pinned, selected, filtered"], ["?", "this list"],
];

// The element of the list `items` that is `by` after `current`, within its ends.
const neighbour = (items, current, by) => items[clamp(items.indexOf(current) + by, 0, items.length - 1)];

function moveGroup(by) {
  const listed = listedGroups(currentStep());
  const group = neighbour(listed, currentGroup(), by);
  if (group) change({ group: group.index, token: "" });
}

function moveStep(by) {
  const { steps } = page.runs[0];
  const step = neighbour(steps, stepInfo(), by);
  if (step) change({ step: step.step, token: "" });
}

function movePrompt(by) {
  const group = neighbour(followedPrompts(page.runs[0]), followedPrompt(), by);
  if (group) change({ prompt: String(group.prompt_id), view: "follow" });
}

// Goes to a token: it is focused, and the card shows it.
function goTo(element) {
  if (!element) return;
  if (state.token) pin(null);
  element.focus({ preventScroll: true });
  element.scrollIntoView({ block: "nearest", inline: "nearest" });
  hovered = element;
  drawCard();
}

function moveToken(by) {
  goTo(hovered && hovered.isConnected ? neighbour(drawnTokens, hovered, by) : drawnTokens[0]);
}

function moveCompletion(by) {
  const firsts = drawnTokens.filter((element, i) => !i || element.completion !== drawnTokens[i - 1].completion);
  const current = hovered && firsts.find((element) => element.completion === hovered.completion);
  goTo(current ? neighbour(firsts, current, by) : firsts[0]);
}

// Tokens by the size of the coloured number, largest first; it goes on from the last one that it went to.
let extreme = null;

function moveExtreme(by) {
  const { value } = colour();
  const size = (element) => Math.abs(value(element.completion.tokens, element.t));
  const ranked = drawnTokens.filter((element) => isNumber(size(element))).sort((a, b) => size(b) - size(a));
  extreme = extreme === hovered && ranked.includes(extreme) ? neighbour(ranked, extreme, by) : ranked[0] || null;
  goTo(extreme);
}

function toggleFilter(id) {
  const chosen = shownFilters();
  change({ show: (chosen.includes(id) ? chosen.filter((filter) => filter !== id) : [...chosen, id]).join(",") });
}

function toggleFolds() {
  const completions = completionsInView();
  const open = completions.some((completion) => unfolded.has(completion));
  completions.forEach((completion) => (open ? unfolded.delete(completion) : unfolded.add(completion)));
  drawContent();
}

function nextSort() {
  const names = Object.keys(SORTS);
  change({ sort: names[(names.indexOf(state.sort) + 1) % names.length] });
}

function leave() {
  if (state.token) pin(null);
  else if (state.brush) brush(null);
  else if (isFiltered()) change({ show: "", search: "", above: "" });
  else change({ view: "tokens" });
}

const toggleView = (view) => openView(state.view === view ? "tokens" : view);

// Opens a view. What is compared is first of all a prompt that both runs have.
function openView(view) {
  change({ view, token: "" });
  leaveLonely();
}

function leaveLonely() {
  const group = currentGroup();
  if (group && isLonely(group)) change({ group: listedGroups(currentStep())[0].index });
}

const ACTIONS = {
  ArrowUp: () => moveGroup(-1), ArrowDown: () => moveGroup(1), ArrowLeft: () => moveStep(-1), ArrowRight: () => moveStep(1),
  Home: () => moveStep(-Infinity), End: () => moveStep(Infinity),
  j: () => moveToken(1), k: () => moveToken(-1), J: () => moveCompletion(1), K: () => moveCompletion(-1),
  n: () => moveExtreme(1), N: () => moveExtreme(-1), Enter: () => pin(pinned ? null : hovered),
  b: nextBrush, x: () => change({ near: state.near ? "" : "1" }), e: toggleFolds,
  r: () => toggleFilter("right"), w: () => toggleFilter("wrong"), t: () => toggleFilter("truncated"), u: () => toggleFilter("clipped"), "!": () => toggleFilter("failed"),
  "/": () => byId("search").focus(), ">": () => byId("above").focus(), s: nextSort,
  f: () => toggleView("follow"), c: () => toggleView("compare"), "[": () => movePrompt(-1), "]": () => movePrompt(1),
  d: toggleTheme, Escape: leave, "?": showHelp,
};
QUANTITIES.forEach(({ key, id }) => { ACTIONS[key] = () => chooseColour(id); });

function showHelp() {
  const rows = KEYS.map(([keys, what]) => [h("dt", {}, keys.split(" ").map((key) => (key === "…" ? " … " : h("kbd", {}, key)))), h("dd", {}, what)]);
  byId("help").replaceChildren(
    h("h2", {}, "Keys"), h("dl", {}, rows.flat()),
    h("p", { class: "about" }, "The address keeps what you look at: copy it to share what you see. This page loads nothing and sends nothing."),
    h("form", { method: "dialog" }, h("button", {}, "close")));
  byId("help").showModal();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape" || (event.key === "Enter" && event.target.tagName === "INPUT")) event.target.blur();
    return;
  }
  if (event.key === "Enter" && event.target.closest("button, summary, a")) return;
  const action = ACTIONS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}
