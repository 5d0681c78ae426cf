// Colours: signed orange to blue, which every kind of colour vision tells apart, or violet for sizes.

let palette = null;

// The theme's colours, read from the style sheet.
function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(name).match(/[0-9a-f]{2}/gi).map((digits) => parseInt(digits, 16));
  palette = { low: rgb("--low"), high: rgb("--high"), size: rgb("--size"), paper: rgb("--panel") };
}

const mix = (from, to, fraction) => `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * fraction)).join(" ")})`;

const quantile = (sorted, fraction) => (sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(fraction * sorted.length))] : NaN);

// The next number above that is 1, 2 or 5 times a power of ten.
function round125(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((times) => times * power >= value * 0.999) * power;
}

// A scale for a quantity, wide enough for 98 % of the values: {kind, limit, colour(value)}.
function scaleOf(quantity, values) {
  const sizes = values.filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  const signed = quantity.kind === "signed" || values.some((value) => value < 0);
  const limit = quantity.limit || round125(quantile(sizes, 0.98));
  const colour = (value) => {
    if (!isNumber(value) || quantity.kind === "none") return "";
    const size = Math.min(Math.abs(value) / limit, 1);
    const fraction = (quantity.kind === "rarity" ? 1 - size : size) ** 0.75;
    return fraction < 0.02 ? "" : mix(palette.paper, signed ? (value < 0 ? palette.low : palette.high) : palette.size, fraction);
  };
  return { signed, limit, colour };
}
