// A plan. Its data are in the page (page.py describes them).
const painted = [], longest = Math.max(...embedded.changes.flatMap(change => change.bars.map(bar => bar.seconds)));
document.title = "Metronome: plan";
$("looked").textContent = embedded.looked;
table($("settings"), ["step", "times as fast", "devices", "bound by", "settings"], embedded.settings);
for (const change of embedded.changes) {
  add($("changes"), "div", change.name);
  const box = add($("changes"), "div");
  change.bars.forEach((bar, place) => {
    const row = add(box, "p", "", { title: `${embedded.names[place]}: ${number(bar.seconds)} s a step, ${bar.setting}` });
    painted.push([add(row, "i", "", { style: `width:${(100 * bar.seconds / longest).toFixed(2)}%` }), place]);
    add(row, "span", `${number(bar.seconds)} s`);
  });
}
table($("assumptions"), ["what", "value and source"], embedded.assumptions);
repaint.push(() => {
  key($("key"), embedded.names.map((name, place) => [name, series(place)]));
  for (const [element, place] of painted) element.style.background = series(place);
});
startTheme();
