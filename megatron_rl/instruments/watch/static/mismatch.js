// rho by band of probability, and the map of route disagreement: layer by step.

import { colour, el, empty, format, svg, swatch } from "./dom.js";

const WIDTH = 720, HEIGHT = 260, LEFT = 80, TOP = 10, BOTTOM = 40;

/** Means and, where the run has them, the 5% to 95% range of rho: a group of marks for each band, a mark for each run. */
export function bandChart(bands, labels, hidden) {
  const shown = bands.runs.map((run, index) => ({ ...run, index })).filter((run) => run.rows.length && !hidden.has(run.index));
  const values = shown.flatMap((run) => run.rows.flatMap((row) => [row.mean, row.q05, row.q95])).filter((value) => typeof value === "number");
  const reach = Math.max(1e-9, ...values.map((value) => Math.abs(value - 1))) * 1.1;
  const y = (value) => TOP + (1 + reach - value) / (2 * reach) * (HEIGHT - TOP - BOTTOM);
  const wide = (WIDTH - LEFT) / Math.max(bands.labels.length, 1);
  const said = shown.map((run) => `${labels[run.index]}: ${run.rows.map((row, i) => `${bands.labels[i]} ${format(row.mean)}`).join(", ")}`);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `mean rho by band. ${said.join("; ")}` });
  for (const offset of [-1, -0.5, 0, 0.5, 1]) {
    const value = 1 + offset * reach / 1.1;
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value), "stroke-width": offset ? 1 : 2.5 }));
    const text = offset ? `${offset > 0 ? "+" : "−"}${format(Math.abs(value - 1))}` : "rho = 1";
    picture.append(svg("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, text));
  }
  bands.labels.forEach((label, band) => {
    const middle = LEFT + (band + 0.5) * wide;
    picture.append(svg("text", { x: middle, y: HEIGHT - 22, "text-anchor": "middle" }, label));
    shown.forEach((run, place) => {
      const row = run.rows[band];
      if (typeof row.mean !== "number") return;
      const x = middle + (place - (shown.length - 1) / 2) * Math.min(26, wide / (shown.length + 1));
      const stroke = colour(run.index);
      const mark = svg("g", { style: { stroke, fill: stroke } }, svg("title", {}, sentence(labels[run.index], label, row)));
      if (typeof row.q05 === "number") {
        mark.append(svg("line", { x1: x, x2: x, y1: y(row.q05), y2: y(row.q95), "stroke-width": 2 }));
        mark.append(svg("line", { x1: x - 5, x2: x + 5, y1: y(row.q50), y2: y(row.q50), "stroke-width": 2 }));
      }
      mark.append(svg("circle", { cx: x, cy: y(row.mean), r: 5 }));
      picture.append(mark);
    });
  });
  picture.append(svg("text", { x: (LEFT + WIDTH) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, "probability of the token under the learner (po)"));
  const legend = el("div", { class: "readout" }, shown.map((run) => el("span", {}, swatch(colour(run.index), ""), `${labels[run.index]}, step ${run.step}`)));
  return el("figure", { class: "bands" }, el("figcaption", {}, "rho = po/mu by probability of the token", el("small", {}, "dot: mean · bar: 5% to 95% · tick: median")), picture, legend);
}

function sentence(run, band, row) {
  const parts = [`${run}, po in ${band}: mean ${format(row.mean)}, ${format(row.count)} tokens`];
  if (typeof row.std === "number") parts.push(`std ${format(row.std)}`);
  if (typeof row.q05 === "number") parts.push(`5% ${format(row.q05)}, median ${format(row.q50)}, 95% ${format(row.q95)}`);
  return parts.join(", ");
}

export function bandTable(bands, labels) {
  const names = { count: "tokens", mean: "mean rho", std: "std", q05: "5%", q50: "median", q95: "95%" };
  const columns = Object.keys(names).filter((name) => bands.runs.some((run) => run.rows.some((row) => row[name] !== null)));
  const rows = bands.runs.flatMap((run, index) => run.rows.map((row, band) => el("tr", {},
    el("td", {}, labels[index]), el("td", {}, String(run.step)), el("td", {}, bands.labels[band]), columns.map((name) => el("td", {}, format(row[name]))))));
  const head = el("tr", {}, ["run", "step", "po", ...columns.map((name) => names[name])].map((text) => el("th", { scope: "col" }, text)));
  return el("details", {}, el("summary", {}, "as a table"), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
}

// Stops of viridis: ordered in lightness, so that it reads without colours as well.
const STOPS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const FLOOR = -4; // powers of ten: 1 in 10,000 rows is drawn as none
const NONE = [128, 128, 128, 60];

function ramp(value) {
  if (value === null) return NONE;
  const at = Math.min(1, Math.max(0, 1 - Math.log10(Math.max(value, 1e-9)) / FLOOR)) * (STOPS.length - 1);
  const low = Math.min(Math.floor(at), STOPS.length - 2);
  return [...STOPS[low].map((part, i) => Math.round(part + (at - low) * (STOPS[low + 1][i] - part))), 255];
}

export function routeMap(routes, hint) {
  if (!routes.layers.length) return el("figure", {}, el("figcaption", {}, routes.label), empty(hint));
  const [rows, columns] = [routes.layers.length, routes.ends.length];
  const canvas = el("canvas", { width: columns, height: rows, tabindex: "0", role: "img", "aria-label": `${routes.label}: share of rows routed otherwise, ${rows} layers by steps up to ${routes.ends.at(-1)}. Arrow keys move through it.` });
  const pen = canvas.getContext("2d"), image = pen.createImageData(columns, rows);
  routes.values.forEach((row, layer) => row.forEach((value, column) => image.data.set(ramp(value), ((rows - 1 - layer) * columns + column) * 4)));
  pen.putImageData(image, 0, 0);
  canvas.style.height = `${Math.max(90, Math.min(420, rows * 14))}px`;
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  let place = [rows - 1, columns - 1];
  const show = (layer, column) => {
    place = [layer, column];
    const from = column ? routes.ends[column - 1] + 1 : routes.ends[0], to = routes.ends[column];
    const value = routes.values[layer][column];
    readout.replaceChildren(el("span", {}, `layer ${routes.layers[layer]}, step ${from < to ? `${from} to ` : ""}${to}: ${value === null ? "not measured" : `${format(100 * value)}% of rows routed otherwise`}`));
  };
  const worst = routes.layers.map((layer, i) => [routes.values[i].at(-1), layer]).filter(([value]) => value !== null).sort((a, b) => b[0] - a[0])[0];
  const rest = () => readout.replaceChildren(el("span", {}, worst ? `last: most in layer ${worst[1]}, ${format(100 * worst[0])}% of rows` : ""));
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / box.width * columns), row = Math.floor((event.clientY - box.top) / box.height * rows);
    show(Math.max(0, Math.min(rows - 1, rows - 1 - row)), Math.max(0, Math.min(columns - 1, column)));
  });
  canvas.addEventListener("pointerleave", rest);
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(Math.max(0, Math.min(rows - 1, place[0] + moves[event.key][0])), Math.max(0, Math.min(columns - 1, place[1] + moves[event.key][1])));
  });
  rest();
  const every = Math.max(1, Math.ceil(rows / 8));
  const names = routes.layers.filter((_, i) => i % every === 0).map((layer) => el("span", {}, String(layer)));
  const ends = el("div", { class: "columns" }, el("span", {}, `step ${routes.ends[0]}`), el("span", {}, `step ${routes.ends.at(-1)}`));
  return el("figure", {}, el("figcaption", {}, routes.label, el("small", {}, "layer by step")), el("div", { class: "map" }, el("div", { class: "rows" }, names), canvas, ends), readout);
}

export function routeScale() {
  const parts = [1e-4, 1e-3, 1e-2, 1e-1, 1].map((value) => {
    const mark = el("i", {});
    mark.style.backgroundColor = `rgb(${ramp(value).slice(0, 3).join(" ")})`;
    return el("span", {}, mark, ` ${format(100 * value)}%`);
  });
  return el("p", { class: "scale" }, "share of rows (tokens in a layer) for which learner and engine choose other experts:", ...parts);
}
