// Records as typed arrays. docs/inspect.md describes the format; a step is decoded when it is first looked at.

const ARRAY_TYPES = {
  ids: Int32Array, given: Int8Array, clip: Int8Array, top_before_ids: Int32Array, top_after_ids: Int32Array,
};
const NUM_ALTERNATIVES = 5;

// base64 of little-endian numbers -> typed array.
function unpack(name, text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new (ARRAY_TYPES[name] || Float32Array)(bytes.buffer);
}

// The packed tokens of a completion -> the same names with typed arrays, and what is derived from them.
function decodeTokens(packed) {
  const tokens = { columns: {} };
  for (const [name, value] of Object.entries(packed)) {
    if (name === "pieces") tokens.pieces = value;
    else if (name === "columns") {
      for (const [column, text] of Object.entries(value)) tokens.columns[column] = unpack("", text);
    } else tokens[name] = unpack(name, value);
  }
  tokens.length = tokens.ids.length;
  const arrays = Object.entries(tokens).filter(([name, value]) => ArrayBuffer.isView(value) && !name.startsWith("top_"));
  for (const [name, value] of [...arrays, ["pieces", tokens.pieces], ...Object.entries(tokens.columns)]) {
    if (value.length !== tokens.length) throw new Error(`${name} has ${value.length} values for ${tokens.length} tokens`);
  }
  tokens.drawn = [];
  for (let t = 0; t < tokens.length; t++) if (!tokens.given || !tokens.given[t]) tokens.drawn.push(t);
  tokens.before_logp = tokens.old_logp || tokens.update_logp || tokens.sampler_logp || null;
  return tokens;
}

// A line of a record -> a group.
function decodeGroup(row, index, step) {
  const completions = row.completions.map((completion) => ({ ...completion, tokens: decodeTokens(completion.tokens) }));
  const group = { ...row, completions, index, step };
  completions.forEach((completion, number) => Object.assign(completion, { group, number }));
  return group;
}

// The rows of a step, [head, group, group, ...] -> a step with its groups.
function decodeStep(rows) {
  const [head, ...groups] = rows;
  const step = { ...head, groups: [] };
  step.groups = groups.map((row, index) => decodeGroup(row, index, step));
  return step;
}
