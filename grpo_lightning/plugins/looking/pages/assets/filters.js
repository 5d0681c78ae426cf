// The filters of completions, and the matches of the search in their text.

const FILTERS = [
  { id: "right", name: "✓ right", holds: (completion) => completion.right === true },
  { id: "wrong", name: "✗ wrong", holds: (completion) => completion.right === false },
  { id: "truncated", name: "truncated", holds: (completion) => completion.finish_reason === "length" },
  { id: "clipped", name: "clipped", holds: ({ tokens }) => Boolean(tokens.clip) && tokens.clip.some((side) => side !== 0) },
  { id: "failed", name: "failed reward", holds: ({ reward, scores }) => reward === null || Object.values(scores).includes(null) },
];

const shownFilters = () => state.show.split(",").filter(Boolean);

// The search as a regular expression; null where there is none, a message where it is none.
function searchPattern() {
  if (!state.search) return null;
  try {
    return new RegExp(state.search, "giu");
  } catch (error) {
    return String(error.message);
  }
}

// Returns true if a completion passes the filters. Right and wrong are alternatives, the others hold together.
function matches(completion) {
  const chosen = shownFilters();
  const verdicts = FILTERS.filter(({ id }) => ["right", "wrong"].includes(id) && chosen.includes(id));
  const properties = FILTERS.filter(({ id }) => !["right", "wrong"].includes(id) && chosen.includes(id));
  if (verdicts.length && !verdicts.some(({ holds }) => holds(completion))) return false;
  if (!properties.every(({ holds }) => holds(completion))) return false;
  const isAbove = (delta) => Math.abs(delta) > Number(state.above);
  if (state.above !== "" && !valuesOf(quantityOf("delta"), [completion]).some(isAbove)) return false;
  const pattern = searchPattern();
  if (!(pattern instanceof RegExp)) return true;
  return [completion.tokens.pieces.join(""), completion.group.question].some((text) => text.search(pattern) >= 0);
}

const isFiltered = () => Boolean(state.show || state.search || state.above !== "");

// The indices of the tokens that the search's matches touch.
function searchHits(tokens) {
  const pattern = searchPattern();
  const hits = new Set();
  if (!(pattern instanceof RegExp)) return hits;
  const spans = [...tokens.pieces.join("").matchAll(pattern)].filter((match) => match[0]).map((match) => [match.index, match.index + match[0].length]);
  let start = 0;
  tokens.pieces.forEach((piece, t) => {
    if (piece && spans.some(([from, to]) => from < start + piece.length && start < to)) hits.add(t);
    start += piece.length;
  });
  return hits;
}

function drawFilters() {
  const chosen = shownFilters();
  const buttons = FILTERS.map(({ id, name }) =>
    h("button", { type: "button", class: "chip", "data-filter": id, "aria-pressed": String(chosen.includes(id)), onclick: () => toggleFilter(id) }, name));
  const pattern = searchPattern();
  return h("div", { class: "filters" },
    h("div", { class: "chips" }, buttons.slice(0, 4)),
    h("div", { class: "fields" }, buttons.slice(4),
      h("input", { id: "search", type: "search", placeholder: "/ search", title: "a regular expression, in completions and questions", "aria-label": "Search, a regular expression", value: state.search, onchange: (event) => change({ search: event.target.value }) }),
      h("label", { class: "above" }, "|Δ| >", h("input", { id: "above", type: "number", min: 0, step: "any", value: state.above, title: "completions with a token whose log-prob moved by more nats than this", "aria-label": "Smallest change of a log-prob", onchange: (event) => change({ above: event.target.value }) }))),
    typeof pattern === "string" && h("p", { class: "problem", role: "alert" }, pattern));
}
