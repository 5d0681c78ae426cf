// A token's own objective over π_θ from 0 to 1, with its corners and where the policies stand.

const LANDSCAPE = { width: 300, height: 150, left: 8, right: 8, top: 8, bottom: 18, lane: 15, points: 240 };

// The probabilities between which the curve is drawn: everything, or what surrounds the marks.
function rangeOf(marks) {
  if (!state.near) return [0, 1];
  const at = marks.map(({ logp }) => Math.exp(logp)).filter((p) => p <= 1);
  const [low, high] = [Math.min(...at), Math.max(...at)];
  const margin = Math.max(high - low, high / 4, 1e-6) * 0.6;
  return [Math.max(0, low - margin), Math.min(1, high + margin)];
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

function drawLandscape(objective, tokens, t) {
  const token = tokenOf(tokens, t);
  const marks = marksOf(tokens, t);
  const logp = tokens.update_logp[t];
  const hasFormula = isKnown(objective);
  const knows = hasFormula && agrees(objective, token, tokens, t);
  const here = knows ? objectiveAt(objective, token, logp).total : tokens.surrogate ? tokens.surrogate[t] : 0;
  const slope = tokens.push && tokens.weight && tokens.weight[t] ? tokens.push[t] / tokens.weight[t] : NaN;
  const [from, to] = rangeOf(marks);
  const curve = [];
  for (let i = 0; knows && i <= LANDSCAPE.points; i++) {
    const p = Math.max(from + ((to - from) * i) / LANDSCAPE.points, (to - from) / 2000);
    curve.push({ p, ...objectiveAt(objective, token, Math.log(p)) });
  }
  const corners = knows ? cornersOf(objective.surrogate, token).filter((corner) => corner.logp <= 0) : [];
  const focus = [here, ...marks.concat(corners).filter((mark) => knows && Math.exp(mark.logp) >= (to - from) / 100).map((mark) => objectiveAt(objective, token, mark.logp).total)];
  const [low, high] = heightOf(curve, focus);
  const x = (p) => LANDSCAPE.left + ((p - from) / (to - from)) * (LANDSCAPE.width - LANDSCAPE.left - LANDSCAPE.right);
  const y = (value) => LANDSCAPE.top + ((high - value) / (high - low)) * (LANDSCAPE.height - LANDSCAPE.top - LANDSCAPE.bottom);
  const inside = (p) => p >= from && p <= to;
  const height = LANDSCAPE.height + 4 + LANDSCAPE.lane * marks.length;
  const picture = svg("svg", { viewBox: `0 0 ${LANDSCAPE.width} ${height}`, class: "landscape", role: "img", "aria-label": "The token's objective over its probability" },
    svg("defs", {}, svg("clipPath", { id: "frame" }, svg("rect", { x: LANDSCAPE.left, y: LANDSCAPE.top, width: LANDSCAPE.width - LANDSCAPE.left - LANDSCAPE.right, height: LANDSCAPE.height - LANDSCAPE.top - LANDSCAPE.bottom }))));
  const path = (points) => points.map(({ p, value }, i) => `${i ? "L" : "M"}${x(p).toFixed(2)} ${clamp(y(value), -999, 999).toFixed(2)}`).join("");
  const plot = svg("g", { "clip-path": "url(#frame)" });
  picture.append(svg("line", { class: "axis", x1: x(from), x2: x(to), y1: y(0), y2: y(0) }), svg("text", { class: "tick", x: x(to), y: y(0) - 3 < LANDSCAPE.top + 6 ? y(0) + 10 : y(0) - 3, "text-anchor": "end" }, "0"), plot);
  for (const corner of corners.filter(({ logp: at }) => inside(Math.exp(at)))) {
    const at = Math.exp(corner.logp);
    plot.append(svg("line", { class: "corner", x1: x(at), x2: x(at), y1: 0, y2: LANDSCAPE.height }));
    const end = at > from + 0.7 * (to - from);
    picture.append(svg("text", { class: "corner-name", x: x(at) + (end ? -3 : 3), y: LANDSCAPE.top + 8, "text-anchor": end ? "end" : "start" }, corner.name));
  }
  const hasShare = objective.beta || objective.entropy_bonus;
  if (knows && hasShare) {
    const back = [...curve].reverse();
    plot.append(svg("path", { class: "share", d: `${path(curve.map(({ p, total }) => ({ p, value: total })))}L${path(back.map(({ p, surrogate }) => ({ p, value: surrogate }))).slice(1)}Z` }));
    plot.append(svg("path", { class: "surrogate", d: path(curve.map(({ p, surrogate }) => ({ p, value: surrogate }))) }));
  }
  if (knows) plot.append(svg("path", { class: "objective", d: path(curve.map(({ p, total }) => ({ p, value: total }))) }));
  if (isNumber(slope) && Math.exp(logp) > 0) {
    const tangent = [-0.25, 0, 0.25].map((step) => step * (to - from) + Math.exp(logp)).map((p) => ({ p, value: here + (slope / Math.exp(logp)) * (p - Math.exp(logp)) }));
    if (!knows || isStopped(objective.surrogate)) plot.append(svg("path", { class: "tangent", d: path(tangent) }));
  }
  for (const mark of marks.filter(({ kind, logp: at }) => (knows || kind === "before") && inside(Math.exp(at)))) {
    const value = knows ? objectiveAt(objective, token, mark.logp).total : here;
    plot.append(svg("circle", { class: `dot ${mark.kind}`, cx: x(Math.exp(mark.logp)), cy: y(value), r: 3.6 }));
  }
  for (const [p, anchor] of [[from, "start"], [(from + to) / 2, "middle"], [to, "end"]]) {
    picture.append(svg("text", { class: "tick", x: x(p), y: LANDSCAPE.height - 5, "text-anchor": anchor }, state.near ? number(p) : String(p)));
  }
  marks.forEach((mark, lane) => drawLane(picture, mark, LANDSCAPE.height + 9 + lane * LANDSCAPE.lane, x, inside));
  return { picture, knows, hasFormula, hasShare };
}

// A mark's own line below the curve: its name, its dot, its probability.
function drawLane(picture, mark, y, x, inside) {
  const p = Math.exp(mark.logp);
  picture.append(svg("line", { class: "lane", x1: LANDSCAPE.left, x2: LANDSCAPE.width - LANDSCAPE.right, y1: y, y2: y }));
  if (inside(p)) picture.append(svg("circle", { class: `dot ${mark.kind}`, cx: x(p), cy: y, r: 3.6 }));
  const left = inside(p) && x(p) < LANDSCAPE.width / 2;
  const label = svg("text", { class: "lane-name", x: left ? LANDSCAPE.width - LANDSCAPE.right : LANDSCAPE.left, y: y + 3.5, "text-anchor": left ? "end" : "start" }, `${mark.name}  ${probability(p)}`);
  picture.append(label);
}

// Whether the formula gives the recorded value: a class of the user's may have a name that is known here.
function agrees(objective, token, tokens, t) {
  if (!tokens.surrogate || Number.isNaN(tokens.surrogate[t])) return true;
  const value = surrogateAt(objective.surrogate, token, tokens.update_logp[t]);
  return Math.abs(value - tokens.surrogate[t]) <= 1e-3 * Math.max(1, Math.abs(value));
}

// Whether the gradient treats a part of the value as a constant, or reaches the token through others of its completion.
function isStopped(settings) {
  if (settings.class === "OffPolicyMask") return isStopped(settings.surrogate);
  return ["CISPO", "SequenceClipped", "SequenceClippedToken", "GMPO"].includes(settings.class);
}
