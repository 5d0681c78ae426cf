// The card of a token: its numbers, its alternatives before and after the updates, its objective.

let hovered = null;
let pinned = null;

const FACTS = {
  "weight": "the token's factor in the objective: its part of the update",
  "correction": "factor for the mismatch of sampler and policy; the weight includes it",
  "sampler gap": "log π_old less the log-prob recorded when the token was sampled",
  "push on log p": "derivative of the objective by the token's log-prob: above 0 the update makes it likelier",
  "probability": "under the policy of its step",
  "version": "optimizer updates in the weights that sampled the token, where rollouts are sampled ahead",
};

const fact = (name, ...value) => [h("dt", { title: FACTS[name] }, name), h("dd", {}, value)];

const sideName = (side) => (side > 0 ? "at the upper bound or target" : side < 0 ? "at the lower bound or target" : "free");

function drawNumbers(tokens, t) {
  const at = (name) => (tokens[name] && !Number.isNaN(tokens[name][t]) ? tokens[name][t] : null);
  const facts = [];
  const add = (name, value, text) => value !== null && facts.push(fact(name, text === undefined ? number(value) : text));
  add("advantage Â", at("advantage"), number(at("advantage"), true));
  add("weight", at("weight"));
  if (at("correction") !== null && at("correction") !== 1) add("correction", at("correction"), `× ${number(at("correction"))}`);
  if (at("update_logp") !== null && at("old_logp") !== null) add("ratio π_θ/π_old", Math.exp(at("update_logp") - at("old_logp")));
  if (tokens.clip && at("update_logp") !== null) add("clip", at("clip"), sideName(at("clip")));
  add("KL to π_ref", at("kl"));
  if (!tokens.before_logp && at("after_logp") !== null) add("probability", at("after_logp"), probability(Math.exp(at("after_logp"))));
  add("entropy", at("entropy_before"), [number(at("entropy_before")), at("entropy_after") === null ? null : ` → ${number(at("entropy_after"))}`]);
  if (at("entropy_before") === null) add("entropy", at("entropy_after"));
  if (at("sampler_logp") !== null && at("old_logp") !== null) add("sampler gap", at("old_logp") - at("sampler_logp"), number(at("old_logp") - at("sampler_logp"), true));
  add("push on log p", at("push"), number(at("push"), true));
  for (const [name, values] of Object.entries(tokens.columns)) if (!Number.isNaN(values[t])) add(name, values[t]);
  return h("dl", {}, facts.flat());
}

// A change of a log-prob that is worth a warning, in nats.
const SENSIBLE = 0.01;

// Which way the update pushed the token, and which way it moved.
function drawVerdict(tokens, t) {
  const delta = quantityOf("delta").value(tokens, t);
  if (!isNumber(delta)) return null;
  const push = tokens.push && isNumber(tokens.push[t]) && tokens.push[t] ? tokens.push[t] : tokens.advantage ? tokens.advantage[t] : 0;
  const moved = delta > 0 ? "rose" : delta < 0 ? "fell" : "stayed";
  let text = `It ${moved}`;
  const against = push * delta < 0 && Math.abs(delta) >= SENSIBLE;
  if (push) text = `Pushed ${push > 0 ? "up" : "down"}${against ? ", and yet" : ";"} it ${moved}`;
  return h("p", { class: against ? "moved against" : "moved" }, h("b", { class: "delta" }, number(delta, true)), ` ${text}${tokens.before_logp && tokens.after_logp ? `: ${probabilities(Math.exp(tokens.before_logp[t]), Math.exp(tokens.after_logp[t]))}` : ""}.`);
}

// The likeliest tokens before and after, and the token itself: [{id, before, after}], likeliest before first.
function alternativesOf(tokens, t) {
  const rows = new Map();
  const at = (values, k) => values[t * NUM_ALTERNATIVES + k];
  for (const [when, ids, logps] of [["before", tokens.top_before_ids, tokens.top_before_logp], ["after", tokens.top_after_ids, tokens.top_after_logp]]) {
    if (!ids || !logps) continue;
    for (let k = 0; k < NUM_ALTERNATIVES; k++) {
      if (Number.isNaN(at(logps, k)) || at(logps, k) === -Infinity) continue;
      const id = at(ids, k);
      rows.set(id, { id, ...rows.get(id), [when]: Math.exp(at(logps, k)) });
    }
  }
  const id = tokens.ids[t];
  const before = tokens.before_logp ? Math.exp(tokens.before_logp[t]) : undefined;
  if (rows.size) rows.set(id, { id, before, after: tokens.after_logp ? Math.exp(tokens.after_logp[t]) : undefined, ...rows.get(id) });
  return [...rows.values()].sort((a, b) => (b.before || 0) - (a.before || 0) || (b.after || 0) - (a.after || 0));
}

function drawAlternative(row, tokenId, vocabulary, piece, columns) {
  const text = row.id === tokenId && piece ? piece : vocabulary[row.id];
  const bar = (kind, value) => {
    const fillBar = h("i", { class: kind });
    fillBar.style.width = `${100 * (value || 0)}%`;
    return fillBar;
  };
  return h("tr", { class: row.id === tokenId ? "own" : null },
    h("th", { scope: "row" }, h("code", {}, text === undefined ? `#${row.id}` : shown(text))),
    h("td", { class: "bars" }, columns.map(({ kind, key }) => bar(kind, row[key]))),
    columns.map(({ key }) => h("td", {}, row[key] === undefined ? "" : probability(row[key]))));
}

function drawAlternatives(completion, t) {
  const { tokens } = completion;
  const rows = alternativesOf(tokens, t);
  if (!rows.length) return null;
  const isAnswer = completion.group.kind === "validation";
  const columns = [{ kind: "was", key: "before", name: "before" }, { kind: "is", key: "after", name: isAnswer ? "prob." : "after" }].slice(isAnswer ? 1 : 0);
  return h("table", { class: "alternatives" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col", colspan: 2 }, "alternatives"), columns.map(({ name }) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map((row) => drawAlternative(row, tokens.ids[t], completion.group.vocabulary, tokens.pieces[t], columns))));
}

// weight × (surrogate − β·kl + bonus·H) in numbers: those of the record, so that they add up to what was logged.
function drawTerms({ beta, entropy_bonus: bonus }, tokens, t) {
  if (!tokens.weight || !tokens.surrogate || Number.isNaN(tokens.surrogate[t])) return null;
  const weight = tokens.weight[t];
  const kl = tokens.kl ? tokens.kl[t] : 0;
  let [names, values, sum] = ["surrogate", number(tokens.surrogate[t]), tokens.surrogate[t]];
  if (beta) [names, values, sum] = [`${names} − β·KL`, `${values} − ${number(beta)} × ${number(kl)}`, sum - beta * kl];
  if (bonus) [names, values, sum] = [`${names} + bonus·H`, `${values} + ${number(bonus)} × ${number(tokens.entropy_update[t])}`, sum + bonus * tokens.entropy_update[t]];
  if (beta || bonus) [names, values] = [`(${names})`, `(${values})`];
  const total = weight ? weight * sum : 0;
  return h("p", { class: "terms" }, h("span", { class: "names" }, `weight × ${names}`), h("span", {}, `${number(weight)} × ${values} = `, h("b", { "data-term": total }, number(total))));
}

function drawObjective(completion, t) {
  const { tokens, group } = completion;
  const { objective } = group.step;
  if (!tokens.update_logp || !tokens.advantage || Number.isNaN(tokens.update_logp[t])) {
    return h("p", { class: "empty" }, group.kind === "validation" ? "No objective: validation prompts are not learned from." : "No objective: no update took this token in.");
  }
  const { picture, hasCurve, hasTerms } = drawLandscape(objective, tokens, t);
  const notes = [hasCurve ? "Dashed: the slope that the gradient sees. The rest of the completion stays as it was."
    : "No curve is recorded of this token: the line is the slope in the last update."];
  if (hasCurve && hasTerms) notes.push(`Shaded: the ${[objective.beta && "KL term", objective.entropy_bonus && "entropy bonus"].filter(Boolean).join(" and ")}.`);
  if (tokens.weight && tokens.weight[t] === 0) notes.push("Its weight is 0: it is left out.");
  return h("div", {},
    h("div", { class: "heading" }, h("h3", {}, "its objective over π_θ"), h("button", { type: "button", class: "chip", "aria-pressed": String(Boolean(state.near)), title: "draw only what surrounds the marks (x)", onclick: () => change({ near: state.near ? "" : "1" }) }, "closer")),
    picture, notes.length ? h("p", { class: "about" }, notes.join(" ")) : null, drawTerms(objective, tokens, t));
}

function drawCard() {
  const element = pinned || hovered;
  document.querySelectorAll(".token.current").forEach((old) => old.classList.remove("current", "pinned"));
  if (!element) {
    byId("card").replaceChildren(h("p", { class: "empty" }, "Point at a token to see its numbers, its alternatives and its objective. A click pins it. Keys: ?"));
    return;
  }
  const { completion, t } = element;
  const { tokens } = completion;
  element.classList.add("current");
  if (element === pinned) element.classList.add("pinned");
  const isContext = tokens.context && tokens.context[t];
  byId("card").replaceChildren(
    h("div", { class: "heading" }, h("h2", {}, h("code", {}, shown(tokens.pieces[t].length > 60 ? `${tokens.pieces[t].slice(0, 60)}…` : tokens.pieces[t]))),
      h("span", { class: "fact" }, `token ${t + 1} of ${tokens.length}, ${labelOf(completion)}, id ${tokens.ids[t]}`)),
    ...(isContext ? [h("p", { class: "empty" }, "Context: the policy did not sample this token, so no formula sees it.")]
      : [drawVerdict(tokens, t) || "", drawObjective(completion, t), drawAlternatives(completion, t) || "", drawNumbers(tokens, t)]));
}

// Listens for pointer, focus and click on tokens.
function watchTokens(area) {
  const tokenAt = (event) => event.target.closest && event.target.closest(".token");
  for (const kind of ["pointerover", "focusin"]) {
    area.addEventListener(kind, (event) => {
      const element = tokenAt(event);
      if (element && element !== hovered) { hovered = element; if (!state.token) drawCard(); }
    });
  }
  area.addEventListener("click", (event) => {
    const element = tokenAt(event);
    if (element) pin(element === pinned ? null : element);
  });
}

// The element that now stands for the token of one that may have been drawn again; null where it is gone.
function sameToken(element) {
  if (!element || element.isConnected) return element;
  return drawnTokens.find(({ completion, t }) => completion === element.completion && t === element.t) || null;
}

const linkOf = ({ completion, t }) => `${completion.number}.${t}`;

// The token that the address names. Where several have that name, as when a prompt is followed, the one that was clicked.
function pinnedToken() {
  if (!state.token) return null;
  const same = sameToken(pinned);
  return same && linkOf(same) === state.token ? same : drawnTokens.find((element) => linkOf(element) === state.token) || null;
}

// Pins the card to a token; null lets it go.
function pin(element) {
  pinned = element;
  change({ token: element ? linkOf(element) : "" });
}
