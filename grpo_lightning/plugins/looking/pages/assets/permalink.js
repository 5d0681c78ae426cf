// What is looked at, in the address: #step=20&group=3&token=1.14&colour=delta.

const DEFAULTS = {
  view: "tokens", step: null, group: 0, token: "", colour: "", sort: "recorded", show: "", search: "", above: "",
  brush: "", theme: "", near: "", prompt: "",
};

function readLink(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const state = { ...DEFAULTS };
  for (const key of Object.keys(DEFAULTS)) if (given.has(key)) state[key] = given.get(key);
  state.step = state.step === null ? null : Number(state.step);
  state.group = Number(state.group) || 0;
  return state;
}

function writeLink(state) {
  const given = new URLSearchParams();
  for (const [key, value] of Object.entries(DEFAULTS)) {
    if (state[key] !== value && state[key] !== null) given.set(key, state[key]);
  }
  const hash = `#${given}`;
  if (hash !== location.hash && (hash !== "#" || location.hash)) history.replaceState(null, "", hash);
}
