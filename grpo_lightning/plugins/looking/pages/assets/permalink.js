// The state of the page in its address: #step=20&group=3&token=1.14&colour=delta.

const DEFAULTS = {
  view: "tokens", step: null, group: 0, token: "", colour: "", sort: "recorded", show: "", search: "", above: "",
  brush: "", theme: "", near: "", prompt: "",
};

function readLink(hash) {
  const parameters = new URLSearchParams(hash.replace(/^#/, ""));
  const state = { ...DEFAULTS };
  for (const key of Object.keys(DEFAULTS)) if (parameters.has(key)) state[key] = parameters.get(key);
  state.step = state.step === null ? null : Number(state.step);
  state.group = Number(state.group) || 0;
  return state;
}

function writeLink(state) {
  const parameters = new URLSearchParams();
  for (const [key, value] of Object.entries(DEFAULTS)) {
    if (state[key] !== value && state[key] !== null) parameters.set(key, state[key]);
  }
  const hash = `#${parameters}`;
  if (hash !== location.hash && (hash !== "#" || location.hash)) history.replaceState(null, "", hash);
}
