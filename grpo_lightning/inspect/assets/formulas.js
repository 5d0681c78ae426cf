// The objective of one token as a function of its log π_θ: grpo_lightning/maths in JavaScript.
//
// A token here is {advantage, old, ref, entropy, columns, changes, index}: old and ref are log-probs; columns has a
// number per name; changes are log(π_θ/π_old) of the completion's drawn tokens in the last update, and index is the
// token's own among them. Sequence-level surrogates vary this token while the others stay.
// A setting that is null is infinite.

const MAX_LOG_RATIO = 20;

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const logRatio = (logp, other) => clamp(logp - other, -MAX_LOG_RATIO, MAX_LOG_RATIO);
const orInfinite = (setting) => (setting === null || setting === undefined ? Infinity : setting);

// PPO's smaller of ratio * Â and clipped ratio * Â.
function clipped(ratio, advantage, settings) {
  const bounded = clamp(ratio, settings.low, orInfinite(settings.high));
  return Math.min(ratio * advantage, bounded * advantage);
}

// The mean over the completion of f(log ratio), this token's at logp.
function sequenceMean(token, logp, f = (change) => change) {
  let sum = f(logRatio(logp, token.old));
  token.changes.forEach((change, index) => { if (index !== token.index) sum += f(change); });
  return sum / token.changes.length;
}

const sequenceClipped = (settings, token, logp) =>
  clipped(Math.exp(sequenceMean(token, logp)), token.advantage, settings);

const SURROGATES = {
  Reinforce: (settings, token, logp) => token.advantage * logp,
  Clipped(settings, token, logp) {
    const value = clipped(Math.exp(logRatio(logp, token.old)), token.advantage, settings);
    const dual = orInfinite(settings.dual_clip);
    return dual < Infinity && token.advantage < 0 ? Math.max(value, dual * token.advantage) : value;
  },
  CISPO(settings, token, logp) {
    const factor = clamp(Math.exp(logRatio(logp, token.old)), settings.low, orInfinite(settings.high));
    return factor * token.advantage * logp;
  },
  SAPO(settings, token, logp) {
    const tau = token.advantage > 0 ? settings.tau_good : settings.tau_bad;
    return (token.advantage * 4) / tau / (1 + Math.exp(-tau * (Math.exp(logRatio(logp, token.old)) - 1)));
  },
  TargetProbability(settings, token, logp) {
    const { logp_high: upper, logp_low: lower } = token.columns;
    return token.advantage * (logp >= upper ? upper : logp <= lower ? lower : logp);
  },
  SequenceClipped: sequenceClipped,
  SequenceClippedToken: sequenceClipped,
  GMPO(settings, token, logp) {
    const bound = settings.log_clip;
    const bounded = token.advantage > 0 ? (x) => Math.min(x, bound) : (x) => Math.max(x, -bound);
    return Math.exp(sequenceMean(token, logp, bounded)) * token.advantage;
  },
  OffPolicyMask(settings, token, logp) {
    const masked = -sequenceMean(token, logp) > settings.threshold && token.advantage < 0;
    return masked ? 0 : surrogateAt(settings.surrogate, token, logp);
  },
};

const KLS = {
  K1: (settings, logp, ref) => logp - ref,
  K2: (settings, logp, ref) => logRatio(logp, ref) ** 2 / 2,
  K3(settings, logp, ref) {
    const difference = Math.min(ref - logp, MAX_LOG_RATIO);
    return Math.expm1(difference) - difference;
  },
  ImportanceWeighted: (settings, logp, ref, old) => Math.exp(logRatio(logp, old)) * klAt(settings.kl, logp, ref, old),
};

function surrogateAt(settings, token, logp) {
  return SURROGATES[settings.class](settings, token, logp);
}

function klAt(settings, logp, ref, old) {
  return KLS[settings.class](settings, logp, ref, old);
}

// Whether there is a formula here for every part of the objective that is in force.
function isKnown(objective) {
  const knows = (family, settings, inner) =>
    Boolean(settings) && Object.hasOwn(family, settings.class) && (!settings[inner] || knows(family, settings[inner], inner));
  return knows(SURROGATES, objective.surrogate, "surrogate") && (!objective.beta || knows(KLS, objective.kl, "kl"));
}

// The objective of a token at logp, before its weight, and its parts.
function objectiveAt(objective, token, logp) {
  const surrogate = surrogateAt(objective.surrogate, token, logp);
  const hasRef = token.ref !== null && !Number.isNaN(token.ref) && objective.kl && Object.hasOwn(KLS, objective.kl.class);
  const kl = hasRef ? klAt(objective.kl, logp, token.ref, token.old) : 0;
  const bonus = objective.entropy_bonus ? objective.entropy_bonus * token.entropy : 0;
  return { surrogate, kl, total: surrogate - (objective.beta ? objective.beta * kl : 0) + bonus };
}

// Where the objective has a corner or a target: [{logp, name}], also beyond probability 1.
function cornersOf(settings, token) {
  const at = (change, name) => ({ logp: token.old + change, name });
  const good = token.advantage > 0;
  if (!token.advantage) return [];
  const ratioCorners = (scale, offset, both) => {
    const found = [];
    const [low, high] = [settings.low, orInfinite(settings.high)];
    if ((both || good) && high < Infinity) found.push(at(scale * Math.log(high) - offset, "upper bound"));
    if ((both || !good) && low > 0) found.push(at(scale * Math.log(low) - offset, "lower bound"));
    return found;
  };
  const others = () => sequenceMean(token, token.old) * token.changes.length;
  switch (settings.class) {
    case "Clipped": {
      const dual = orInfinite(settings.dual_clip);
      return [...ratioCorners(1, 0), ...(!good && dual < Infinity ? [at(Math.log(dual), "dual clip")] : [])];
    }
    case "CISPO": return ratioCorners(1, 0, true);
    case "SequenceClipped": case "SequenceClippedToken": return ratioCorners(token.changes.length, others());
    case "GMPO": return [at(good ? settings.log_clip : -settings.log_clip, good ? "upper bound" : "lower bound")];
    case "TargetProbability": {
      const { logp_high: upper, logp_low: lower } = token.columns;
      return [upper, lower].filter(Number.isFinite).map((logp) => ({ logp, name: "target" }));
    }
    case "OffPolicyMask": {
      const inner = cornersOf(settings.surrogate, token);
      if (good) return inner;
      const mask = at(-token.changes.length * settings.threshold - others(), "mask");
      return [mask, ...inner.filter(({ logp }) => logp > mask.logp)];
    }
    default: return [];
  }
}

// Token t of a completion as the formulas take it; null for a given token, or one without a forward of an update.
function tokenOf(tokens, t) {
  if (!tokens.update_logp || !tokens.advantage || Number.isNaN(tokens.update_logp[t])) return null;
  const old = tokens.old_logp || tokens.update_logp;
  if (!tokens.changes) {
    tokens.changes = tokens.drawn.map((index) => logRatio(tokens.update_logp[index], old[index]));
  }
  const columns = Object.fromEntries(Object.entries(tokens.columns).map(([name, values]) => [name, values[t]]));
  return {
    advantage: tokens.advantage[t], old: old[t], ref: tokens.ref_logp ? tokens.ref_logp[t] : null,
    entropy: tokens.entropy_update ? tokens.entropy_update[t] : 0,
    columns, changes: tokens.changes, index: tokens.drawn.indexOf(t),
  };
}
