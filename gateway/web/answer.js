/** One answer on the page: its text while it comes, what it was thought over, the calls, the figures under it. */

import { TextView, button, element } from "./text.js";

const PARTS = [
  ["gateway", "before the engine"],
  ["queue", "in the queue"],
  ["prefill", "reading the prompt"],
  ["decode", "writing"],
];

function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
}

function fold(className, title, ...children) {
  return element("details", className, element("summary", "", title), ...children);
}

/** "Why so long": what the server says of it, and a bar of the four parts that its time is made of. */
export function explanation(explain) {
  const bar = element("div", "bar");
  const legend = element("ul", "legend");
  for (const [name, words] of PARTS) {
    const milliseconds = Number(explain[`${name}_ms`]) || 0;
    const part = element("i", `part-${name}`);
    part.style.flexGrow = String(milliseconds);
    bar.append(part);
    legend.append(element("li", "", element("i", `part-${name}`), `${words} ${seconds(milliseconds)}`));
  }
  bar.setAttribute("aria-hidden", "true"); // the list says the same
  const more = [];
  if (explain.longest_gap_ms) more.push(`longest gap between two tokens ${seconds(explain.longest_gap_ms)}`);
  if (explain.preemptions) more.push(`preempted ${explain.preemptions} times`);
  if (explain.restarts) more.push(`restarted ${explain.restarts} times`);
  const why = fold("why", "Why so long?", element("p", "", String(explain.summary ?? "")), bar, legend);
  if (more.length) why.append(element("p", "small", `${more.join(", ")}.`));
  return why;
}

export class AnswerView {
  /** retry: what its button does. Times count from here. */
  constructor(retry) {
    this.view = new TextView();
    this.thought = null;
    this.calls = [];
    this.usage = null;
    this.explain = null;
    this.finishReason = "";
    this.began = performance.now();
    this.first = 0;
    this.last = 0;
    this.waiting = []; // texts that the next frame shows
    this.callsView = element("div", "calls");
    this.end = element("div");
    this.note = element("p", "facts");
    const again = element("div", "actions", button("Regenerate", retry));
    this.root = element("article", "answer", this.view.root, this.callsView, this.note, this.end, again);
    this.root.setAttribute("aria-label", "Answer");
    this.root.setAttribute("aria-live", "polite");
    this.root.setAttribute("aria-busy", "true"); // read aloud when it is whole, not word by word
  }

  /** What the model said, to be sent again with the next question. */
  get text() {
    return this.view.text + this.waiting.map(([view, text]) => (view === this.view ? text : "")).join("");
  }

  get isEmpty() {
    return !this.text && !this.calls.length && this.thought === null;
  }

  /** shown(): called whenever something new is to be seen. */
  add(chunk, shown) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.explain) this.explain = chunk.explain;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (!content && !reasoning && !calls) return;
    this.last = performance.now();
    this.first ||= this.last;
    this.note.textContent = "";
    if (reasoning) this.#show(this.#thought(), reasoning, shown);
    if (content) this.#show(this.view, content, shown);
    for (const call of calls ?? []) this.#addCall(call);
    if (calls) this.#showCalls(shown);
  }

  #thought() {
    if (this.thought === null) {
      this.thought = new TextView();
      this.root.prepend(fold("reasoning", "Reasoning", this.thought.root));
    }
    return this.thought;
  }

  /** Once a frame is enough for eyes, however fast tokens come. */
  #show(view, text, shown) {
    if (!this.waiting.length) requestAnimationFrame(() => this.#flush(shown));
    this.waiting.push([view, text]);
  }

  #flush(shown) {
    const waiting = this.waiting;
    this.waiting = [];
    for (const [view, text] of waiting) view.append(text);
    shown();
  }

  #addCall(delta) {
    const call = (this.calls[delta.index ?? this.calls.length] ??= { id: "", name: "", arguments: "" });
    if (delta.id) call.id = delta.id;
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
  }

  #showCalls(shown) {
    this.callsView.replaceChildren(
      ...this.calls.map((call) => {
        let given = call.arguments;
        try {
          given = JSON.parse(given);
        } catch {
          // Not whole yet, or no JSON: as it is.
        }
        const json = JSON.stringify({ name: call.name, arguments: given }, null, 2);
        return fold("call", `Call of ${call.name}`, element("pre", "", json));
      }),
    );
    for (const one of this.callsView.children) one.open = true;
    shown();
  }

  /** A word on what goes on, until something comes. */
  say(words) {
    this.note.textContent = words;
  }

  /** Nothing more comes. failure: an error's words; stopped: by whoever asked. */
  finish({ failure = "", stopped = false }) {
    this.#flush(() => {});
    this.view.finish();
    this.thought?.finish();
    this.root.setAttribute("aria-busy", "false");
    this.note.textContent = this.#facts(stopped);
    this.note.hidden = !this.note.textContent;
    if (failure) {
      const words = element("p", "error", failure);
      words.setAttribute("role", "alert");
      this.end.append(words);
    }
    if (this.explain) this.end.append(explanation(this.explain));
  }

  #facts(stopped) {
    const facts = [];
    const tokens = this.usage?.completion_tokens;
    if (tokens !== undefined) facts.push(`${tokens} tokens`);
    const took = this.last - this.began; // all of it: tokens that come together would make any other rate a fancy
    if (tokens && took > 0) facts.push(`${((1000 * tokens) / took).toFixed(1)} tokens/s`);
    if (this.first) facts.push(`first after ${seconds(this.first - this.began)}`);
    const prompt = this.usage?.prompt_tokens;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (prompt !== undefined) facts.push(`prompt ${prompt}${cached ? ` (${cached} cached)` : ""}`);
    if (stopped) facts.push("stopped");
    else if (this.finishReason === "length") facts.push("cut: max_tokens, or no more room");
    return facts.join(" \u00b7 ");
  }
}
