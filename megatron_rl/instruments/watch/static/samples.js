// Responses: of recorded batches token by token, coloured by rho, and of samples.jsonl as text.

import { ask, choice, el, empty, format, svg } from "./dom.js";

const WINDOW = 1000, PAGE = 20;
const ORDERS = [["mismatch", "largest |log rho|"], ["reward", "reward"], ["length", "length"], ["batch", "place in the batch"]];
const SCALES = [["auto", "of this response"], ["0.01", "±0.01"], ["0.1", "±0.1"], ["1", "±1"]];

export class Samples {
  constructor(context) {
    Object.assign(this, { context, run: 0, step: null, order: "mismatch", sequence: null, start: 0, scale: "auto", before: null });
    this.controls = el("div", { class: "controls" });
    this.list = el("div", { class: "list" });
    this.more = el("button", { type: "button", onclick: () => this.loadList(this.listed) }, "more");
    this.tokens = el("div", {});
    this.texts = el("div", {});
    this.older = el("button", { type: "button", onclick: () => this.loadTexts(this.next) }, "older");
    this.newer = el("p", { class: "soft", role: "status" });
    this.node = el("div", {}, this.controls, el("div", { class: "split" }, el("div", {}, this.list, this.more), this.tokens), el("h2", {}, "Sampled responses"), this.texts, this.older);
    this.seen = null;
  }

  /** `state`: of the page. What a reader looks at stays; new batches and samples are offered. */
  update(state) {
    const now = state.runs[this.run];
    const seen = JSON.stringify([this.run, now.batches, now.num_samples]);
    if (seen === this.seen) return;
    const isFirst = this.seen === null || JSON.parse(this.seen)[0] !== this.run;
    this.seen = seen;
    const batches = now.batches;
    const wanted = this.step === null || isFirst ? batches.at(-1) ?? null : this.step;
    this.drawControls(batches, wanted);
    if (isFirst) {
      this.choose(wanted);
      this.loadTexts(null);
    } else if (this.step === null && wanted !== null) this.choose(wanted);
    else if (this.next === undefined) this.loadTexts(null);
  }

  drawControls(batches, step) {
    const { labels } = this.context;
    const parts = [];
    if (labels.length > 1) parts.push(choice("run", labels.map((label, i) => [String(i), label]), String(this.run), (value) => { Object.assign(this, { run: Number(value), step: null }); this.update(this.context.state); }));
    if (batches.length) {
      const steps = batches.includes(step) || step === null ? batches : [...batches, step];
      parts.push(choice("step", steps.map((at) => [String(at), batches.includes(at) ? String(at) : `${at} ${this.context.state.runs[this.run].num_batches > batches.length ? "" : "(deleted)"}`]), String(step), (value) => this.choose(Number(value))));
      if (this.context.state.runs[this.run].num_batches > batches.length) {
        const other = el("input", { type: "number", min: 0, size: 8, onchange: () => other.value !== "" && this.choose(Number(other.value)) });
        parts.push(el("label", {}, "earlier step ", other));
      }
      parts.push(choice("order", ORDERS, this.order, (value) => { this.order = value; this.choose(this.step); }));
      parts.push(choice("colours", SCALES, this.scale, (value) => { this.scale = value; this.drawTokens(); }));
    }
    if (step !== batches.at(-1) && batches.length) parts.push(el("button", { type: "button", onclick: () => { this.drawControls(batches, batches.at(-1)); this.choose(batches.at(-1)); } }, `newest batch: step ${batches.at(-1)}`));
    this.controls.replaceChildren(...parts);
  }

  async choose(step) {
    Object.assign(this, { step, listed: 0, sequence: null });
    this.list.replaceChildren();
    this.tokens.replaceChildren();
    this.more.hidden = true;
    this.list.hidden = step === null;
    if (step === null) this.tokens.replaceChildren(empty(this.context.hints.batches));
    else await this.loadList(0);
  }

  async loadList(start) {
    const { run, step, order } = this;
    const found = await this.context.guard(this.tokens, () => ask("batch", { run, step, order, start, number: PAGE }));
    if (!found || step !== this.step || order !== this.order || run !== this.run) return;
    for (const about of found.responses) {
      const rho = about.largest_log_rho === null ? "" : `, max |log rho| ${format(about.largest_log_rho)}`;
      this.list.append(el("button", { type: "button", "data-sequence": about.sequence, onclick: () => this.open(about.sequence, 0) },
        el("span", {}, about.id), el("span", {}, `reward ${format(about.reward)}`), el("small", {}, `${about.length} tokens${rho}`)));
    }
    this.listed = start + found.responses.length;
    this.more.hidden = this.listed >= found.total;
    this.more.textContent = `more (${found.total - this.listed})`;
    if (this.sequence === null && found.responses.length) await this.open(found.responses[0].sequence, 0);
  }

  async open(sequence, start) {
    this.sequence = sequence;
    for (const button of this.list.children) button.setAttribute("aria-current", String(Number(button.dataset.sequence) === sequence));
    const { run, step } = this;
    const found = await this.context.guard(this.tokens, () => ask("response", { run, step, sequence, start, number: WINDOW }));
    if (!found || sequence !== this.sequence || step !== this.step) return;
    this.response = found;
    this.drawTokens();
  }

  drawTokens() {
    const it = this.response;
    if (!it || this.sequence === null) return;
    const known = (it.strip || []).filter((value) => value !== null).map(Math.abs);
    const reach = this.scale === "auto" ? Math.max(1e-9, ...known) : Number(this.scale);
    const readout = el("div", { class: "readout", "aria-live": "polite" }, "Move over a token, or press arrow keys in the text.");
    const spans = it.texts.map((text, i) => {
      const span = el("span", { class: it.trained[i] ? "token" : "token untrained" }, text.replaceAll("\n", "⏎\n") || "·");
      if (it.log_rho) span.style.backgroundColor = shade(it.log_rho[i], reach);
      return span;
    });
    let here = 0;
    const show = (i) => {
      spans[here].classList.remove("here");
      here = Math.max(0, Math.min(spans.length - 1, i));
      spans[here].classList.add("here");
      readout.replaceChildren(...tokenFacts(it, here).map((fact) => el("span", {}, fact)));
    };
    const box = el("div", { class: "text-box", tabindex: "0", role: "group", "aria-label": "tokens of the response; arrow keys move" }, spans);
    box.addEventListener("pointerover", (event) => { const i = spans.indexOf(event.target); if (i >= 0) show(i); });
    box.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -20, ArrowDown: 20, Home: -WINDOW, End: WINDOW };
      if (!(event.key in moves) || !spans.length) return;
      event.preventDefault();
      show(here + moves[event.key]);
      spans[here].scrollIntoView({ block: "nearest" });
    });
    const notes = [it.log_rho ? null : empty(this.context.hints.learner_logprobs), it.has_tokenizer ? null : el("p", { class: "soft" }, this.context.hints.tokenizer)];
    const left = it.prompt_left_out ? `[${it.prompt_left_out} tokens before] ` : "";
    this.tokens.replaceChildren(
      el("p", {}, el("strong", {}, it.id), `  step ${it.step}, reward ${format(it.reward)}, advantage ${format(it.advantage)}, ${it.length} tokens`),
      el("div", { class: "text-box prompt" }, left + it.prompt), ...notes.filter(Boolean), ...(it.log_rho ? [legend(reach), this.strip(it, reach)] : []),
      ...this.pager(it), box, readout);
  }

  strip(it, reach) {
    const count = it.strip.length;
    const picture = svg("svg", { class: "strip", viewBox: `0 0 ${Math.max(count, 1)} 40`, preserveAspectRatio: "none", role: "img", "aria-label": "log rho along the response" });
    picture.append(svg("line", { class: "axis", x1: 0, x2: count, y1: 20, y2: 20, "vector-effect": "non-scaling-stroke" }));
    it.strip.forEach((value, i) => {
      if (value === null) return;
      const high = Math.min(1, Math.abs(value) / reach) * 19;
      picture.append(svg("rect", { x: i, width: 1, y: value > 0 ? 20 - high : 20, height: Math.max(high, 0.3), style: { fill: `rgb(var(--${value > 0 ? "above" : "below"}))` } }));
    });
    picture.addEventListener("click", (event) => {
      const box = picture.getBoundingClientRect();
      const token = Math.floor((event.clientX - box.left) / box.width * it.length);
      if (it.length > WINDOW) this.open(it.sequence, Math.floor(token / WINDOW) * WINDOW);
    });
    return picture;
  }

  pager(it) {
    if (it.length <= WINDOW) return [];
    const go = (start) => () => this.open(it.sequence, start);
    return [el("div", { class: "controls" },
      el("button", { type: "button", disabled: it.start <= 0, onclick: go(Math.max(0, it.start - WINDOW)) }, "earlier"),
      el("span", {}, `tokens ${it.start} to ${it.start + it.texts.length - 1} of ${it.length}`),
      el("button", { type: "button", disabled: it.start + WINDOW >= it.length, onclick: go(it.start + WINDOW) }, "later"))];
  }

  async loadTexts(before) {
    const run = this.run;
    if (before === null) this.texts.replaceChildren();
    const found = await this.context.guard(this.texts, () => ask("samples", { run, before, number: 10 }));
    if (!found || run !== this.run) return;
    if (before === null && !found.samples.length) this.texts.replaceChildren(empty(this.context.hints.samples));
    this.next = found.samples.length ? found.next : undefined;
    this.older.hidden = !found.next;
    for (const it of found.samples) {
      const rho = it.rho ? `, rho mean ${format(it.rho.mean)}, std ${format(it.rho.std)}, ${format(it.rho.min)} to ${format(it.rho.max)}` : "";
      this.texts.append(el("article", { class: "sample" },
        el("p", {}, el("strong", {}, `step ${it.step}, ${it.why}`), ` ${it.prompt_id}/${it.sample}: reward ${format(it.reward)}, ${it.length} tokens, ended by ${it.finish}${rho}`),
        el("div", { class: "text-box prompt" }, String(it.prompt)), el("div", { class: "text-box" }, String(it.response)), el("p", { class: "soft" }, `answer: ${it.answer}`)));
    }
  }
}

function shade(logRho, reach) {
  if (logRho === null) return "transparent";
  const strength = Math.min(1, Math.abs(logRho) / reach);
  return `rgb(var(--${logRho > 0 ? "above" : "below"}) / ${(0.75 * strength).toFixed(3)})`;
}

function tokenFacts(it, i) {
  const facts = [`token ${it.start + i}: ${JSON.stringify(it.texts[i])} (${it.ids[i]})`];
  if (it.log_rho) facts.push(`rho ${it.log_rho[i] === null ? "not finite" : Math.exp(it.log_rho[i]).toPrecision(6)}`, `log rho ${format(it.log_rho[i])}`, `po ${format(it.po[i])}`);
  facts.push(`mu ${format(it.mu[i])}`, `weights of step ${it.version[i]}`);
  if (!it.trained[i]) facts.push("not trained on");
  return facts;
}

function legend(reach) {
  const parts = [-1, -0.5, 0, 0.5, 1].map((share) => {
    const mark = el("i", {});
    mark.style.backgroundColor = shade(share * reach, reach);
    return el("span", {}, mark, ` ${Math.exp(share * reach).toPrecision(4)}`);
  });
  return el("p", { class: "scale" }, "rho = po/mu:", ...parts, "(beyond: as the ends; dotted line: not trained on)");
}
