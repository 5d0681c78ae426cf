// The run's curves as small multiples; recorded steps are marked and can be clicked.

const CURVE = { width: 134, height: 58, top: 6, bottom: 8, side: 5 };

const pathOf = (points, x, y) => points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");

// The value at x, or the last one before. A recorded step, counted from 1, is at x = step - 1.
const valueAt = (points, x) => (points.findLast(([at]) => at <= x) || points[0])[1];

function drawCurve(name, metric, points, otherPoints, steps, current) {
  const all = [...points, ...otherPoints].filter(([, value]) => Number.isFinite(value));
  const [xs, ys] = [0, 1].map((i) => all.map((point) => point[i]));
  const [first, last, low, high] = [Math.min(...xs, 0), Math.max(...xs, 1), Math.min(...ys), Math.max(...ys)];
  const span = high - low || Math.abs(high) || 1;
  const x = (step) => CURVE.side + ((Math.max(step, first) - first) / (last - first)) * (CURVE.width - 2 * CURVE.side);
  const y = (value) => CURVE.height - CURVE.bottom - ((value - (high === low ? low - span / 2 : low)) / span) * (CURVE.height - CURVE.top - CURVE.bottom);
  const picture = svg("svg", { viewBox: `0 0 ${CURVE.width} ${CURVE.height}`, class: "curve", role: "img", "aria-label": `${name} over the steps` });
  if (current) picture.append(svg("line", { class: "now", x1: x(current.step - 1), x2: x(current.step - 1), y1: 0, y2: CURVE.height }));
  if (otherPoints.length) picture.append(svg("path", { class: "line other", d: pathOf(otherPoints, x, y) }));
  picture.append(svg("path", { class: "line", d: pathOf(points, x, y) }));
  for (const step of steps.filter((recorded) => Math.max(recorded.step - 1, 0) >= points[0][0])) {
    const chosen = current && step.step === current.step;
    picture.append(svg("circle", { class: chosen ? "mark chosen" : "mark", cx: x(step.step - 1), cy: y(valueAt(points, step.step - 1)), r: chosen ? 3.2 : 2 }));
  }
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * CURVE.width;
    const nearest = [...steps].sort((a, b) => Math.abs(x(a.step - 1) - at) - Math.abs(x(b.step - 1) - at))[0];
    if (nearest) change({ step: nearest.step, token: "" });
  });
  const value = current ? valueAt(points, current.step - 1) : points[points.length - 1][1];
  return h("figure", { title: `${metric || name}: from ${number(low)} to ${number(high)}` }, h("figcaption", {}, h("span", {}, name), h("b", {}, number(value))), picture);
}

function drawCurves() {
  const [run, other] = page.runs;
  const current = stepInfo();
  const figures = Object.entries(run.curves).map(([name, points]) =>
    drawCurve(name, run.metrics[name], points, (other && other.curves[name]) || [], run.steps, current));
  const empty = h("p", { class: "empty" }, "No curves: this folder has neither event files nor metrics.csv.");
  const swatch = (kind) => svg("svg", { viewBox: "0 0 22 6", class: "curve" }, svg("path", { class: kind, d: "M1 3L21 3" }));
  const legend = other && h("p", { class: "legend" }, h("span", {}, swatch("line"), run.name), h("span", {}, swatch("line other"), other.name));
  byId("curves").replaceChildren(...[legend, figures.length ? h("div", { class: "multiples" }, figures) : empty].filter(Boolean));
}
