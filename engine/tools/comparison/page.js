// Runs side by side. Its data are in the page (page.py describes them).
const { runs } = embedded, WIDTH = 560, LEFT = 8, RIGHT = 12;
const dashes = run => DASHES[run % DASHES.length];
const draw = (svg, tag, attributes, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  svg.append(element);
  return element;
};
const share = (value, whole) => `width:${(100 * value / (whole || 1)).toFixed(3)}%`;

// curves: the runs have steps and times of their own, so a curve is empty at the places of the others
const ofRuns = (figure, axis = "step") => () => {
  const there = embedded.columns.map((columns, run) => ({ columns, run })).filter(one => (one.columns[figure] || []).some(value => value !== null));
  const x = [...new Set(there.flatMap(one => one.columns[axis]))].toSorted((a, b) => a - b), place = new Map(x.map((value, at) => [value, at]));
  const lines = there.map(({ columns, run }) => {
    const values = x.map(() => null);
    columns[axis].forEach((at, row) => { values[place.get(at)] = columns[figure][row]; });
    return { name: runs[run], values, place: run, dash: dashes(run) };
  });
  return lines.length ? { x, lines } : null;
};
const curve = ([title, hint, [[figure]], options]) => new Chart($("charts"), title, hint, ofRuns(figure), { ...options, each: true });

function card(parent, title) {
  const box = add(parent, "figure", "", { class: "chart", style: "margin:0" });
  add(box, "h3", title);
  return box;
}

function bars(parent) {
  const box = card(parent, "Where a step's time goes (mean, seconds)"), legend = add(box, "div", "", { class: "key" });
  const colors = () => new Map(embedded.parts.map(part => [part.name, kindColor(part.kind, part.color)]));
  const longest = Math.max(...embedded.bars.map(bar => Math.max(bar.step, bar.rollout))), painted = [];
  const piece = (strip, name, took) => painted.push([add(strip, "i", "", { style: share(took, longest), title: `${name}: ${number(took)} s` }), name]);
  for (const bar of embedded.bars) {
    add(box, "div", `${runs[bar.run]}: ${number(bar.step)} s a step`);
    const strip = add(box, "div", "", { class: "strip", role: "img", "aria-label": bar.parts.map(([name, took]) => `${name} ${number(took)} s`).join(", ") });
    for (const [name, took] of bar.parts) piece(strip, name, took);
    piece(add(box, "div", "", { class: "strip thin", role: "img", "aria-label": `rollout ${number(bar.rollout)} s` }), embedded.parts.at(-1).name, bar.rollout);
  }
  repaint.push(() => {
    const found = colors();
    key(legend, [...found]);
    for (const [element, name] of painted) element.style.background = found.get(name);
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough)), found = [];
  const step = [1, 2, 5, 10].map(m => m * power).find(m => m >= rough);
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) found.push(+(n * step).toPrecision(12));
  return found;
}

function intervals(parent, group) {
  const box = card(parent, group.title), pitch = 54, height = group.rows.length * pitch + 40, bottom = height - 34;
  const low = Math.min(...group.rows.map(row => row.low)), high = Math.max(...group.rows.map(row => row.high));
  const room = Math.max((high - low) * 0.06, 0.02), from = low - room, to = high + room;
  const x = value => LEFT + (value - from) / (to - from) * (WIDTH - LEFT - RIGHT);
  repaint.push(() => {
    box.querySelector("svg")?.remove();
    const svg = draw(box, "svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": group.rows.map(row => row.label).join("; ") }), muted = css("--muted");
    for (const value of ticks(from, to, 7)) {
      draw(svg, "line", { x1: x(value), x2: x(value), y1: bottom, y2: bottom + 4, stroke: muted });
      draw(svg, "text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, tickText(value));
    }
    draw(svg, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: bottom, y2: bottom, stroke: muted });
    draw(svg, "text", { x: WIDTH / 2, y: height - 2, "text-anchor": "middle" }, group.x);
    if (group.zero !== undefined && from < group.zero && to > group.zero) draw(svg, "line", { x1: x(group.zero), x2: x(group.zero), y1: 0, y2: bottom, stroke: muted, "stroke-dasharray": "4 3" });
    group.rows.forEach((row, place) => {
      const y = place * pitch + 42, color = series(row.run);
      draw(svg, "text", { x: LEFT, y: y - 26 }, row.label);
      draw(svg, "text", { x: LEFT, y: y - 12, class: "hint" }, row.hint);
      draw(svg, "line", { x1: x(row.low), x2: x(row.high), y1: y, y2: y, stroke: color, "stroke-width": 3 });
      for (const end of [row.low, row.high]) draw(svg, "line", { x1: x(end), x2: x(end), y1: y - 5, y2: y + 5, stroke: color, "stroke-width": 2 });
      draw(svg, "circle", { cx: x(row.value), cy: y, r: 5, fill: color });
    });
  });
}

document.title = `Metronome: ${embedded.title}`;
$("title").textContent = embedded.title;
for (const verdict of embedded.verdicts) {
  const box = add($("verdicts"), "div", "", { class: "verdict" });
  add(box, "p", verdict.answer, { class: "answer" });
  for (const sentence of verdict.sentences) add(box, "p", sentence);
  for (const caution of verdict.cautions) add(box, "p", caution, { class: "caution" });
}
table($("summary"), embedded.table.columns, embedded.table.rows);
curve(CURVES[0]);
new Chart($("charts"), "Reward over wall time", "in minutes", ofRuns("reward_mean", "minutes"), { smooth: true, each: true, x: "minutes" });
const parts = new Set(embedded.columns.flatMap(Object.keys).filter(name => name.startsWith("reward/") && !name.endsWith("_std")));
for (const name of [...parts].toSorted()) curve([name, "of the reward", [[name]], { smooth: true }]);
if (embedded.bars.length) bars($("charts"));
for (const one of CURVES.slice(1)) curve(one);
for (const group of embedded.forest) intervals($("charts"), group);
if (embedded.differences.length) {
  add($("differences"), "h2", "Settings that differ");
  add($("differences"), "p", "Names and places are left out.", { class: "hint" });
  table(add($("differences"), "div", "", { class: "wide" }), ["key", ...runs], embedded.differences);
}
for (const note of embedded.notes) add($("notes"), "p", note, { class: "hint" });
startTheme();
