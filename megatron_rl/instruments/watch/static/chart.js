// One panel of curves: lines, what they smooth, a cursor for mouse and keys, and the values under it.

import { colour, dash, el, format, svg, swatch } from "./dom.js";

const WIDTH = 460, HEIGHT = 210, LEFT = 56, RIGHT = 8, TOP = 8, BOTTOM = 26;

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

function logTicks(low, high) {
  if (high - low < 1) return ticks(10 ** low, 10 ** high, 4).filter((value) => value > 0).map(Math.log10);
  const found = [];
  const every = Math.max(1, Math.ceil((high - low) / 5));
  for (let power = Math.ceil(low); power <= high; power += every) found.push(power);
  return found.length > 1 ? found : ticks(low, high, 3);
}

function scale(values, isLog, from, to) {
  const known = values.filter((value) => value !== null && (!isLog || value > 0)).map((value) => (isLog ? Math.log10(value) : value));
  let low = known.length ? known.reduce((a, b) => Math.min(a, b)) : 0;
  let high = known.length ? known.reduce((a, b) => Math.max(a, b)) : 1;
  if (high === low) [low, high] = isLog ? [low - 0.05, high + 0.05] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const at = (value) => {
    if (value === null || (isLog && value <= 0)) return null;
    return from + ((isLog ? Math.log10(value) : value) - low) / (high - low) * (to - from);
  };
  const marks = isLog ? logTicks(low, high).map((power) => 10 ** power) : ticks(low, high, 4);
  return { at, marks, back: (place) => low + (place - from) / (to - from) * (high - low) };
}

function smooth(values, span) {
  if (span <= 1) return values;
  const keep = 1 - 2 / (span + 1);
  let total = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return weight ? total / weight : null;
    [total, weight] = [keep * total + value, keep * weight + 1];
    return total / weight;
  });
}

function line(xs, ys) {
  let text = "", pen = "M";
  xs.forEach((x, i) => {
    if (x === null || ys[i] === null) pen = "M";
    else { text += `${pen}${x.toFixed(1)} ${ys[i].toFixed(1)}`; pen = "L"; }
  });
  return text;
}

const area = (xs, low, high) => {
  const whole = xs.map((_, i) => i).filter((i) => low[i] !== null && high[i] !== null);
  if (!whole.length) return "";
  const there = whole.map((i) => `${xs[i].toFixed(1)} ${high[i].toFixed(1)}`);
  const back = whole.reverse().map((i) => `${xs[i].toFixed(1)} ${low[i].toFixed(1)}`);
  return `M${there.concat(back).join("L")}Z`;
};

const spanOf = (count, mode) => (mode === "off" || count <= 40 ? 1 : Math.max(2, Math.floor(count / 40) * 2));

/** A figure for `panel`. `context`: labels, hidden (set of runs), smoothing, alarms (by run), isLog, on… callbacks. */
export function chart(panel, context) {
  const curves = panel.curves.filter((curve) => !context.hidden.has(curve.run));
  const metrics = [...new Set(panel.curves.map((curve) => curve.metric))];
  const single = context.labels.length === 1;
  const looks = curves.map((curve) => {
    const metric = metrics.indexOf(curve.metric);
    return single ? [colour(metric), dash(metric)] : [colour(curve.run), dash(metric + Math.floor(curve.run / 8))];
  });
  const all = curves.flatMap((curve) => [...curve.y, ...(curve.low || []), ...(curve.high || [])]);
  const isLog = context.isLog && all.some((value) => value > 0);
  const across = scale(curves.flatMap((curve) => curve.x), false, LEFT, WIDTH - RIGHT);
  const up = scale(all, isLog, HEIGHT - BOTTOM, TOP);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": describe(panel, curves, context) });
  for (const mark of up.marks) {
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: up.at(mark), y2: up.at(mark) }));
    picture.append(svg("text", { x: LEFT - 5, y: up.at(mark) + 4, "text-anchor": "end" }, format(mark)));
  }
  across.marks.forEach((mark) => picture.append(svg("text", { x: across.at(mark), y: HEIGHT - 8, "text-anchor": "middle" }, format(mark))));
  for (const [run, steps] of Object.entries(context.alarms || {})) {
    if (!context.hidden.has(Number(run))) steps.forEach((step) => {
      const x = across.at(step);
      if (x >= LEFT && x <= WIDTH - RIGHT) picture.append(svg("line", { class: "alarm", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }, svg("title", {}, `alarm at step ${step}`)));
    });
  }
  curves.forEach((curve, i) => {
    const [stroke, dashes] = looks[i];
    const xs = curve.x.map(across.at), span = spanOf(curve.x.length, context.smoothing);
    const own = { fill: "none", "stroke-width": 1.8, "stroke-dasharray": dashes, "stroke-linejoin": "round", style: { stroke } };
    if (curve.low) picture.append(svg("path", { d: area(xs, curve.low.map(up.at), curve.high.map(up.at)), "fill-opacity": 0.16, style: { fill: stroke } }));
    if (span > 1) picture.append(svg("path", { ...own, d: line(xs, curve.y.map(up.at)), "stroke-opacity": 0.28, "stroke-width": 1 }));
    const shown = smooth(curve.y, span).map(up.at);
    picture.append(svg("path", { ...own, d: line(xs, shown) }));
    if (curve.x.length <= 12) shown.forEach((y, at) => y !== null && picture.append(svg("circle", { cx: xs[at], cy: y, r: 2.6, style: { fill: stroke } })));
    curve.holes.forEach((hole) => picture.append(svg("text", { x: across.at(hole), y: TOP + 9, "text-anchor": "middle", style: { fill: stroke } }, "×", svg("title", {}, "not finite"))));
  });
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const readout = el("div", { class: "readout", "aria-live": "off" });
  picture.append(cursor);
  const places = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  let here = null;
  const show = (place) => {
    here = place;
    cursor.setAttribute("visibility", place === null ? "hidden" : "visible");
    if (place !== null) ["x1", "x2"].forEach((name) => cursor.setAttribute(name, across.at(place)));
    readout.replaceChildren(place === null ? "" : el("span", {}, `${context.axis} ${format(place)}`), ...curves.map((curve, i) => entry(curve, looks[i], place, single, metrics, context)));
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const wanted = across.back((event.clientX - box.left) / box.width * WIDTH);
    if (places.length) show(places.reduce((best, place) => (Math.abs(place - wanted) < Math.abs(best - wanted) ? place : best)));
  });
  picture.addEventListener("pointerleave", () => show(null));
  picture.addEventListener("blur", () => { readout.setAttribute("aria-live", "off"); show(null); });
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !places.length) return;
    event.preventDefault();
    readout.setAttribute("aria-live", "polite");
    const at = here === null ? places.length - 1 : places.indexOf(here) + moves[event.key];
    show(places[Math.max(0, Math.min(places.length - 1, at))]);
  });
  show(null);
  const buttons = [el("button", { type: "button", "aria-pressed": String(isLog), title: "logarithmic scale", onclick: context.onLog }, "log")];
  if (panel.is_extra) buttons.push(el("button", { type: "button", "aria-label": `remove ${panel.title}`, onclick: context.onRemove }, "×"));
  const equal = Object.entries(panel.equal || {}).map(([name, others]) => el("div", { class: "equal" }, `${others.join(", ")}: equal to ${name}`));
  return el("figure", {}, el("figcaption", {}, panel.title, ...buttons), picture, readout, ...equal);
}

function entry(curve, [stroke, dashes], place, single, metrics, context) {
  let at = curve.x.length - 1;
  if (place !== null) while (at > 0 && curve.x[at] > place) at -= 1;
  const names = [single ? null : context.labels[curve.run], metrics.length > 1 || single ? curve.metric : null];
  const range = place !== null && curve.low ? ` (${format(curve.low[at])} to ${format(curve.high[at])})` : "";
  const holes = curve.num_holes ? `, ${curve.num_holes} not finite` : "";
  const value = place === null ? curve.last : curve.x[at] > place ? null : curve.y[at];
  return el("span", {}, swatch(stroke, dashes), `${names.filter(Boolean).join(" ")} ${format(value)}${range}${holes}`);
}

function describe(panel, curves, context) {
  const ends = curves.map((curve) => `${context.labels[curve.run]} ${curve.metric} ${format(curve.last)}`);
  return `${panel.title}; last values: ${ends.join(", ")}. Arrow keys move along the curve.`;
}
