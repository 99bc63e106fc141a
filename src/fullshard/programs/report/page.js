// Draws the figures, and handles mouse, touch and keyboard. Figures refer to colours as var(--name); the style sheet has
// their values.
"use strict";

const root = document.documentElement;
const figures = JSON.parse(document.getElementById("figures").textContent);
const isTouch = matchMedia("(pointer: coarse)").matches;

const PAN = 0.2; // share of the visible range
const AXIS = /^[xy]axis\d*$/;
const ZOOM = 0.6;

// --- colours

function coloured(value) {
  const style = getComputedStyle(root);
  const seen = new Map();
  const resolve = (part) => {
    if (typeof part === "string" && part.startsWith("var(--")) {
      if (!seen.has(part)) seen.set(part, style.getPropertyValue(part.slice(4, -1)).trim());
      return seen.get(part);
    }
    if (Array.isArray(part)) return part.map(resolve);
    if (part && typeof part === "object")
      return Object.fromEntries(Object.entries(part).map(([key, inner]) => [key, resolve(inner)]));
    return part;
  };
  return resolve(value);
}

function setTheme(theme) {
  root.dataset.theme = theme;
  const other = theme === "dark" ? "Light" : "Dark";
  const button = document.getElementById("theme");
  button.textContent = other;
  button.setAttribute("aria-label", `Switch to ${other.toLowerCase()} colours`);
}

// --- charts

const hiddenTraces = {}; // names, by chart
const hiddenIn = (name) => (hiddenTraces[name] ??= new Set());
const chartOf = (name) => document.querySelector(`[data-chart="${name}"]`);

function viewKey(name) {
  const chosen = document.querySelectorAll(`select[data-for="${name}"]`);
  return chosen.length ? Array.from(chosen, (select) => select.value).join("/") : "";
}

function draw(name) {
  const view = figures[name].views[viewKey(name)];
  const chart = chartOf(name);
  if (!view) return showEmpty(chart);
  const { data, layout } = coloured(view);
  if (isTouch) layout.dragmode = name === "timeline" ? "pan" : false; // otherwise a finger could not scroll the page
  for (const trace of data) trace.visible = !hiddenIn(name).has(trace.name);
  drawLegend(name, data);
  layout.font.family = getComputedStyle(document.body).fontFamily;
  keepZoom(chart, layout, viewKey(name));
  const config = { responsive: true, displayModeBar: false, scrollZoom: true };
  return Plotly.react(chart, data, layout, config);
}

// The same view drawn again (another theme, another legend) keeps its ranges. Plotly itself keeps those that a pointer chose,
// and forgets those of buttons and keys.
function keepZoom(chart, layout, view) {
  if (chart.layout && chart.dataset.view === view) {
    for (const axis of Object.keys(layout).filter((each) => AXIS.test(each))) {
      const { range, autorange } = chart.layout[axis] ?? {};
      if (range && !autorange) Object.assign(layout[axis], { range: [...range], autorange: false });
    }
  }
  chart.dataset.view = view;
}

// A button for each trace; pressing it hides the trace, in all views.
function drawLegend(name, data) {
  const legend = document.querySelector(`[data-legend="${name}"]`);
  const hidden = hiddenIn(name);
  const focused = Array.from(legend.children).indexOf(document.activeElement);
  const buttons = data.map((trace) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = trace.name;
    const drawnBy = trace.line && trace.mode !== "markers" ? trace.line : trace.marker;
    button.style.setProperty("--swatch", trace.fillcolor ?? drawnBy.color);
    button.setAttribute("aria-pressed", String(!hidden.has(trace.name)));
    button.addEventListener("click", () => {
      if (!hidden.delete(trace.name)) hidden.add(trace.name);
      draw(name);
    });
    return button;
  });
  legend.replaceChildren(...buttons);
  buttons[focused]?.focus();
}

function showEmpty(chart) {
  Plotly.purge(chart);
  chart.textContent = "This rank did not record this step.";
}

const drawAll = () => Promise.all(Object.keys(figures).map(draw));

function moveView(name, action) {
  const chart = chartOf(name);
  if (!chart.layout) return;
  if (action === "reset") {
    const { layout } = figures[name].views[viewKey(name)];
    const change = {};
    for (const key of Object.keys(layout).filter((each) => AXIS.test(each))) {
      if (layout[key].range) change[`${key}.range`] = [...layout[key].range];
      else change[`${key}.autorange`] = layout[key].autorange || true;
    }
    return Plotly.relayout(chart, change);
  }
  const [low, high] = chart.layout.xaxis.range;
  const middle = (low + high) / 2;
  const half = (high - low) / 2;
  const moved = {
    in: [middle - half * ZOOM, middle + half * ZOOM],
    out: [middle - half / ZOOM, middle + half / ZOOM],
    left: [low - 2 * half * PAN, high - 2 * half * PAN],
    right: [low + 2 * half * PAN, high + 2 * half * PAN],
  };
  return Plotly.relayout(chart, { "xaxis.range": moved[action] });
}

const KEYS = {
  ArrowLeft: "left",
  ArrowRight: "right",
  "+": "in",
  "=": "in",
  "-": "out",
  0: "reset",
  Home: "reset",
};

function listen(chart) {
  const name = chart.dataset.chart;
  chart.addEventListener("keydown", (event) => {
    const action = KEYS[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    moveView(name, action);
  });
  chart.addEventListener("pointerdown", () => chart.focus({ preventScroll: true }), true);
  // Over a chart without focus the wheel scrolls the page.
  const pass = (event) => document.activeElement === chart || event.stopPropagation();
  chart.addEventListener("wheel", pass, { capture: true, passive: true });
}

// --- tables

function makeSortable(table) {
  const body = table.tBodies[0];
  const headings = Array.from(table.tHead.rows[0].cells);
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const ascending = heading.getAttribute("aria-sort") === "descending" || column === 0 && !heading.hasAttribute("aria-sort");
      headings.forEach((each) => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.key;
      const order = (a, b) => key(a).localeCompare(key(b), undefined, { numeric: false });
      const numeric = (a, b) => Number(key(a)) - Number(key(b));
      const rows = Array.from(body.rows);
      const compare = rows.every((row) => key(row) !== "" && !Number.isNaN(Number(key(row)))) ? numeric : order;
      body.append(...rows.sort((a, b) => (ascending ? compare(a, b) : compare(b, a))));
    });
  });
}

// --- begin

setTheme(root.dataset.theme);
document.getElementById("theme").addEventListener("click", () => {
  const theme = root.dataset.theme === "dark" ? "light" : "dark";
  setTheme(theme);
  drawAll();
  try {
    localStorage.setItem("fullshard-theme", theme);
  } catch {} // without storage the choice is not remembered
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
  setTheme(event.matches ? "dark" : "light");
  drawAll();
});
for (const button of document.querySelectorAll("button[data-do]"))
  button.addEventListener("click", () => moveView(button.dataset.for, button.dataset.do));
for (const select of document.querySelectorAll("select[data-choice]"))
  select.addEventListener("change", () => {
    // The timeline and memory show the same step.
    for (const other of document.querySelectorAll(`select[data-choice="${select.dataset.choice}"]`)) other.value = select.value;
    for (const name of new Set(Array.from(document.querySelectorAll("select[data-for]"), (each) => each.dataset.for))) draw(name);
  });
document.querySelectorAll("[data-chart]").forEach(listen);
document.querySelectorAll("table[data-sortable]").forEach(makeSortable);
drawAll().then(() => (root.dataset.ready = "yes"));
