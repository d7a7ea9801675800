// Elements, numbers and requests. Text of a model only ever becomes a text node: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, text]) => node.style.setProperty(key, text));
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export function format(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (value === 0 || Number.isInteger(value) && size < 1e6) return String(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

// Eight colours that differ for every common kind of colour-blindness; from the ninth run on dashes tell apart.
export const colour = (run) => `var(--run-${run % 8})`;
const DASHES = ["", "6 3", "2 2", "8 2 2 2"];
export const dash = (index) => DASHES[index % DASHES.length];

export function swatch(stroke, dashes) {
  const line = svg("line", { x1: 0, y1: 4, x2: 24, y2: 4, "stroke-width": 3, "stroke-dasharray": dashes, style: { stroke } });
  return svg("svg", { class: "swatch", viewBox: "0 0 24 8", "aria-hidden": "true" }, line);
}

export async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value === null || value === undefined) continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
  }
  const answer = await fetch(`api/${path}?${query}`, { cache: "no-cache" });
  const found = await answer.json().catch(() => ({ error: `HTTP ${answer.status}` }));
  if (!answer.ok) throw Object.assign(new Error(found.error), { told: true });
  return found;
}

export const empty = (text) => el("p", { class: "empty" }, text);

export function choice(label, options, value, onchange) {
  const select = el("select", { onchange: () => onchange(select.value) }, options.map(([key, text]) => el("option", { value: key }, text)));
  select.value = value;
  return el("label", {}, `${label} `, select);
}
