// The bar at the top: run, step, objective, views.

// A part of the objective in a few words: `Clipped 0.8 to 1.2`.
function nameOfPart(part) {
  if (!part) return "";
  const settings = Object.entries(part).filter(([name, value]) => name !== "class" && typeof value === "number" && name !== "reads_old_logp");
  const bounds = "low" in part ? `${number(part.low)} to ${part.high === null ? "∞" : number(part.high)}` : "";
  const numbers = settings.filter(([name]) => !["low", "high"].includes(name)).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const inner = part.surrogate || part.kl;
  return [part.class, inner && `of ${nameOfPart(inner)}`, bounds, numbers].filter(Boolean).join(" ");
}

function nameOfObjective(objective) {
  const parts = [nameOfPart(objective.surrogate)];
  if (objective.beta) parts.push(`β ${number(objective.beta)} ${nameOfPart(objective.kl)}`);
  if (objective.entropy_bonus) parts.push(`entropy bonus ${number(objective.entropy_bonus)}`);
  if (objective.weighting) parts.push(objective.weighting.class);
  return parts.join(" · ");
}

function drawBar() {
  const { steps, name } = page.runs[0];
  const info = stepInfo();
  const step = currentStep();
  const go = (by, sign, title) => h("button", { type: "button", title, "aria-label": title, disabled: !info || neighbour(steps, info, by) === info, onclick: () => moveStep(by) }, sign);
  const views = [["tokens", "Tokens"], ["follow", "Follow"], ...(page.runs[1] ? [["compare", "Compare"]] : [])];
  byId("bar").replaceChildren(
    h("b", { class: "run" }, name),
    h("span", { class: "stepper" }, go(-1, "‹", "step before (←)"), h("span", { title: info && `exploration step ${info.step}: x is ${info.step - 1} in TensorBoard` }, info ? [`step `, h("b", {}, String(info.step))] : "no step"), go(1, "›", "step after (→)"), info && !info.step && h("span", { class: "fact" }, "before the first update")),
    h("span", { class: "objective fact", title: step && step.objective && `the objective: ${nameOfObjective(step.objective)}` }, step && step.objective ? nameOfObjective(step.objective) : ""),
    h("span", { class: "segmented views", role: "toolbar", "aria-label": "View" }, views.map(([id, label]) => h("button", { type: "button", "data-view": id, "aria-pressed": String(state.view === id), onclick: () => openView(id) }, label))),
    h("button", { type: "button", class: "icon", title: "dark, light (d)", "aria-label": "dark or light", onclick: toggleTheme }, "◐"),
    h("button", { type: "button", class: "icon", title: "keys (?)", "aria-label": "keys", onclick: showHelp }, "?"));
}

function toggleTheme() {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--is-dark").trim() === "1";
  change({ theme: dark ? "light" : "dark" });
}
