// How the coloured quantity is distributed over the tokens in view: right completions above, the others below.
// It is the legend too. Dragging over it selects tokens.

const HISTOGRAM = { width: 300, height: 132, bins: 41, middle: 58, half: 54, side: 6 };

const brushRange = () => {
  const [low, high] = state.brush.split("~").map(Number);
  return state.brush && low <= high ? [low, high] : null;
};

const completionsInView = () => [...new Set(drawnTokens.map(({ completion }) => completion))];

// The bins' edges: symmetric around 0 for a signed quantity.
function domainOf(scale, values) {
  const sizes = values.map(Math.abs).sort((a, b) => a - b);
  const end = Math.max(scale.limit, Math.min(quantile(sizes, 0.995) || 0, 4 * scale.limit));
  return scale.signed ? [-end, end] : [0, end];
}

function counts(values, [low, high]) {
  const bins = new Array(HISTOGRAM.bins).fill(0);
  for (const value of values) bins[clamp(Math.floor(((value - low) / (high - low)) * HISTOGRAM.bins), 0, HISTOGRAM.bins - 1)]++;
  return bins;
}

function drawBars(picture, values, up, top, scale, domain, x) {
  counts(values, domain).forEach((count, bin) => {
    if (!count) return;
    const [from, to] = [0, 1].map((side) => domain[0] + ((bin + side) / HISTOGRAM.bins) * (domain[1] - domain[0]));
    const height = Math.max(1, Math.sqrt(count / top) * HISTOGRAM.half);
    const bar = svg("rect", { class: "bar", x: x(from) + 0.5, width: x(to) - x(from) - 1, y: up ? HISTOGRAM.middle - height : HISTOGRAM.middle, height });
    bar.style.fill = scale.colour((from + to) / 2) || "";
    picture.append(bar);
  });
}

function drawAxis(picture, quantity, scale, domain, x) {
  const y = 2 * HISTOGRAM.middle + 14;
  for (const tick of scale.signed ? [-scale.limit, 0, scale.limit] : [0, scale.limit]) {
    picture.append(svg("text", { class: "tick", x: x(tick), y, "text-anchor": tick === domain[0] ? "start" : tick === domain[1] ? "end" : "middle" }, quantity.text(tick)));
  }
  const steps = 48;
  for (let i = 0; i < steps; i++) {
    const value = domain[0] + ((i + 0.5) / steps) * (domain[1] - domain[0]);
    const swatch = svg("rect", { x: x(domain[0] + (i / steps) * (domain[1] - domain[0])), y: y - 15, width: (x(domain[1]) - x(domain[0])) / steps + 0.4, height: 5 });
    swatch.style.fill = scale.colour(value) || "var(--panel)";
    picture.append(swatch);
  }
}

function brushable(picture, domain, x) {
  const at = (event) => {
    const box = picture.getBoundingClientRect();
    const fraction = (((event.clientX - box.left) / box.width) * HISTOGRAM.width - x(domain[0])) / (x(domain[1]) - x(domain[0]));
    if (fraction <= 0.005) return -Infinity;
    return fraction >= 0.995 ? Infinity : domain[0] + fraction * (domain[1] - domain[0]);
  };
  picture.addEventListener("pointerdown", (event) => {
    const start = at(event);
    picture.setPointerCapture(event.pointerId);
    const range = (moved) => [start, at(moved)].sort((a, b) => a - b);
    const isDrag = ([low, high]) => high - low > (domain[1] - domain[0]) / 100;
    picture.onpointermove = (moved) => { if (isDrag(range(moved))) brush(range(moved)); };
    picture.onpointerup = (moved) => { picture.onpointermove = picture.onpointerup = null; brush(isDrag(range(moved)) ? range(moved) : null); };
  });
}

// Selects the tokens whose value lies in a range; null selects none.
function brush(range) {
  change({ brush: range ? range.map((value) => String(Number.isFinite(value) ? Number(value.toPrecision(4)) : value)).join("~") : "" });
}

// Selects in turn the tenth of the tokens with the lowest values, the tenth with the highest, none.
function nextBrush() {
  const values = valuesOf(colour(), completionsInView()).sort((a, b) => a - b);
  if (!values.length) return;
  const range = brushRange();
  const [low, high] = [quantile(values, 0.1), quantile(values, 0.9)];
  if (!range) brush([-Infinity, low]);
  else brush(range[0] === -Infinity ? [high, Infinity] : null);
}

function drawHistogram() {
  const quantity = colour();
  const completions = completionsInView();
  const [right, others] = [true, false].map((isRight) => valuesOf(quantity, completions.filter((completion) => (completion.right === true) === isRight)));
  const values = [...right, ...others];
  if (!values.length) {
    byId("histogram").replaceChildren(h("h2", {}, quantity.name), h("p", { class: "empty" }, quantity.kind === "none" ? "Tokens without colours. Keys 1 to 9 colour them." : showsAnswers() ? "Validation answers have no such number: they are not learned from." : "This quantity was not recorded for these tokens."));
    return;
  }
  const scale = currentScale();
  const domain = domainOf(scale, values);
  const x = (value) => HISTOGRAM.side + ((value - domain[0]) / (domain[1] - domain[0])) * (HISTOGRAM.width - 2 * HISTOGRAM.side);
  const picture = svg("svg", { viewBox: `0 0 ${HISTOGRAM.width} ${HISTOGRAM.height}`, class: "histogram", role: "img", "aria-label": `Distribution of ${quantity.name}` });
  const top = Math.max(...counts(right, domain), ...counts(others, domain));
  drawBars(picture, right, true, top, scale, domain, x);
  drawBars(picture, others, false, top, scale, domain, x);
  picture.append(svg("line", { class: "axis", x1: x(domain[0]), x2: x(domain[1]), y1: HISTOGRAM.middle, y2: HISTOGRAM.middle }));
  const note = (side, sign, word, y) => side.length && picture.append(svg("text", { class: "side", x: 2, y }, `${sign} ${word}  mean ${quantity.text(mean(side))}`));
  note(right, "✓", "right", 10);
  note(others, "✗", completions.some((completion) => completion.right === null) ? "wrong or not graded" : "wrong", 2 * HISTOGRAM.middle - 4);
  drawAxis(picture, quantity, scale, domain, x);
  const range = brushRange();
  if (range) {
    const [from, to] = range.map((value) => clamp(x(value), HISTOGRAM.side, HISTOGRAM.width - HISTOGRAM.side));
    picture.append(svg("rect", { class: "brush", x: from, y: 0, width: to - from, height: 2 * HISTOGRAM.middle }));
  }
  brushable(picture, domain, x);
  const selected = range && values.filter((value) => value >= range[0] && value <= range[1]).length;
  const fact = range ? `${selected.toLocaleString("en")} of ${plural(values.length, "token")}` : plural(values.length, "token");
  byId("histogram").replaceChildren(
    h("div", { class: "heading" }, h("h2", {}, quantity.name), h("span", { class: "fact" }, fact, range && h("button", { type: "button", class: "clear", title: "clear the selection", onclick: () => brush(null) }, "×"))),
    h("p", { class: "about" }, aboutOf(quantity)), picture);
}
