// Records as typed arrays. docs/reference/records.md describes the format; a step is decoded when it is first looked at.

const ARRAY_TYPES = {
  ids: Int32Array, context: Int8Array, clip: Int8Array, top_before_ids: Int32Array, top_after_ids: Int32Array,
};
const NUM_ALTERNATIVES = 5;

// The number of a float16, from its bits.
function halfNumber(bits) {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

// base64 of little-endian numbers -> typed array.
function unpack(name, text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  if (name.startsWith("curve")) return Float32Array.from(new Uint16Array(bytes.buffer), halfNumber);
  return new (ARRAY_TYPES[name] || Float32Array)(bytes.buffer);
}

// Gives an object a property that is unpacked when it is first read: most arrays of a step are never looked at.
function unpackLater(object, name, text, key = name) {
  const get = () => {
    const value = unpack(key, text);
    Object.defineProperty(object, name, { value, enumerable: true, writable: true });
    return value;
  };
  Object.defineProperty(object, name, { get, enumerable: true, configurable: true });
}

// The tokens of a completion as they are recorded -> the same names with typed arrays, and what is derived from them.
function decodeTokens(record, kind) {
  const tokens = { pieces: record.pieces, columns: {}, length: record.pieces.length };
  for (const [name, value] of Object.entries(record)) {
    if (name === "columns") Object.entries(value).forEach(([column, text]) => unpackLater(tokens.columns, column, text, ""));
    else if (name !== "pieces") unpackLater(tokens, name, value);
  }
  if (tokens.ids.length !== tokens.length) throw new Error(`${tokens.length} pieces for ${tokens.ids.length} tokens`);
  tokens.sampled = [];
  for (let t = 0; t < tokens.length; t++) if (!tokens.context || !tokens.context[t]) tokens.sampled.push(t);
  // Answers that are not learned from have no numbers before the updates: when they were sampled, the updates had been made.
  const before = kind === "validation" ? null : ["old_logp", "update_logp", "sampler_logp"].find((name) => name in record);
  if (before) unpackLater(tokens, "before_logp", record[before], before);
  return tokens;
}

// The role of the policy's turns.
const POLICY = "assistant";

// Counts conversations: a completion that begins one has the next number, its branches have the same.
function countTurns(completions) {
  let [sample, turns] = [-1, 0];
  for (const completion of completions) {
    const { conversation } = completion;
    if (!conversation || !conversation.piece) [sample, turns] = [sample + 1, 0];
    Object.assign(completion, { sample, turnsBefore: turns });
    if (conversation) turns += conversation.turns.filter(({ role }) => role === POLICY).length;
  }
}

// A line of a record -> a group.
function decodeGroup(row, index, step) {
  const completions = row.completions.map((completion) => ({ ...completion, tokens: decodeTokens(completion.tokens, row.kind) }));
  const group = { ...row, completions, index, step };
  completions.forEach((completion, number) => Object.assign(completion, { group, number }));
  countTurns(completions);
  return group;
}

// The rows of a step, [head, group, group, ...] -> a step with its groups.
function decodeStep([head, ...groups]) {
  const step = { ...head, groups: [] };
  step.groups = groups.map((row, index) => decodeGroup(row, index, step));
  return step;
}
