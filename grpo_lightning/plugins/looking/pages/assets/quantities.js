// The quantities that colour tokens. `value` returns the number behind the colour; `text` writes it.

const difference = (a, b) => (tokens, t) => (tokens[a] && tokens[b] ? tokens[a][t] - tokens[b][t] : NaN);
const column = (name) => (tokens, t) => (tokens[name] ? tokens[name][t] : NaN);
const signedNumber = (value) => number(value, true);
const asFactor = (value) => `× ${number(Math.exp(value))}`;

const QUANTITIES = [
  { id: "delta", key: "1", name: "Δ log p", kind: "signed", value: difference("after_logp", "before_logp"), text: signedNumber,
    about: "log-prob after the step's updates less that before: blue rose, orange fell" },
  { id: "probability", key: "2", name: "probability", kind: "rarity", limit: 1, text: probability,
    value: (tokens, t) => Math.exp((tokens.before_logp || tokens.after_logp || [])[t]),
    about: "probability of the token before the step's updates: the darker, the less likely",
    ofAnswers: "probability of the token under the policy of its step: the darker, the less likely" },
  { id: "advantage", key: "3", name: "advantage", kind: "signed", value: column("advantage"), text: signedNumber,
    about: "Â: blue is to become likelier, orange less likely" },
  { id: "ratio", key: "4", name: "ratio", kind: "signed", value: difference("update_logp", "old_logp"), text: asFactor,
    about: "π_θ/π_old in the last update that the token took part in" },
  { id: "clip", key: "5", name: "clip", kind: "signed", limit: 1, value: column("clip"),
    text: (value) => ({ "-1": "lower bound", 0: "free", 1: "upper bound" })[value] || "–",
    about: "tokens at a bound or target: blue and overlined the upper, orange and underlined the lower" },
  { id: "kl", key: "6", name: "KL", kind: "size", value: column("kl"), text: number,
    about: "estimate of KL(π_θ ‖ π_ref) in the last update" },
  { id: "entropy", key: "7", name: "entropy", kind: "size", value: (tokens, t) => (tokens.entropy_before || tokens.entropy_after || [NaN])[t], text: number,
    about: "entropy of π_θ before the step's updates, in nats", ofAnswers: "entropy of the policy of its step, in nats" },
  { id: "gap", key: "8", name: "sampler gap", kind: "signed", value: difference("old_logp", "sampler_logp"), text: signedNumber,
    about: "log π_old less the log-prob recorded when the token was sampled" },
  { id: "correction", key: "9", name: "correction", kind: "signed", text: asFactor,
    value: (tokens, t) => (tokens.correction ? Math.log(tokens.correction[t]) : NaN),
    about: "factor for the mismatch of sampler and policy" },
  { id: "none", key: "0", name: "plain", kind: "none", value: () => NaN, text: () => "", about: "no colours" },
];

// True if the view shows validation answers, which are not learned from.
const showsAnswers = () => state.view === "follow" || (currentGroup() || {}).kind === "validation";

// The colour unless another is chosen: the change by the updates, which validation answers do not have.
const usualColour = () => (showsAnswers() ? "probability" : "delta");
const colour = () => quantityOf(state.colour || usualColour());
const chooseColour = (id) => change({ colour: id === usualColour() ? "" : id, brush: "" });
const aboutOf = (quantity) => (showsAnswers() && quantity.ofAnswers) || quantity.about;

const quantityOf = (id) => QUANTITIES.find((quantity) => quantity.id === id) || QUANTITIES[0];

// The values of a quantity at the sampled tokens of completions.
function valuesOf(quantity, completions) {
  return completions.flatMap(({ tokens }) => tokens.sampled.map((t) => quantity.value(tokens, t)).filter(isNumber));
}
