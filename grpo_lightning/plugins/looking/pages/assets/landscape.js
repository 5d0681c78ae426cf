// The objective of a token over π_θ, which the run's classes computed at some points, and where the policies stand.

const LANDSCAPE = { width: 300, height: 164, left: 34, right: 8, top: 8, bottom: 32, lane: 15 };
const CURVE_POINTS = 40;

// Half of the points of a curve, evenly spread, as the record has them.
function halfOfPoints(low, high) {
  const last = CURVE_POINTS / 2 - 1;
  return Array.from({ length: last + 1 }, (_, i) => Math.max(low + ((high - low) * i) / last, (high - low) / 2000));
}

// A token's curve: [{p, surrogate, total}], p rising; empty where none is recorded.
function curveOf(objective, tokens, t) {
  if (!tokens.curve || !tokens.near) return [];
  const bonus = objective.entropy_bonus ? objective.entropy_bonus * tokens.entropy_update[t] : 0;
  const probabilities = [...halfOfPoints(0, 1), ...halfOfPoints(...tokens.near.slice(2 * t, 2 * t + 2))];
  const points = probabilities.map((p, k) => {
    const surrogate = tokens.surrogate[t] + tokens.curve[t * CURVE_POINTS + k];
    const kl = objective.beta && tokens.curve_kl ? tokens.kl[t] + tokens.curve_kl[t * CURVE_POINTS + k] : 0;
    return { p, surrogate, total: surrogate - (objective.beta || 0) * kl + bonus };
  });
  return points.filter(({ total }) => Number.isFinite(total)).sort((a, b) => a.p - b.p);
}

// The curve's total at p, on a straight line between its points.
function totalAt(curve, p) {
  const next = curve.findIndex((point) => point.p >= p);
  if (next < 1) return (next < 0 ? curve[curve.length - 1] : curve[0]).total;
  const [a, b] = [curve[next - 1], curve[next]];
  return a.total + ((b.total - a.total) * (p - a.p)) / (b.p - a.p || 1);
}

// Values from low to high, without the far ends of a curve that goes to infinity.
function heightOf(curve, focus) {
  const span = Math.max(...focus) - Math.min(...focus);
  const middle = (Math.max(...focus) + Math.min(...focus)) / 2;
  const room = Math.max(1.6 * span, 1.2 * Math.max(...focus.map(Math.abs)), 1e-9);
  const inside = curve.flatMap(({ total, surrogate }) => [total, surrogate]).map((value) => clamp(value, middle - room, middle + room));
  const [low, high] = [Math.min(...inside, 0), Math.max(...inside, 0)];
  return [low - 0.06 * (high - low || 1), high + 0.06 * (high - low || 1)];
}

function marksOf(tokens, t) {
  const marks = [
    ["π_old", "old", tokens.old_logp], ["π_ref", "ref", tokens.ref_logp],
    ["before the update", "before", tokens.update_logp], ["after the step", "after", tokens.after_logp],
  ];
  return marks.filter(([, , values]) => values && !Number.isNaN(values[t])).map(([name, kind, values]) => ({ name, kind, logp: values[t] }));
}

// The probabilities at which the token gets to its bounds: [{p, name}].
function boundsOf(tokens, t) {
  return ["lower bound", "upper bound"].map((name, side) => ({ name, p: tokens.bounds ? tokens.bounds[2 * t + side] : NaN })).filter(({ p }) => isNumber(p));
}

function drawLandscape(objective, tokens, t) {
  const marks = marksOf(tokens, t);
  const curve = curveOf(objective, tokens, t);
  const hasCurve = curve.length > 0;
  const p0 = Math.exp(tokens.update_logp[t]);
  const objectiveNow = hasCurve ? totalAt(curve, p0) : tokens.surrogate ? tokens.surrogate[t] : 0;
  const slope = tokens.push && tokens.weight && tokens.weight[t] ? tokens.push[t] / tokens.weight[t] : NaN;
  const [from, to] = state.near && tokens.near ? tokens.near.slice(2 * t, 2 * t + 2) : [0, 1];
  const bounds = boundsOf(tokens, t);
  const inside = (p) => p >= from && p <= to;
  const drawn = curve.filter(({ p }) => inside(p));
  const shownAt = [...marks.map(({ logp }) => Math.exp(logp)), ...bounds.map(({ p }) => p)].filter((p) => hasCurve && p >= (to - from) / 100 && p <= 1);
  const [low, high] = heightOf(drawn, [objectiveNow, ...shownAt.map((p) => totalAt(curve, p))]);
  const x = (p) => LANDSCAPE.left + ((p - from) / (to - from)) * (LANDSCAPE.width - LANDSCAPE.left - LANDSCAPE.right);
  const y = (value) => LANDSCAPE.top + ((high - value) / (high - low)) * (LANDSCAPE.height - LANDSCAPE.top - LANDSCAPE.bottom);
  const height = LANDSCAPE.height + 4 + LANDSCAPE.lane * marks.length;
  const picture = svg("svg", { viewBox: `0 0 ${LANDSCAPE.width} ${height}`, class: "landscape", role: "img", "aria-label": "The token's objective over its probability" },
    svg("defs", {}, svg("clipPath", { id: "frame" }, svg("rect", { x: LANDSCAPE.left, y: LANDSCAPE.top, width: LANDSCAPE.width - LANDSCAPE.left - LANDSCAPE.right, height: LANDSCAPE.height - LANDSCAPE.top - LANDSCAPE.bottom }))));
  const path = (points) => points.map(({ p, value }, i) => `${i ? "L" : "M"}${x(p).toFixed(2)} ${clamp(y(value), -999, 999).toFixed(2)}`).join("");
  const plot = svg("g", { "clip-path": "url(#frame)" });
  picture.append(svg("line", { class: "axis", x1: x(from), x2: x(to), y1: y(0), y2: y(0) }), plot);
  const bottom = LANDSCAPE.height - LANDSCAPE.bottom;
  const step = round125((high - low) / 4);
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) {
    picture.append(svg("text", { class: "tick value", x: LANDSCAPE.left - 4, y: y(value) + 3, "text-anchor": "end" }, number(Math.abs(value) < step / 2 ? 0 : value)));
  }
  for (const { p, name } of bounds.filter((bound) => hasCurve && inside(bound.p))) {
    const end = p > from + 0.7 * (to - from);
    plot.append(svg("line", { class: "corner", x1: x(p), x2: x(p), y1: 0, y2: LANDSCAPE.height }));
    picture.append(svg("text", { class: "corner-name", x: x(p) + (end ? -3 : 3), y: LANDSCAPE.top + 8, "text-anchor": end ? "end" : "start" }, name));
  }
  const hasTerms = objective.beta || objective.entropy_bonus;
  if (hasCurve && hasTerms) {
    const back = [...drawn].reverse();
    plot.append(svg("path", { class: "share", d: `${path(drawn.map(({ p, total }) => ({ p, value: total })))}L${path(back.map(({ p, surrogate }) => ({ p, value: surrogate }))).slice(1)}Z` }));
    plot.append(svg("path", { class: "surrogate", d: path(drawn.map(({ p, surrogate }) => ({ p, value: surrogate }))) }));
  }
  if (hasCurve) plot.append(svg("path", { class: "objective", d: path(drawn.map(({ p, total }) => ({ p, value: total }))) }));
  if (isNumber(slope) && p0 > 0) {
    const tangent = [-0.25, 0, 0.25].map((step) => step * (to - from) + p0).map((p) => ({ p, value: objectiveNow + (slope / p0) * (p - p0) }));
    plot.append(svg("path", { class: "tangent", d: path(tangent) }));
  }
  for (const { kind, logp } of marks.filter(({ kind, logp }) => (hasCurve || kind === "before") && inside(Math.exp(logp)))) {
    plot.append(svg("circle", { class: `dot ${kind}`, cx: x(Math.exp(logp)), cy: y(hasCurve ? totalAt(curve, Math.exp(logp)) : objectiveNow), r: 3.6 }));
  }
  for (const [p, anchor] of [[from, "start"], [(from + to) / 2, "middle"], [to, "end"]]) {
    picture.append(svg("text", { class: "tick", x: x(p), y: bottom + 13, "text-anchor": anchor }, state.near ? number(p) : String(p)));
  }
  picture.append(svg("text", { class: "tick", x: x((from + to) / 2), y: bottom + 26, "text-anchor": "middle" }, "probability of the token"));
  marks.forEach((mark, lane) => drawLane(picture, mark, LANDSCAPE.height + 9 + lane * LANDSCAPE.lane, x, inside));
  return { picture, hasCurve, hasTerms };
}

// The line of a mark below the curve: its name, its dot, its probability.
function drawLane(picture, mark, y, x, inside) {
  const p = Math.exp(mark.logp);
  picture.append(svg("line", { class: "lane", x1: LANDSCAPE.left, x2: LANDSCAPE.width - LANDSCAPE.right, y1: y, y2: y }));
  if (inside(p)) picture.append(svg("circle", { class: `dot ${mark.kind}`, cx: x(p), cy: y, r: 3.6 }));
  const left = inside(p) && x(p) < LANDSCAPE.width / 2;
  const label = svg("text", { class: "lane-name", x: left ? LANDSCAPE.width - LANDSCAPE.right : LANDSCAPE.left, y: y + 3.5, "text-anchor": left ? "end" : "start" }, `${mark.name}  ${probability(p)}`);
  picture.append(label);
}
