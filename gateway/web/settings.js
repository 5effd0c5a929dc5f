/** What is set in the page and kept in this browser (`localStorage`), and the request that it makes. */

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const FIELDS = [...NUMBERS, "system", "more", "server", "model"];
const KEPT = "novainfer settings";

export class Settings {
  constructor() {
    let kept = {};
    try {
      kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
    } catch {
      // Not ours, or damaged: as if nothing had been kept.
    }
    this.values = Object.fromEntries(FIELDS.map((name) => [name, String(kept[name] ?? "")]));
  }

  set(name, value) {
    this.values[name] = value;
    localStorage.setItem(KEPT, JSON.stringify(this.values));
  }

  /** The root of the server, with a slash at its end. Throws if what was set is no address. */
  get serverUrl() {
    const given = this.values.server.trim();
    if (!given) return new URL(".", location.href).href;
    const url = URL.canParse(given) ? new URL(given) : null;
    if (!url || !["http:", "https:"].includes(url.protocol)) {
      throw new Error(`The server's address has to be like http://127.0.0.1:8000, not ${given}`);
    }
    return `${url.origin}${url.pathname.replace(/\/+$/, "").replace(/\/v1$/, "")}/`;
  }

  /** The body of a streamed chat. Throws what is wrong with the settings. */
  body(messages) {
    const { system, model } = this.values;
    const numbers = NUMBERS.filter((name) => this.values[name].trim() !== "");
    return {
      ...this.#more(),
      ...Object.fromEntries(numbers.map((name) => [name, Number(this.values[name])])),
      ...(model ? { model } : {}),
      messages: system.trim() ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true, include_event_ids: true },
    };
  }

  #more() {
    const text = this.values.more.trim();
    if (!text) return {};
    let more = null;
    try {
      more = JSON.parse(text);
    } catch {
      // Said below.
    }
    if (more === null || typeof more !== "object" || Array.isArray(more)) {
      throw new Error('The further parameters have to be a JSON object, like {"top_k": 20}.');
    }
    return more;
  }
}
