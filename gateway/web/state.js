/** The strip that tells how the server is: `/readyz`, and a few figures of `/metrics`. */

import { Unreachable } from "./api.js";

const EVERY_MS = 2000;
const POINTS = 60;

/** Sum, number and mean of the values of each metric (its labels left out) of Prometheus' text. */
export function figures(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-z_]+)(?:\{[^}]*\})? (\S+)/.exec(line);
    if (!match) continue;
    const figure = found.get(match[1]) ?? { sum: 0, count: 0 };
    figure.sum += Number(match[2]);
    figure.count += 1;
    found.set(match[1], figure);
  }
  return found;
}

export class State {
  /** find(id): an element of the page. */
  constructor(find) {
    this.strip = find("state");
    this.line = find("state-line");
    this.lamp = find("lamp");
    this.words = Object.fromEntries(
      ["word", "running", "waiting", "cache", "rate"].map((name) => [name, find(`state-${name}`)]),
    );
    this.timer = 0;
    this.server = null;
    document.addEventListener("visibilitychange", () => this.#look());
  }

  /** Watch this server from now on. */
  watch(server) {
    this.server = server;
    this.rates = [];
    this.before = null;
    this.strip.hidden = true;
    this.#look();
  }

  async #look() {
    clearTimeout(this.timer);
    const server = this.server;
    if (document.hidden || server === null) return;
    let isRefused = false;
    try {
      const [ready, metrics] = await Promise.all(["readyz", "metrics"].map((path) => server.fetch(path, { quiet: true })));
      isRefused = !metrics.ok;
      const [state, text] = [await ready.json(), await metrics.text()];
      if (server !== this.server) return;
      if (!isRefused) this.#show(ready.ok ? "ready" : state.reason ?? "not ready", figures(text), ready.ok);
    } catch (error) {
      if (server !== this.server) return;
      if (!(error instanceof Unreachable)) isRefused = true; // no JSON: another kind of server
      else this.#show("no answer", new Map(), false);
    }
    this.strip.hidden = isRefused || (this.strip.hidden && this.before === null);
    clearTimeout(this.timer);
    if (!isRefused) this.timer = setTimeout(() => this.#look(), EVERY_MS);
  }

  #show(word, found, isGood) {
    this.words.word.textContent = word;
    this.lamp.className = isGood ? "good" : "";
    const cache = found.get("novainfer_kv_cache_usage_ratio");
    this.words.running.textContent = found.get("novainfer_num_requests_running")?.sum ?? "-";
    this.words.waiting.textContent = found.get("novainfer_num_requests_waiting")?.sum ?? "-";
    this.words.cache.textContent = cache ? `${((100 * cache.sum) / cache.count).toFixed(0)} %` : "-";
    const rate = this.#rate(found.get("novainfer_gateway_tokens_received_total")?.sum);
    this.words.rate.textContent = rate === null ? "-" : rate.toFixed(0);
    this.#draw();
  }

  /** Tokens a second since the look before; null where there was none. */
  #rate(tokens) {
    if (tokens === undefined) return null;
    const [now, before] = [performance.now(), this.before];
    this.before = { now, tokens };
    if (before === null || now <= before.now) return null;
    const rate = Math.max(0, (1000 * (tokens - before.tokens)) / (now - before.now)); // below 0: a gateway is new
    this.rates = [...this.rates, rate].slice(-POINTS);
    return rate;
  }

  #draw() {
    const most = Math.max(1, ...this.rates);
    const start = POINTS - this.rates.length; // the newest is at the right
    const points = this.rates.map((rate, at) => `${(120 * (start + at)) / (POINTS - 1)},${19 - (18 * rate) / most}`);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    line.setAttribute("points", points.join(" "));
    this.line.replaceChildren(line);
  }
}
