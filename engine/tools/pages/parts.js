"use strict";
// What the pages share: elements, numbers, colours, curves. The page's own script follows. Its data are in the page, or
// null. Everything that a run wrote becomes text by textContent: nothing here makes HTML of it.
const embedded = JSON.parse(document.getElementById("data").textContent);
const $ = name => document.getElementById(name);
const add = (parent, tag, text = "", attributes = {}) => {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
};
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const narrow = () => innerWidth < 620;

// numbers -------------------------------------------------------------------------------------------
const number = value => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return Number.isInteger(value) ? String(value) : size < 0.001 ? value.toExponential(1) : value.toFixed(size < 10 ? 3 : 1);
};
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const duration = seconds => {
  if (seconds < 60) return +seconds.toFixed(1) + " s";
  const whole = Math.round(seconds), two = part => String(part).padStart(2, "0"), hours = Math.floor(whole / 3600);
  return (hours ? hours + ":" + two(Math.floor(whole / 60) % 60) : Math.floor(whole / 60)) + ":" + two(whole % 60);
};
const clock = at => new Date(at * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });
const tickText = value => Math.abs(value) >= 10000 ? +(value / 1000).toPrecision(4) + "k" : String(+value.toPrecision(5));

// colours -------------------------------------------------------------------------------------------
const system = matchMedia("(prefers-color-scheme: dark)");
const stored = name => { try { return localStorage.getItem(name); } catch { return null; } };  // none in a sandbox
const isDark = () => document.documentElement.dataset.theme === "dark";
const DARK = { wait: "#4b535a", bubble: "#6b645f", out: "#a39a90", train: "#6bbf5f", rollout: "#6d9bd1" };
const SERIES = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#79706e"];
const SERIES_DARK = ["#79b0ec", "#f6ab5f", "#86cf7c", "#d0a3c4", "#f08a8b", "#98d3cf", "#c9a48f", "#b5aca9"];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];  // for readers who cannot distinguish the colours, and for overlapping curves
const series = place => (isDark() ? SERIES_DARK : SERIES)[place % SERIES.length];
const kindColor = (name, color) => (isDark() && DARK[name]) || color || css("--text");
const repaint = [];  // what a page does when its colours have changed
function theme() {
  const chosen = $("theme").value;
  document.documentElement.dataset.theme = chosen || (system.matches ? "dark" : "light");
  try { localStorage.setItem("metronome-theme", chosen); } catch { /* a sandbox keeps nothing */ }
  for (const chart of charts) chart.rebuild();
  for (const paint of repaint) paint();
}
function startTheme() {
  $("theme").value = stored("metronome-theme") || "";
  $("theme").onchange = theme;
  system.addEventListener("change", theme);
  theme();
}
const key = (box, entries) => {
  box.replaceChildren();
  for (const [name, color] of entries) add(add(box, "span"), "i", "", { style: "background:" + color }).after(name);
};

function table(parent, columns, rows) {
  const element = add(parent, "table"), head = add(element, "tr");
  const kind = value => /^[-+]?[\d.,]+(e[-+]?\d+)?%?( |$)/.test(value) ? { class: "number" } : {};
  columns.forEach((name, place) => add(head, "th", name, place && rows.every(row => kind(row[place]).class || row[place] === "") ? { class: "number" } : {}));
  for (const row of rows) {
    const line = add(element, "tr");
    row.forEach((value, place) => add(line, "td", value, place ? kind(value) : {}));
  }
}

// curves --------------------------------------------------------------------------------------------
const charts = [];
const visible = new IntersectionObserver(entries => { for (const entry of entries) { const chart = charts.find(one => one.box === entry.target); chart.seen = entry.isIntersecting; chart.draw(); } }, { rootMargin: "200px" });
const INTEGERS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000];
const RAW = 60;  // more points than this are drawn thin, with their mean over a thirtieth of the run
const filled = values => values.filter(value => value !== null);
function smooth(values) {
  const own = filled(values), half = Math.max(1, Math.round(own.length / 60)), sums = [0];
  for (const value of own) sums.push(sums.at(-1) + value);
  let next = 0;
  return values.map(value => {
    if (value === null) return null;
    const from = Math.max(0, next - half), to = Math.min(own.length, ++next + half);
    return (sums[to] - sums[from]) / (to - from);
  });
}
class Chart {
  // data: returns {x, lines: [{name, values, low, high, place, dash}]}, null while there is nothing to show; place: number of
  // its colour. options: zero, the axis begins there; smooth; each, all last values are told; x, its unit if not steps.
  constructor(parent, title, hint, data, options = {}) {
    Object.assign(this, { data, options, plot: null, seen: false, dirty: true });
    this.box = add(parent, "figure", "", { class: "chart", style: "margin:0" });
    const head = add(this.box, "div", "", { class: "head" });
    if (typeof title === "string") add(head, "h3", title); else head.append(title);
    this.last = add(head, "span", "", { class: "last" });
    add(this.box, "p", hint);
    this.place = add(this.box, "div", "", { role: "img" });
    charts.push(this);
    visible.observe(this.box);
    new ResizeObserver(() => { if (this.plot && this.place.clientWidth) this.plot.setSize({ width: this.place.clientWidth, height: 190 }); }).observe(this.place);
  }
  mark() { this.dirty = true; this.draw(); }
  rebuild() { if (this.plot) { this.plot.destroy(); this.plot = null; } this.mark(); }
  draw() {
    const found = this.dirty ? this.data() : null;
    if (this.dirty) this.box.hidden = !found;
    if (!this.dirty || !found || !this.seen) return;
    this.dirty = false;
    const thin = this.options.smooth && found.lines.some(line => filled(line.values).length > RAW), rows = [found.x], shape = [], bands = [];
    found.lines.forEach((line, place) => {
      const color = series(line.place ?? place), dash = line.dash || [], points = { show: found.x.length < 40, size: 5 };
      if (line.low) {
        rows.push(line.high, line.low);
        bands.push({ series: [rows.length - 2, rows.length - 1], fill: color + "33" });
        for (const end of ["high", "low"]) shape.push({ label: `${line.name} ${end}`, stroke: color + "88", width: 1, points: { show: false }, spanGaps: true });
      }
      rows.push(line.values);
      shape.push({ label: line.name, stroke: thin ? color + "66" : color, width: thin ? 1 : 2, points: thin ? { show: false } : points, dash: thin ? [] : dash, spanGaps: true });
      if (thin) { rows.push(smooth(line.values)); shape.push({ label: found.lines.length > 1 ? `${line.name}, mean` : "mean", stroke: color, width: 2, points: { show: false }, dash, spanGaps: true }); }
    });
    const kept = shape.map(one => one.label).join("\n");
    if (this.plot && this.kept === kept) this.plot.setData(rows);
    else {
      if (this.plot) this.plot.destroy();
      this.kept = kept;
      const grid = { stroke: css("--line"), width: 1 }, axis = { stroke: () => css("--muted"), grid, ticks: grid, font: "12px system-ui" };
      this.plot = new uPlot({
        width: this.place.clientWidth || 380, height: 190, bands,
        scales: { x: { time: false, range: (_, low, high) => low === high ? [low, low + 1] : [low, high] }, y: { range: (_, low, high) => this.range(low, high) } },
        cursor: { sync: { key: this.options.x || "step" }, drag: { x: true, y: false } },
        axes: [{ ...axis, ...(this.options.x ? {} : { incrs: INTEGERS }), size: 28 }, { ...axis, size: 62, values: (_, ticks) => ticks.map(tickText) }],
        series: [{ label: this.options.x || "step", value: (_, value) => value === null ? "" : String(+value.toPrecision(6)) }, ...shape.map(one => ({ ...one, value: (_, value) => value === null ? "" : number(value) }))],
      }, rows, this.place);
      shape.forEach((one, at) => { if (one.points.show === false && one.width === 1 && !thin) this.place.querySelectorAll(".u-legend .u-series")[at + 1].hidden = true; });
    }
    const told = found.lines.map(line => line.values.findLast(value => value !== null));
    this.last.textContent = found.lines.length === 1 || !this.options.each ? number(told[0]) : told.map(number).join(" · ");
    this.place.setAttribute("aria-label", found.lines.map((line, place) => `${line.name}: last ${number(told[place])}`).join("; "));
  }
  range(low, high) {
    if (low === null) return [0, 1];
    const from = this.options.zero ? Math.min(0, low) : low, room = (high - from || Math.abs(high) || 1) * 0.08;
    return [this.options.zero && low >= 0 ? 0 : from - room, high + room];
  }
}
// Curves of steps: title, hint, [figure, name] of each line, options. Runs side by side show the first figure of each.
const CURVES = [
  ["Reward", "mean over the trained responses", [["reward_mean", "trained"], ["reward_tried", "all that were sampled"]], { smooth: true }],
  ["Equal groups", "groups of a step whose scores are all equal: they teach nothing", [["equal_groups", "equal"]], { smooth: true, zero: true }],
  ["Speed", "trained tokens per second and device", [["tokens_per_s_per_device", "tokens/s/device"]], { smooth: true, zero: true }],
  ["Waiting", "share of a step in which the trainer waits for responses", [["wait_ratio", "waiting"]], { smooth: true, zero: true }],
  ["Response length", "tokens: mean, 90 % quantile, longest", [["response_length_mean", "mean"], ["response_length_p90", "90 %"], ["response_length_max", "longest"]], { zero: true, each: true }],
  ["Long tail", "share of the tokens in the longest tenth of the responses; 0.1 if all are equally long", [["response_length_tail", "tail"]], { smooth: true }],
  ["KL", "from the reference, nats per token", [["kl", "KL"]], { smooth: true, zero: true }],
  ["Mismatch", "KL between instances and trainer, nats per token", [["mismatch_kl", "mismatch"]], { smooth: true }],
  ["Entropy", "nats per token", [["entropy", "entropy"]], { smooth: true }],
  ["Gradient cosine", "between consecutive gradients", [["grad_cosine", "cosine"]], { smooth: true }],
];
