// Elements are made from names and text nodes alone: nothing that a model wrote is ever parsed as HTML.

function fill(element, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const h = (name, properties = {}, ...children) => fill(document.createElement(name), properties, children);
const svg = (name, properties = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", name), properties, children);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const byId = (id) => document.getElementById(id);
const isNumber = (value) => value !== null && value !== undefined && !Number.isNaN(value);

// A number to read: three figures that count, with a true minus.
function number(value, signed = false) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (size === Infinity) text = "∞";
  else if (size === 0) text = "0";
  else if (size >= 1000) text = size.toLocaleString("en", { maximumFractionDigits: 0 });
  else if (size < 0.001) text = Number(size.toPrecision(3)).toExponential().replace("e-", "e−");
  else text = String(Number(size.toPrecision(3)));
  return (value < 0 ? "−" : signed && value > 0 ? "+" : "") + text;
}

// A probability to read.
function probability(value) {
  if (!isNumber(value)) return "–";
  const percent = 100 * value;
  if (percent < 0.01) return `${number(percent)} %`;
  return `${percent.toFixed(percent > 99.95 && percent < 100 ? 2 : percent >= 9.95 ? 1 : percent >= 0.0995 ? 2 : 3)} %`;
}

// Two probabilities that are not the same to read, with as many figures as tell them apart.
function probabilities(before, after) {
  let [from, to] = [probability(before), probability(after)];
  for (let digits = 2; from === to && before !== after && digits < 9; digits++) [from, to] = [before, after].map((value) => `${(100 * value).toFixed(digits)} %`);
  return from === to ? `${from}, as before` : `${from} → ${to}`;
}

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
