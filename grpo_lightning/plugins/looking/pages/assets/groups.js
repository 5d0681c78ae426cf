// The list of the step's groups: question, rewards and movement of each.

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : NaN);

const MOVED_ABOUT = "mean |Δ log p| of the tokens over the step's updates, in nats per token";
const REWARD_ABOUT = "mean and population standard deviation of the rewards, greedy answers left out";

// `math_verifier 0.5, std 0.5`: ± is half a 95 % interval elsewhere, so a spread is named.
const rewardOf = (group) => [`${rewardName(group)} `, h("b", {}, number(group.mean)), `, std ${number(group.std)}`];

// The meaning of the roles in the records: the first role is why the group was taken, in the others it comes first.
const ROLES = {
  mixed: ["mixed", "the rewards spread most"], worst: ["worst", "lowest mean reward"], best: ["best", "highest mean reward"],
  moved: ["moved", "it moved most of the groups that were measured"],
  followed: ["followed", "a validation prompt, recorded at every recorded step"],
};
const PUSHED = ["pushed", "taken among the groups that were pushed hardest, since it moved more than others of these; in the records: moved"];

const SORTS = {
  recorded: { name: "as recorded", value: (group) => -group.index },
  spread: { name: "reward spread", value: (group) => group.std, text: (value) => `σ ${number(value)}` },
  movement: { name: "movement", value: movement, text: (value) => `moved ${number(value)}`, about: MOVED_ABOUT },
  kl: { name: "KL", value: (group) => mean(valuesOf(quantityOf("kl"), group.completions)), text: (value) => `KL ${number(value)}` },
  length: { name: "length", value: (group) => mean(group.completions.map(({ tokens }) => tokens.sampled.length)), text: (value) => `${number(value)} tokens` },
};

// Mean |Δ log p| of the sampled tokens.
function movement(group) {
  if (group.movement === undefined) group.movement = mean(valuesOf(quantityOf("delta"), group.completions).map(Math.abs));
  return group.movement;
}

// True if runs are compared and the other run has no record of this prompt: such groups come last.
const isLonely = (group) => state.view === "compare" && Boolean(page.runs[1]) && !counterpart(group);

// The groups of a step in the chosen order, without groups that the filters leave no completion of.
function listedGroups(step) {
  if (!step) return [];
  const { value } = SORTS[state.sort] || SORTS.recorded;
  const sortable = (group) => (isNumber(value(group)) ? value(group) : -Infinity);
  const lonely = (group) => Number(isLonely(group));
  return step.groups.filter((group) => !isFiltered() || group.completions.some(matches))
    .sort((a, b) => lonely(a) - lonely(b) || sortable(b) - sortable(a) || a.index - b.index);
}

const verdictOf = ({ right }) => (right === true ? ["right", "✓", "right"] : right === false ? ["wrong", "✗", "wrong"] : ["failed", "?", "not graded"]);

function verdictStrip(group) {
  const signs = withoutBranches(group.completions).map((completion) => {
    const [kind, sign, word] = verdictOf(completion);
    return h("i", { class: `${kind}${isFiltered() && !matches(completion) ? " other" : ""}`, title: word }, sign);
  });
  return h("span", { class: "strip" }, signs);
}

function rolesOf(group) {
  const named = group.roles.map((role, i) => (role === "moved" && !i ? PUSHED : Object.hasOwn(ROLES, role) ? ROLES[role] : [role, ""]));
  const text = group.kind === "validation" ? "validation" : named.map(([name]) => name).join(", ");
  return h("span", { class: "roles", title: named.map(([name, about]) => (about ? `${name}: ${about}` : name)).join("; ") }, text);
}

const rewardName = (group) => (group.kind === "validation" && group.completions.some(({ greedy }) => !greedy) ? "sampled reward" : "reward");

// How many of a group are right; the greedy answer, which its mean reward leaves out, is told apart.
function countRight(group) {
  const count = (completions) => `${completions.filter(({ right }) => right).length} of ${completions.length}`;
  const [greedy, sampled] = [true, false].map((kind) => withoutBranches(group.completions).filter((completion) => completion.greedy === kind));
  const greedyText = greedy.length === 1 ? `greedy ${verdictOf(greedy[0])[1]}` : `greedy ${count(greedy)} right`;
  if (!greedy.length) return `${count(sampled)} right`;
  return sampled.length ? `${greedyText}, ${count(sampled)} sampled right` : greedyText;
}

function drawGroup(group, chosen) {
  const sort = SORTS[state.sort] || SORTS.recorded;
  const shownSort = sort.text && isNumber(sort.value(group)) ? sort : SORTS.movement;
  const fact = group.kind === "validation" && shownSort === SORTS.movement ? countRight(group) : shownSort.text(shownSort.value(group));
  return h("li", { role: "option", "aria-selected": String(chosen), class: isLonely(group) ? "lonely" : null, "data-group": group.index, onclick: () => change({ group: group.index, token: "", view: state.view === "compare" ? "compare" : "tokens" }) },
    h("div", { class: "facts" }, h("span", { class: "question" }, oneLine(group.question)), rolesOf(group)),
    h("div", { class: "facts" }, verdictStrip(group), h("span", { class: "fact", title: group.kind === "validation" ? null : shownSort.about }, fact)));
}

function drawSort() {
  const options = Object.entries(SORTS).map(([id, { name }]) => h("option", { value: id, selected: id === state.sort }, name));
  return h("label", { class: "sort" }, "sort by ", h("select", { id: "sort", onchange: (event) => change({ sort: event.target.value }) }, options));
}

function drawGroups() {
  const step = currentStep();
  const listed = listedGroups(step);
  const all = step ? step.groups.length : 0;
  const title = listed.length < all ? `${listed.length} of ${plural(all, "group")}` : plural(all, "group");
  const empty = h("p", { class: "empty" }, all ? "No completion of this step fits the filters." : "No groups were recorded at this step.");
  byId("groups").replaceChildren(
    h("div", { class: "heading" }, h("h2", {}, title), drawSort()), drawFilters(),
    listed.length ? h("ul", { role: "listbox", "aria-label": "Groups" }, listed.map((group) => drawGroup(group, group.index === state.group))) : empty);
}
