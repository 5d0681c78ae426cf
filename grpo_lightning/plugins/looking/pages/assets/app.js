// The state of the page, and drawing it again when that changes.

const page = JSON.parse(byId("page").textContent);
const decoded = new Map();
const scales = new Map();
const problems = [...page.notes];
let state = readLink(location.hash);

// A recorded step of run 0 or 1, decoded once; null where it cannot be read.
function stepOf(run, step) {
  const key = `${run}-${step}`;
  if (!decoded.has(key)) {
    let record = null;
    try {
      const data = byId(`step-${key}`);
      record = data && decodeStep(JSON.parse(data.textContent));
    } catch (error) {
      problems.push(`Step ${step} of ${page.runs[run].name} cannot be read: ${error.message}.`);
    }
    decoded.set(key, record);
  }
  return decoded.get(key);
}

// The recorded step that is open; the last one if the address names none, or none that is there.
function stepInfo() {
  const { steps } = page.runs[0];
  return steps.find(({ step }) => step === state.step) || steps[steps.length - 1] || null;
}

const currentStep = () => (stepInfo() ? stepOf(0, stepInfo().step) : null);

function currentGroup() {
  const listed = listedGroups(currentStep());
  return listed.find((group) => group.index === state.group) || listed[0] || null;
}

// The scale of the colours: of the whole step, so that groups can be compared.
function currentScale() {
  const quantity = colour();
  const key = `${quantity.id}-${stepInfo() && stepInfo().step}-${state.view === "tokens" ? "" : state.view}`;
  if (!scales.has(key) || state.view !== "tokens") {
    const step = currentStep();
    const completions = state.view === "tokens" && step ? step.groups.flatMap((group) => group.completions) : completionsInView();
    scales.set(key, scaleOf(quantity, valuesOf(quantity, completions)));
  }
  return scales.get(key);
}

function drawContent() {
  drawnTokens = [];
  const draw = { tokens: drawTokensView, follow: drawFollow, compare: drawCompare }[state.view] || drawTokensView;
  byId("content").replaceChildren();
  attempt("The completions", () => byId("content").replaceChildren(...draw()));
  pinned = pinnedToken();
  hovered = sameToken(hovered);
  extreme = sameToken(extreme);
  drawNumbersOfContent();
}

// Draws what depends on the token, the brush and the colour alone.
function drawNumbersOfContent() {
  attempt("The colours", paint);
  attempt("The distribution", drawHistogram);
  attempt("The card", drawCard);
  drawNotes();
}

// Draws a part of the page; what it cannot draw becomes a note, and the other parts are drawn.
function attempt(part, draw) {
  try {
    draw();
  } catch (error) {
    note(`${part} cannot be drawn: ${error.message}. The record may be broken.`);
  }
}

function note(text) {
  if (!problems.includes(text)) problems.push(text);
  drawNotes();
}

function drawNotes() {
  byId("notes").replaceChildren(...problems.map((problem) => h("p", { class: "problem", role: "status" }, problem)));
}

function drawAll() {
  document.documentElement.dataset.theme = state.theme;
  document.body.dataset.view = state.view;
  readPalette();
  scales.clear();
  attempt("The bar", drawBar);
  attempt("The curves", drawCurves);
  attempt("The choice of colours", drawColours);
  attempt("The groups", drawGroups);
  drawContent();
}

function openLink() {
  state = readLink(location.hash);
  drawAll();
  if (!state.group) leaveLonely();
}

const CONTENT_ONLY = ["token", "near", "brush"];

// Changes what is open, and the address with it.
function change(changes) {
  const keys = Object.keys(changes).filter((key) => state[key] !== changes[key]);
  if (!keys.length) return;
  const focused = document.activeElement && document.activeElement.id;
  state = { ...state, ...changes };
  if (state.step === null && stepInfo()) state.step = stepInfo().step;
  const group = currentGroup();
  if (group) state.group = group.index;
  writeLink(state);
  if (keys.every((key) => CONTENT_ONLY.includes(key))) {
    pinned = pinnedToken();
    drawNumbersOfContent();
  } else drawAll();
  if (focused && byId(focused)) byId(focused).focus();
  const chosen = document.querySelector("#groups [aria-selected=true]");
  if (keys.includes("view") || keys.includes("step")) document.querySelector(".row.chosen")?.scrollIntoView({ block: "nearest" });
  if (chosen && (keys.includes("group") || keys.includes("sort"))) chosen.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", onKey);
// On paper the colours are those of the light theme, whatever the screen's are.
window.addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; readPalette(); scales.clear(); paint(); drawHistogram(); });
window.addEventListener("afterprint", drawAll);
window.addEventListener("hashchange", openLink);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
watchTokens(byId("content"));
openLink();
document.documentElement.dataset.ready = "1";
