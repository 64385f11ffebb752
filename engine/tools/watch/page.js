// The page of a run. Its data are in the page, or come from `metronome watch` (run_view.py describes them).
const EVERY_MS = 2000, IDLE_MS = 10000, DRAW_MS = 10000;  // curves and timeline cost most: both are drawn no more often than that
const run = { state: null, of: 0, count: 0, columns: {}, rest: null, seen: 0, timeline: null };
const last = name => { const found = run.columns[name]; return found ? found.findLast(value => value !== null) : undefined; };

repaint.push(() => {
  if (run.timeline) { key($("kinds"), run.timeline.kinds.map(kind => [kind.name, kindColor(kind.name, kind.color)])); redraw(); }
  if (run.rest) pool();
  colourKey();
});

// now -----------------------------------------------------------------------------------------------
function now() {
  const state = run.state, facts = [];
  document.title = `${state.name}: ${state.state}`;
  $("name").textContent = state.name;
  if ($("state").textContent !== state.state) $("state").textContent = state.state;
  $("state").className = "pill " + state.state;
  $("doing").hidden = !state.steps;
  if (state.share === null) $("share").removeAttribute("value"); else $("share").value = state.share;
  $("share").setAttribute("aria-label", `${state.done} of ${counted(state.steps, "step")}`);
  $("text").textContent = state.text;
  $("failure").hidden = !state.failure;
  $("failure").textContent = state.failure;
  const fact = (name, text) => { if (text !== "" && text !== undefined && text !== null) facts.push([name, String(text)]); };
  if (state.steps) fact("steps", `${state.done} of ${state.steps}`);
  if (state.left_s !== null) fact("time left", duration(state.left_s));
  if (last("step_s") !== undefined) fact("last step", duration(last("step_s")));
  if (last("reward_mean") !== undefined) fact("reward", `${number(run.columns.reward_mean[0])} → ${number(last("reward_mean"))}`);
  const evaluated = run.rest && run.rest.evaluations.at(-1);
  if (evaluated) fact(`${evaluated.partial_scores ? "reward" : "accuracy"} on ${evaluated.benchmark}`, `${number(evaluated.avg_at_k)} [${number(evaluated.ci_low)}, ${number(evaluated.ci_high)}]`);
  if (last("tokens_per_s_per_device") !== undefined) fact("tokens/s/device", number(last("tokens_per_s_per_device")));
  if (last("pool_size") !== undefined) fact("instances", last("pool_size"));
  fact("finished stages", state.stages.join(", "));
  if (state.resumes) fact("resumed", counted(state.resumes, "time"));
  for (const [name, text] of Object.entries(state.facts)) fact(name, text);
  fact("folder", state.folder);
  fact("to continue", state.resume);
  fact(embedded ? "drawn" : "as of", clock(state.at));
  const box = $("facts");
  box.replaceChildren();
  for (const [name, text] of facts) { const one = add(box, "div"); add(one, "dt", name); add(one, "dd", text); }
}

// warnings ------------------------------------------------------------------------------------------
const WARNINGS = ["warning", "rewards", "responses", "training"], SHOWN = 6;
let allNotices = false;
function notices() {
  const found = run.rest.notices.toReversed(), box = $("notices");
  box.replaceChildren();
  if (!found.length) add(box, "li", "none");
  for (const notice of allNotices ? found : found.slice(0, SHOWN)) {
    const line = add(box, "li", "", { class: WARNINGS.includes(notice.stage) ? "warn" : "" });
    if (notice.at) add(line, "time", clock(notice.at));
    add(line, "b", notice.stage);
    add(line, "span", notice.text);
  }
  $("more").hidden = found.length <= SHOWN;
  $("more").textContent = allNotices ? "show fewer" : `show all ${found.length}`;
}
$("more").onclick = () => { allNotices = !allNotices; notices(); };

// curves --------------------------------------------------------------------------------------------
const ofSteps = lines => () => {
  const there = lines.filter(([name]) => (run.columns[name] || []).some(value => value !== null));
  return there.length && run.columns.step ? { x: run.columns.step, lines: there.map(([column, name]) => ({ name, values: run.columns[column] })) } : null;
};
function accuracy() {
  const rows = run.rest ? run.rest.evaluations : [], names = [...new Set(rows.map(row => row.benchmark))];
  if (!rows.length) return null;
  const x = [...new Set(rows.map(row => row.weight_version))].toSorted((a, b) => a - b), place = new Map(x.map((version, at) => [version, at]));
  return { x, lines: names.map(name => {
    const line = { name: name || "benchmark", values: x.map(() => null), low: x.map(() => null), high: x.map(() => null) };
    for (const row of rows.filter(one => one.benchmark === name)) {
      const at = place.get(row.weight_version);
      [line.values[at], line.low[at], line.high[at]] = [row.avg_at_k, row.ci_low, row.ci_high];
    }
    return line;
  }) };
}
const EVALUATION = ["Evaluation", "accuracy, or mean of partial scores: avg@k with its 95 % interval, by weight version", accuracy, { each: true }];
for (const [title, hint, lines, options] of [CURVES[0], EVALUATION, ...CURVES.slice(1)]) new Chart($("charts"), title, hint, typeof lines === "function" ? lines : ofSteps(lines), options);
const other = document.createElement("select");
other.setAttribute("aria-label", "another figure of the steps");
const anyFigure = new Chart($("charts"), other, "any figure of steps.jsonl", () => other.value ? ofSteps([[other.value, other.value.replaceAll("_", " ")]])() : null, { smooth: true });
other.onchange = () => anyFigure.mark();
new Chart($("pool-chart"), "Instances", "that took prompts or weights when the step ended", ofSteps([["pool_size", "instances"]]), { zero: true });
function figures() {
  const names = Object.keys(run.columns).filter(name => name !== "step").toSorted();
  if (names.length === other.options.length) return;
  const chosen = other.value || "grad_norm";
  other.replaceChildren(...names.map(name => new Option(name.replaceAll("_", " "), name)));
  other.value = names.includes(chosen) ? chosen : names[0] ?? "";
}

// timeline ------------------------------------------------------------------------------------------
const canvas = $("main"), overview = $("overview"), tip = $("tip"), TOP = 18, GAP = 8, AXIS = 24;
let lanes = [], height = TOP, from = 0, to = 1, whole = Boolean(embedded), held = false, due = 0;
const left = () => narrow() ? 78 : 116;
function takeTimeline(found) {
  const zoomed = run.timeline && held;
  const moved = zoomed ? run.timeline.zero - found.zero : 0;
  run.timeline = found;
  lanes = [];
  height = TOP;
  for (const [name, rows] of found.lanes) {
    const h = Math.min(name.startsWith("instance-") ? 220 : 80, Math.max(26, rows * 6));
    lanes.push({ name, rows, y: height, h });
    height += h + GAP;
  }
  [from, to] = zoomed ? [from + moved, to + moved] : found.window;
  $("timeline").hidden = !found.lanes.length && !run.count;
  links();
  $("summary").textContent = found.summary;
  $("legend").replaceChildren();
  for (const [name, meaning] of found.legend) { const one = add($("legend"), "div"); add(one, "dt", name); add(one, "dd", meaning); }
  key($("kinds"), found.kinds.map(kind => [kind.name, kindColor(kind.name, kind.color)]));
  redraw();
}
function surface(element, h) {
  const ratio = devicePixelRatio || 1, width = element.clientWidth;
  element.style.height = h + "px";
  element.width = width * ratio;
  element.height = h * ratio;
  const g = element.getContext("2d");
  g.scale(ratio, ratio);
  g.font = "12px system-ui, sans-serif";
  g.textBaseline = "middle";
  return [g, width];
}
const box = span => { const lane = lanes[span[0]], h = lane.h / lane.rows; return [lane.y + span[1] * h, Math.max(1, h - (h > 4 ? 1 : 0))]; };
let queued = false;
function redraw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; if (run.timeline) drawTimeline(); });
}
function drawTimeline() {
  const data = run.timeline, [g, width] = surface(canvas, height + AXIS), edge = left(), scale = (width - edge) / (to - from || 1);
  const x = t => edge + (t - from) * scale, color = Object.fromEntries(data.kinds.map(kind => [kind.name, kindColor(kind.name, kind.color)]));
  const [panel, text, muted] = ["--panel", "--text", "--muted"].map(css);
  for (const lane of lanes) {
    g.fillStyle = panel;
    g.fillRect(edge, lane.y, width - edge, lane.h);
    g.fillStyle = text;
    g.fillText(lane.name, 0, lane.y + lane.h / 2, edge - 6);
  }
  g.save();
  g.beginPath(); g.rect(edge, 0, width - edge, height + AXIS); g.clip();
  for (const span of data.spans) {
    if (span[3] > to || span[3] + span[4] < from) continue;
    const [y, h] = box(span), w = span[4] * scale;
    g.fillStyle = color[span[2]];
    g.fillRect(x(span[3]), y, Math.max(0.6, w > 3 ? w - 0.5 : w), h);
  }
  g.strokeStyle = muted;
  g.setLineDash([4, 3]);
  let free = -Infinity;
  for (const [step, start, size] of data.steps) {
    if (start > to || start < from) continue;
    g.beginPath(); g.moveTo(x(start), 0); g.lineTo(x(start), height); g.stroke();
    const told = "step " + step + (size === null ? "" : ", pool of " + size);
    if (x(start) > free) { g.fillStyle = muted; g.fillText(told, x(start) + 4, 8); free = x(start) + g.measureText(told).width + 16; }
  }
  g.setLineDash([]);
  const rough = (to - from) / (width / 110), power = 10 ** Math.floor(Math.log10(rough)), tick = [1, 2, 5, 10].map(m => m * power).find(m => m >= rough);
  g.fillStyle = muted;
  for (let t = Math.ceil(from / tick) * tick; t < to; t += tick) { g.fillRect(x(t), height, 1, 5); g.fillText(+t.toFixed(4) + " s", x(t) + 3, height + 13); }
  g.restore();
  strip(data, color, panel, text, edge);
}
function strip(data, color, panel, text, edge) {
  const [g, width] = surface(overview, 36), scale = (width - edge) / (data.end || 1), h = 36 / Math.max(1, lanes.length);
  g.fillStyle = text; g.fillText(whole ? "whole run" : "last steps", 0, 18, edge - 6);
  g.fillStyle = panel; g.fillRect(edge, 0, width - edge, 36);
  for (const span of data.spans) { g.fillStyle = color[span[2]]; g.fillRect(edge + span[3] * scale, span[0] * h, Math.max(0.3, span[4] * scale), Math.max(0.5, h - 1)); }
  g.strokeStyle = text; g.lineWidth = 2;
  g.strokeRect(edge + from * scale, 1, Math.max(3, (to - from) * scale), 34);
}
function show(a, b) {
  if (!run.timeline) return;
  const end = run.timeline.end, length = Math.min(Math.max(b - a, 0.002), end * 1.02);
  from = Math.max(-0.01 * end, Math.min(a, end * 1.01 - length));
  to = from + length;
  held = true;
  buttons();
  redraw();
}
const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, at + (to - at) * factor);
const pan = share => show(from + share * (to - from), to + share * (to - from));
const time = event => from + (event.offsetX - left()) / (canvas.clientWidth - left()) * (to - from);
const hitBar = event => {
  const t = time(event);
  return run.timeline && run.timeline.spans.findLast(span => { const [y, h] = box(span); return t >= span[3] && t <= span[3] + span[4] && event.offsetY >= y && event.offsetY <= y + h; });
};
const barText = hit => [`${hit[2]} on ${lanes[hit[0]].name}`, hit[5] === null ? "" : `step ${hit[5]}`, hit[6] === null ? "" : `group ${hit[6]}`, `${(hit[4] * 1000).toFixed(1)} ms, from ${hit[3].toFixed(3)} s`].filter(Boolean);
canvas.addEventListener("wheel", event => { if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(Math.exp(event.deltaY * 0.002), time(event)); } }, { passive: false });
canvas.addEventListener("pointermove", event => {
  if (event.buttons & 1) { const moved = -event.movementX / (canvas.clientWidth - left()) * (to - from); return show(from + moved, to + moved); }
  const hit = hitBar(event);
  tip.hidden = !hit;
  if (!hit) return;
  tip.textContent = barText(hit).join("\n");
  tip.style.left = Math.max(0, Math.min(event.clientX + 12, innerWidth - 260)) + "px";
  tip.style.top = event.clientY + 12 + "px";
});
canvas.addEventListener("pointerdown", event => canvas.setPointerCapture(event.pointerId));
canvas.addEventListener("click", event => { const hit = hitBar(event); $("bar-text").textContent = hit ? barText(hit).join(", ") : ""; });
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
canvas.addEventListener("keydown", event => {
  const act = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), Home: () => show(0, to - from), End: () => show(run.timeline.end - (to - from), run.timeline.end) }[event.key];
  if (act && run.timeline) { event.preventDefault(); event.stopPropagation(); act(); }
});
for (const name of ["pointerdown", "pointermove"]) overview.addEventListener(name, event => {
  if (!(event.buttons & 1) || !run.timeline) return;
  const t = (event.offsetX - left()) / (overview.clientWidth - left()) * run.timeline.end, half = (to - from) / 2;
  show(t - half, t + half);
});
function buttons() {
  const tools = $("tools");
  if (!tools.childElementCount) for (const [text, label, act] of [
    ["all", "show all that is loaded", () => show(0, run.timeline.end)], ["+", "zoom in", () => zoom(0.5)], ["−", "zoom out", () => zoom(2)],
    ["◀", "earlier", () => pan(-0.33)], ["▶", "later", () => pan(0.33)],
    ...(embedded ? [["three steps", "show three steps", () => show(...run.timeline.window)]] : [["follow", "follow the last steps", () => load(false)], ["load the whole run", "", () => load(true)]]),
  ]) add(tools, "button", text, label ? { "aria-label": label } : {}).onclick = () => run.timeline && act();
  if (!embedded) tools.children[5].setAttribute("aria-pressed", String(!held && !whole));
}
async function load(all) {
  const found = await ask("timeline?whole=" + Number(all));
  if (!found) return;
  whole = all;
  held = false;
  takeTimeline(found);
  held = all;
  buttons();
}

// pool ----------------------------------------------------------------------------------------------
function pool() {
  const { colors, instances } = run.rest.pool, all = Object.values(instances).flat(), table = $("instances");
  table.replaceChildren();
  $("pool").hidden = !all.length && !(run.columns.pool_size || []).length;
  if (!all.length) return;
  const first = Math.min(...all.map(one => one[1])), end = Math.max(...all.map(one => one[2])), head = add(table, "tr");
  for (const name of ["instance", "state", "since", "history"]) add(head, "th", name);
  for (const [name, states] of Object.entries(instances)) {
    const row = add(table, "tr"), [state, since] = states.at(-1), cell = document.createElement("td");
    add(row, "td", name);
    add(row, "td", states.at(-1)[2] < end - 60 ? "gone" : state);
    add(row, "td", clock(since));
    row.append(cell);
    const bar = add(cell, "div", "", { class: "strip", role: "img", "aria-label": states.slice(-8).map(one => `${one[0]} for ${duration(one[2] - one[1])}`).join(", ") });
    let at = first;
    for (const [kind, start, stop] of [...states, ["", end, end]]) {
      if (start > at) add(bar, "i", "", { style: `flex:${start - at} 0 0` });
      if (kind) add(bar, "i", "", { style: `flex:${stop - start} 0 0;background:${kindColor(kind, colors[kind])}`, title: `${kind}: ${duration(stop - start)} from ${clock(start)}` });
      at = Math.max(at, stop);
    }
  }
}

// conversations -------------------------------------------------------------------------------------
const LEVELS = 6, VERSIONS = SERIES.slice(0, 6);
const surprise = logprob => Math.min(LEVELS, Math.floor(-logprob * 1.5));
const surpriseColor = level => level ? `rgba(226, 105, 40, ${(0.1 + 0.75 * level / LEVELS).toFixed(2)})` : "";
const runValue = (runs, at) => runs.findLast(([first]) => first <= at)?.[1];
let asked = null, rowsShown = [];
function colourKey() {
  const kind = $("colour").value;
  key($("colour-key"), kind === "logprob" ? [...Array(LEVELS + 1).keys()].map(level => [level === 0 ? "expected (p above 51 %)" : level === LEVELS ? "surprising (p below 2 %)" : "", surpriseColor(level) || "var(--panel)"])
    : kind === "trained" ? [["trained", "rgba(89, 161, 79, .3)"], ["not trained (environment)", "rgba(128, 128, 128, .35)"]]
    : kind === "version" ? [...new Set(rowsShown.flatMap(row => row.tokens ? row.tokens.versions.map(one => one[1]) : []))].map(version => ["version " + version, VERSIONS[version % VERSIONS.length] + "66"]) : []);
}
function tokenColor(tokens, at, kind) {
  if (kind === "logprob") return runValue(tokens.trained, at) ? surpriseColor(surprise(tokens.logprobs[at])) : "";
  if (kind === "trained") return runValue(tokens.trained, at) ? "rgba(89, 161, 79, .3)" : "rgba(128, 128, 128, .35)";
  const version = runValue(tokens.versions, at);
  return version === undefined ? "" : VERSIONS[version % VERSIONS.length] + "66";
}
function steps() {
  const list = run.rest.sampled, box = $("step"), follows = box.selectedIndex < 0 || box.selectedIndex === box.options.length - 1;
  $("conversations").hidden = !list.length;
  if (!list.length) return;
  const chosen = follows ? list.at(-1) : box.value;
  if (box.options.length !== list.length || box.options[box.options.length - 1].value !== list.at(-1)) box.replaceChildren(...list.map(step => new Option(step, step)));
  const step = list.includes(chosen) ? chosen : list.at(-1);
  box.value = step;
  const open = document.querySelector("#groups details[data-touched]") || document.querySelector("#groups .tokens:focus");
  if (step !== asked && !(follows && asked !== null && open)) conversation();  // what is being read stays
}
async function conversation() {
  const step = $("step").value;
  asked = step;
  const rows = embedded ? embedded.samples[step] : await ask("samples?of=" + encodeURIComponent(step));
  if (!rows || asked !== step) return;
  rowsShown = rows;
  const box = $("groups"), groups = new Map();
  for (const row of rows) groups.set(row.prompt_id, [...(groups.get(row.prompt_id) || []), row]);
  box.replaceChildren();
  if (!rows.length) add(box, "p", "The conversations of this step were deleted.");
  [...groups.values()].forEach((found, place) => group(box, found, place, groups.size));
  $("earlier").disabled = $("step").selectedIndex <= 0;
  $("later").disabled = $("step").selectedIndex === $("step").options.length - 1;
  colourKey();
}
const named = metric => metric.startsWith("episode/") ? metric.slice(8).replace(/_s$/, " seconds").replaceAll("_", " ") : metric;
const turnLine = turn => [turn.role, counted(turn.tokens, "token"), turn.trained ? "trained" : "not trained", turn.versions?.length ? "weight version " + turn.versions.join(", ") : ""].filter(Boolean).join(" · ");
function group(parent, rows, place, of) {
  const card = add(parent, "div", "", { class: "group" });
  add(card, "h3", `Prompt ${place + 1} of ${of}`);
  add(card, "pre", rows[0].problem, { tabindex: "0" });
  if (rows[0].answer) add(card, "p", "Gold answer: " + rows[0].answer, { class: "details" });
  rows.forEach((row, at) => {
    const box = add(card, "details", "", { class: "response" }), head = add(box, "summary"), least = Math.min(...rows.map(one => one.score)), most = Math.max(...rows.map(one => one.score));
    add(head, "b", "score " + number(row.score), { class: most > least ? (row.score === most ? "good" : row.score === least ? "wrong" : "") : "" });
    const further = Object.entries(row).filter(([name]) => name.startsWith("reward/")).map(([name, value]) => `${named(name.slice(7))} ${number(value)}`);
    head.append(" · " + [row.advantage === undefined ? "" : `advantage ${row.advantage > 0 ? "+" : ""}${number(row.advantage)}`, row.tokens ? counted(row.tokens.count, "token") : "", row.finish_reason === "length" ? "cut by the limit" : "", row.status === "ok" ? "" : row.status, row.detail || "", ...further].filter(Boolean).join(" · "));
    box.addEventListener("toggle", () => { if (box.open && !box.dataset.full) fill(box, row); });
    head.addEventListener("click", () => { box.dataset.touched = "1"; });
    box.open = place === 0 && at === 0;
  });
}
function fill(box, row) {
  box.dataset.full = "1";
  box.querySelectorAll(":scope > :not(summary)").forEach(one => one.remove());
  const kind = $("colour").value, tokens = row.tokens;
  if (!kind || !tokens) {
    for (const turn of row.turns || [{ role: "model", text: row.response }]) {
      if (row.turns) add(box, "p", turnLine(turn), { class: "hint" });
      add(box, "div", turn.text, { class: "turn " + turn.role });
    }
    if (kind && !tokens) add(box, "p", "No tokens were kept of this response.", { class: "hint" });
    return;
  }
  const text = add(box, "div", "", { class: "tokens", tabindex: "0", "aria-label": row.response }), told = add(box, "p", "", { class: "details", role: "status" });
  const pieces = [], begins = new Map();
  (row.turns || []).reduce((at, turn) => { if (turn.tokens) begins.set(at, turn); return at + turn.tokens; }, 0);
  tokens.texts.forEach((one, at) => {
    if (begins.has(at)) add(text, "p", turnLine(begins.get(at)), { class: "hint" });
    const piece = add(text, "span", one, { "data-at": at }), color = tokenColor(tokens, at, kind);
    if (color) piece.style.background = color;
    pieces.push(piece);
  });
  if (tokens.count > tokens.texts.length) add(box, "p", `These are the first ${number(tokens.texts.length)} of ${number(tokens.count)} tokens; without colours the text is whole.`, { class: "hint" });
  let chosen = null;
  const choose = at => {
    if (!(at >= 0 && at < tokens.texts.length)) return;
    chosen?.classList.remove("chosen");
    chosen = pieces[at];
    chosen.classList.add("chosen");
    const version = runValue(tokens.versions, at), trained = runValue(tokens.trained, at);
    told.textContent = `token ${at}: ${JSON.stringify(tokens.texts[at])}` + (trained ? `, log-probability ${number(tokens.logprobs[at])} (p = ${number(Math.exp(tokens.logprobs[at]))})` : "") + `, ${trained ? "trained" : "not trained"}` + (version === undefined ? "" : `, weight version ${version}`);
  };
  text.addEventListener("click", event => { if (event.target.dataset.at) choose(Number(event.target.dataset.at)); });
  text.addEventListener("mouseover", event => { if (event.target.dataset.at) choose(Number(event.target.dataset.at)); });
  text.addEventListener("keydown", event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { event.preventDefault(); event.stopPropagation(); choose(chosen ? Number(chosen.dataset.at) + move : 0); }
  });
}
const go = by => { const box = $("step"), at = box.selectedIndex + by; if (at >= 0 && at < box.options.length) { box.selectedIndex = at; conversation(); } };
$("step").onchange = conversation;
$("earlier").onclick = () => go(-1);
$("later").onclick = () => go(1);
$("colour").onchange = () => { colourKey(); let at = 0; for (const box of document.querySelectorAll("details.response")) { const row = groupedRows()[at++]; delete box.dataset.full; if (box.open) fill(box, row); } };
const groupedRows = () => { const groups = new Map(); for (const row of rowsShown) groups.set(row.prompt_id, [...(groups.get(row.prompt_id) || []), row]); return [...groups.values()].flat(); };

// the parts, and their keys -------------------------------------------------------------------------
const links = () => { for (const link of $("nav").children) link.hidden = $(link.hash.slice(1)).hidden; };
const PARTS = ["now", "warnings", "curves", "timeline", "pool", "conversations"];
PARTS.forEach((name, place) => { const title = $(name).querySelector("h2").textContent; add($("nav"), "a", title, { href: "#" + name, title: `key ${place + 1}` }); });
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || ["SELECT", "INPUT"].includes(event.target.tagName)) return;
  const name = PARTS[Number(event.key) - 1];
  if (name && !$(name).hidden) { $(name).scrollIntoView(); $(name).focus({ preventScroll: true }); }
  const inside = document.activeElement && document.activeElement.closest("#conversations");
  if (inside && event.key === "ArrowLeft") go(-1);
  if (inside && event.key === "ArrowRight") go(1);
});
addEventListener("resize", redraw);

// the data ------------------------------------------------------------------------------------------
let behind = false, drawn = -Infinity;
function take(found) {
  run.state = found.state;
  const { of, first, columns } = found.steps, news = first === 0 || Object.keys(columns).length;
  if (first === 0) { run.columns = {}; run.count = 0; }
  const more = Math.max(0, ...Object.values(columns).map(values => values.length));
  for (const name of new Set([...Object.keys(run.columns), ...Object.keys(columns)])) {
    const own = run.columns[name] ??= Array(run.count).fill(null);
    for (const value of columns[name] || Array(more).fill(null)) own.push(value);
  }
  run.of = of;
  run.count += more;
  if (found.rest) { run.rest = found.rest; run.seen = found.seen; notices(); pool(); steps(); }
  now();
  behind ||= Boolean(news || found.rest);
  if (behind && (!run.state.going || performance.now() - drawn >= DRAW_MS)) {
    behind = false;
    drawn = performance.now();
    figures();
    for (const chart of charts) chart.mark();
  }
  $("curves").hidden = !run.count && !run.rest.evaluations.length;
  links();
  return news;
}
const problem = text => { $("problem").hidden = !text; if ($("problem").textContent !== text) $("problem").textContent = text; };
async function ask(route) {
  let found = null;
  try {
    const reply = await fetch(route, { cache: "no-store", signal: AbortSignal.timeout(60000) });
    if (!reply.ok) return problem(`metronome watch answers ${reply.status}: ${await reply.text()}`);
    found = await reply.json();
  } catch (error) {
    return problem(`metronome watch does not answer (${error.message}): what you see is as of ${run.state ? clock(run.state.at) : "never"}. Start it again to go on.`);
  }
  problem(found.problem || "");
  return found.problem ? null : found;
}
let stale = true;
async function follow() {
  if (!document.hidden) {
    const found = await ask(`data?after=${run.count}&of=${run.of}&seen=${run.seen}`);
    const news = found && take(found);
    stale ||= Boolean(news) || !run.timeline;
    if (stale && found && !whole && !held && performance.now() >= due) {
      due = performance.now() + DRAW_MS;
      const spans = await ask("timeline?whole=0");
      if (spans && !whole && !held) { stale = false; takeTimeline(spans); }
    }
  }
  setTimeout(follow, run.state && !run.state.going ? IDLE_MS : EVERY_MS);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) redraw(); });
startTheme();
buttons();
if (embedded) {
  take(embedded);
  takeTimeline(embedded.timeline);
} else {
  follow();
}
