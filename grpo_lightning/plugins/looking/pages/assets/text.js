// Text that a model wrote, as nodes: white space visible but quiet, and what cannot be seen or turns text around named.

const HIDDEN = [
  [0x00, 0x08], [0x0b, 0x1f], [0x7f, 0x9f], [0xad, 0xad], [0x61c, 0x61c], [0x180e, 0x180e], [0x200b, 0x200c],
  [0x200e, 0x200f], [0x2028, 0x202e], [0x2060, 0x206f], [0xd800, 0xdfff], [0xfeff, 0xfeff], [0xfff9, 0xfffb],
  [0xe0000, 0xe007f],
];
const SPACES = { " ": "space", "\n": "newline", "\t": "tab" };

const nameOf = (code) => (code < 0x20 ? String.fromCodePoint(0x2400 + code) : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`);

// Whether a line should not break within a text: a few signs and letters, such as `<|/answer>`.
const isMark = (text) => text.length > 1 && text.length <= 24 && /[^\p{L}\p{N}]/u.test(text);

// Nodes for a piece of text; with `spaces`, white space is marked too.
function shown(text, spaces = true) {
  const nodes = [];
  let plain = "";
  const flush = () => { if (plain) nodes.push(isMark(plain) && spaces ? h("span", { class: "whole" }, plain) : document.createTextNode(plain)); plain = ""; };
  for (const character of text) {
    const code = character.codePointAt(0);
    if (HIDDEN.some(([first, last]) => first <= code && code <= last)) {
      flush();
      nodes.push(h("span", { class: "control" }, nameOf(code)));
    } else if (spaces && character in SPACES) {
      flush();
      nodes.push(h("span", { class: SPACES[character] }, character));
    } else plain += character;
  }
  flush();
  return nodes.length ? nodes : [h("span", { class: "nothing" })];
}

// One line of text for a list, cut short.
function oneLine(text, length = 160) {
  const cut = [...text.slice(0, 2 * length)].slice(0, length).join("");
  return shown(cut.replace(/\s+/g, " ") + (cut.length < text.length ? "…" : ""), false);
}
