// The page: asks for the state every two seconds, and for what the open view shows when a run has new lines.

import { ask, choice, colour, dash, duration, el, empty, format, swatch } from "./dom.js";
import { chart } from "./chart.js";
import { bandChart, bandTable, routeMap, routeScale } from "./mismatch.js";
import { Samples } from "./samples.js";

const TABS = { curves: "Curves", mismatch: "Mismatch", routes: "Routes", samples: "Samples", alarms: "Alarms", why: "Why", log: "Log" };
const AXES = [["step", "steps"], ["time", "hours"], ["tokens", "million tokens"]];
const POLL_MS = 2000, SLOWEST_MS = 15000;
const READ_MS = 4000, TYPE_MS = 60000; // so long after the last move or key a view waits for its reader
const here = { tab: "curves", axis: "step", smoothing: "auto", extra: [], logs: {}, hidden: new Set(), step: null, logRun: 0 };
const context = { labels: [], hints: {}, state: null, guard };
let touched = 0, drawn = "", samples = null, wait = POLL_MS;
const view = document.getElementById("view"), tabs = document.getElementById("tabs"), connection = document.getElementById("connection");

function readAddress() {
  const [tab, query] = location.hash.slice(1).split("?");
  if (tab in TABS) here.tab = tab;
  const values = new URLSearchParams(query || "");
  if (AXES.some(([key]) => key === values.get("x"))) here.axis = values.get("x");
  here.extra = values.getAll("metric");
}

function writeAddress() {
  const values = new URLSearchParams();
  if (here.axis !== "step") values.set("x", here.axis);
  here.extra.forEach((name) => values.append("metric", name));
  history.replaceState(null, "", `#${here.tab}${values.size ? `?${values}` : ""}`);
}

/** What `action` gives; undefined where the server refuses, which `node` then says. */
async function guard(node, action) {
  try {
    return await action();
  } catch (error) {
    if (!error.told) throw error;
    node.replaceChildren(empty(error.message));
    return undefined;
  }
}

async function poll() {
  try {
    if (!document.hidden) {
      const state = await ask("state");
      Object.assign(context, { state, labels: state.runs.map((run) => run.label), hints: state.hints });
      drawRuns(state);
      drawTabs(state);
      await drawView(state);
      connection.textContent = state.runs.some((run) => run.share_read < 1) ? "reading the history" : "live";
      connection.classList.remove("lost");
    }
    wait = POLL_MS;
  } catch (error) {
    console.error(error);
    connection.textContent = "no answer from megatron-rl watch (is it running, is the tunnel up?); trying again";
    connection.classList.add("lost");
    wait = Math.min(wait * 2, SLOWEST_MS);
  }
  setTimeout(poll, wait);
}

const STATUS = { done: "done", alarmed: "done, with alarms", collapsed: "done, reward collapsed", running: "running", silent: "no sign of life", ended: "ended before its last step", waiting: "no step yet" };

function drawRuns(state) {
  const focused = document.activeElement?.dataset?.run;
  const cards = state.runs.map((run, index) => {
    const several = state.runs.length > 1;
    const toggle = several ? el("input", { type: "checkbox", "data-run": index, checked: !here.hidden.has(index), "aria-label": `show ${run.label}`, onchange: (event) => {
      here.hidden[event.target.checked ? "delete" : "add"](index);
      redraw();
    } }) : null;
    const facts = { "reward": run.summary.reward, "val": run.summary.val, "rho std": run.summary["rho std"], "entropy": run.summary.entropy, "length": run.summary.length };
    const times = [run.eta_s === null ? null : `${duration(run.eta_s)} to go`, run.age_s === null ? null : `last step ${duration(run.age_s)} ago`, run.num_events ? `${run.num_events} alarms` : null];
    const problems = run.broken_lines ? el("p", { class: "alarmed" }, `${run.broken_lines} lines of metrics.jsonl are no records of a step`) : null;
    return el("article", { class: here.hidden.has(index) ? "run hidden" : "run", title: run.folder, style: { "border-left-color": colour(index) } },
      el("h2", {}, toggle, several ? swatch(colour(index), dash(Math.floor(index / 8))) : null, run.label, el("span", { class: `status ${run.status}` }, STATUS[run.status])),
      el("progress", { max: run.num_steps || 1, value: run.num_steps ? run.done_steps : 0, "aria-label": `steps of ${run.label}` }),
      el("div", { class: "soft" }, `step ${run.step ?? "–"}${run.num_steps ? ` of ${run.num_steps}` : ""}${times.filter(Boolean).map((text) => ` · ${text}`).join("")}`),
      el("dl", {}, Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, typeof value === "number" ? format(Number(value.toPrecision(3))) : format(value))))), problems);
  });
  document.getElementById("runs").replaceChildren(...cards);
  if (focused !== undefined) document.querySelector(`[data-run="${focused}"]`)?.focus();
}

function drawTabs(state) {
  const events = state.runs.reduce((total, run) => total + run.num_events, 0);
  const wanted = JSON.stringify([here.tab, events]);
  if (tabs.dataset.drawn === wanted) return;
  tabs.dataset.drawn = wanted;
  const hadFocus = tabs.contains(document.activeElement);
  tabs.replaceChildren(...Object.entries(TABS).map(([key, text]) => el("button", {
    type: "button", role: "tab", id: `tab-${key}`, "aria-selected": String(key === here.tab), "aria-controls": "view", tabindex: key === here.tab ? "0" : "-1",
    onclick: () => open(key), onkeydown: moveTab,
  }, text, key === "alarms" && events ? el("span", { class: "count" }, String(events)) : null)));
  view.setAttribute("aria-labelledby", `tab-${here.tab}`);
  if (hadFocus) document.getElementById(`tab-${here.tab}`).focus();
}

function moveTab(event) {
  const keys = Object.keys(TABS), at = keys.indexOf(here.tab);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: keys.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  open(keys[(to + keys.length) % keys.length]);
}

function open(tab) {
  here.tab = tab;
  writeAddress();
  drawTabs(context.state);
  redraw();
}

function redraw() {
  drawn = "";
  if (context.state) {
    drawRuns(context.state);
    drawView(context.state).catch((error) => console.error(error));
  }
}

/** Draws the open view where a run has changed since; a chart that is being read waits, until nothing has moved for a while. */
async function drawView(state) {
  const wanted = JSON.stringify([here.tab, here.axis, here.extra, here.step, state.runs.map((run) => run.version)]);
  const since = Date.now() - touched;
  const isRead = drawn && ((since < READ_MS && view.querySelector("svg:focus, svg:hover, canvas:focus, canvas:hover")) || (since < TYPE_MS && view.querySelector("input:focus")));
  if (here.tab === "samples") return drawSamples(state);
  if (wanted === drawn || isRead) return;
  drawn = wanted;
  const nodes = await { curves, mismatch, routes, alarms, why, log }[here.tab](state);
  if (drawn !== wanted) return;
  const focused = focusable().indexOf(document.activeElement);
  view.replaceChildren(...nodes);
  if (focused >= 0) focusable()[focused]?.focus();
}

const focusable = () => [...view.querySelectorAll("svg[tabindex], canvas, button, input, select")];

function drawSamples(state) {
  samples ??= new Samples(context);
  if (view.firstChild !== samples.node) view.replaceChildren(samples.node);
  drawn = "samples";
  samples.update(state);
}

function chartOf(panel, axis, state) {
  const alarms = axis === "step" ? Object.fromEntries(state.runs.map((run, i) => [i, run.events.map((event) => event.step).slice(0, 50)])) : {};
  return chart(panel, {
    labels: context.labels, hidden: here.hidden, smoothing: here.smoothing, axis, alarms, isLog: here.logs[panel.title] ?? panel.is_log,
    onLog: () => { here.logs[panel.title] = !(here.logs[panel.title] ?? panel.is_log); redraw(); },
    onRemove: () => { here.extra = here.extra.filter((name) => name !== panel.title); writeAddress(); redraw(); },
  });
}

async function curves(state) {
  const [found, names] = await Promise.all([ask("panels", { x: here.axis, metric: here.extra }), ask("metrics")]);
  const add = el("input", { list: "names", placeholder: "any of metrics.jsonl", "aria-label": "metric to add", size: 28, onchange: () => {
    if (!names.includes(add.value) || here.extra.includes(add.value)) return;
    here.extra.push(add.value);
    add.blur();
    writeAddress();
    redraw();
  } });
  const controls = el("div", { class: "controls" },
    choice("over", AXES, here.axis, (value) => { here.axis = value; writeAddress(); redraw(); }),
    choice("smoothing", [["auto", "by length"], ["off", "none"]], here.smoothing, (value) => { here.smoothing = value; redraw(); }),
    el("label", {}, "add a metric ", add), el("datalist", { id: "names" }, names.map((name) => el("option", { value: name }))));
  if (!found.panels.length) return [controls, empty("No step is recorded yet.")];
  const zero = found.zero.length ? [el("p", { class: "soft" }, `0 throughout, not drawn: ${found.zero.join(", ")}.`)] : [];
  return [controls, el("div", { class: "grid" }, found.panels.map((panel) => chartOf(panel, here.axis, state))), ...zero];
}

async function mismatch(state) {
  const found = await ask("bands", { step: here.step });
  if (!found.labels.length) return [empty(context.hints.bands)];
  const firsts = found.runs.map((run) => run.first).filter((step) => step !== null), lasts = found.runs.map((run) => run.last).filter((step) => step !== null);
  const last = Math.max(...lasts), text = el("output", {}, here.step === null ? `newest (${last})` : String(here.step));
  const slider = el("input", { type: "range", min: Math.min(...firsts), max: last, value: here.step ?? last, oninput: () => { text.textContent = slider.value; }, onchange: () => { here.step = Number(slider.value); slider.blur(); redraw(); } });
  const controls = el("div", { class: "controls" }, el("label", {}, "step ", slider, " ", text), el("button", { type: "button", disabled: here.step === null, onclick: () => { here.step = null; redraw(); } }, "newest"));
  const hasDetail = found.runs.some((run) => run.rows.some((row) => row.q05 !== null));
  return [controls, bandChart(found, context.labels, here.hidden), bandTable(found, context.labels), ...(hasDetail ? [] : [el("p", { class: "soft" }, context.hints.band_detail)]),
    el("h2", {}, "Over the run"), el("div", { class: "grid" }, found.panels.map((panel) => chartOf(panel, "step", state)))];
}

async function routes() {
  const found = (await ask("routes")).filter((_, index) => !here.hidden.has(index));
  if (!found.some((run) => run.layers.length)) return [empty(context.hints.routes)];
  return [routeScale(), el("div", { class: "grid" }, found.map((run) => routeMap(run, context.hints.routes)))];
}

function alarms(state) {
  return state.runs.flatMap((run, index) => {
    if (here.hidden.has(index)) return [];
    const rules = run.rules.length ? el("details", { open: run.events.length ? false : true }, el("summary", {}, `${run.rules.length} rules watch this run`), el("ul", {}, run.rules.map((rule) => el("li", {}, el("strong", {}, rule.name), `: ${rule.text}`)))) : empty(context.hints.alarms);
    const rows = run.events.map((event) => el("tr", {}, el("td", {}, String(event.step)), el("td", { class: "text" }, event.name), el("td", { class: "text" }, event.text || "went off")));
    const table = rows.length ? el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["step", "alarm", "what it saw"].map((text) => el("th", { scope: "col", class: "text" }, text)))), el("tbody", {}, rows))) : el("p", { class: "soft" }, "None has gone off.");
    const more = run.num_events > run.events.length ? [el("p", { class: "soft" }, `and ${run.num_events - run.events.length} earlier ones`)] : [];
    return [el("h2", {}, swatch(colour(index), ""), run.label), table, ...more, rules];
  });
}

async function why(state) {
  const shown = state.runs.map((_, index) => index).filter((index) => !here.hidden.has(index));
  const pages = await Promise.all(shown.map((run) => ask("why", { run })));
  return pages.flatMap((page, at) => [el("h2", {}, swatch(colour(shown[at]), ""), context.labels[shown[at]]), el("pre", { class: "log" }, page.text)]);
}

async function log() {
  const lines = await ask("log", { run: here.logRun });
  const pick = context.labels.length > 1 ? [el("div", { class: "controls" }, choice("run", context.labels.map((label, i) => [String(i), label]), String(here.logRun), (value) => { here.logRun = Number(value); redraw(); }))] : [];
  return [...pick, lines.length ? el("pre", { class: "log" }, lines.join("\n")) : empty("log.txt has nothing yet.")];
}

["pointermove", "keydown", "input"].forEach((kind) => view.addEventListener(kind, () => { touched = Date.now(); }, { passive: true }));
addEventListener("hashchange", () => { readAddress(); if (context.state) drawTabs(context.state); redraw(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) redraw(); });
readAddress();
poll();
