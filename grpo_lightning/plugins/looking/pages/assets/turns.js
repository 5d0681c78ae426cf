// The turns of a conversation with an environment: writer, text and reward of each.

// The turns of a completion: [{role, reward, first, end}]; one without a role where there is no environment.
function turnsOf({ conversation, tokens }) {
  if (!conversation || !conversation.turns.length) return [{ first: 0, end: tokens.length - 1 }];
  return conversation.turns.map((turn, index, turns) => ({ ...turn, first: index ? turns[index - 1].end + 1 : 0 }));
}

// Completions without the branches of others: what is counted.
const withoutBranches = (completions) => completions.filter(({ conversation }) => !conversation || !conversation.piece);

const labelOf = ({ greedy, sample }) => (greedy ? "greedy" : `#${sample + 1}`);

function branchOf({ conversation }) {
  if (!conversation || conversation.num_pieces < 2) return null;
  return h("span", { class: "branch", title: "a chat template rewrites earlier turns: the conversation goes on in a completion of its own, which begins with the turns as they are now" }, `part ${conversation.piece + 1} of ${conversation.num_pieces}`);
}

const ROLES_OF_CONTEXT = { history: "history, as it is now", prompt: "prompt, its own part" };

// The head of a turn. Rewards are shown if any turn has one.
function turnHead(turn, number_, hasRewards) {
  if (turn.role !== POLICY) return h("div", { class: "who" }, h("span", {}, oneLine(Object.hasOwn(ROLES_OF_CONTEXT, turn.role) ? ROLES_OF_CONTEXT[turn.role] : turn.role, 60)));
  return h("div", { class: "who" }, h("span", {}, `turn ${number_}`), hasRewards && h("b", { title: "what the environment gave for this turn" }, number(turn.reward, true)));
}

// The elements of the turns; `tokensOf` draws the tokens from the first to the last.
function drawTurns(completion, length, tokensOf) {
  const turns = turnsOf(completion).filter(({ first }) => first < length);
  const hasRewards = turns.some(({ role, reward }) => role === POLICY && reward);
  let count = completion.turnsBefore;
  const drawn = turns.map((turn) => {
    const tokens = tokensOf(turn.first, Math.min(turn.end, length - 1));
    if (turn.role === undefined) return tokens;
    const kind = turn.role === POLICY ? "own" : turn.role === "history" ? "other history" : "other";
    return h("div", { class: `turn ${kind}` }, turnHead(turn, turn.role === POLICY ? ++count : null, hasRewards), tokens);
  });
  return [drawn, length >= completion.tokens.length && drawClosing(completion)];
}

// The last messages of the environment: no tokens, since the policy never read them.
function drawClosing({ conversation }) {
  return ((conversation && conversation.closing) || []).map(([role, text]) =>
    h("div", { class: "turn other unread" }, h("div", { class: "who" }, h("span", {}, oneLine(role, 60), ", not read")), h("span", { class: "message" }, shown(text))));
}

// The outcome of the whole conversation, its calls and its error.
function drawOutcome({ conversation }) {
  if (!conversation) return null;
  const { num_calls: calls, num_failed_calls: failed, outcome, error } = conversation;
  return [calls > 0 && h("span", {}, plural(calls, "call"), failed > 0 && h("em", {}, `, ${failed} failed`)), isNumber(outcome) && h("span", {}, "outcome ", h("b", {}, number(outcome))), error && h("em", {}, "environment: ", oneLine(error, 80))];
}
