/** The conversation: questions and answers in order, and what can be done with the last ones. */

import { AnswerView } from "./answer.js";
import { button, element } from "./text.js";

export class Chat {
  /**
   * log: where it is shown. request(messages): what to ask, and {server, body}; may throw what is wrong with the
   * settings. edit(text): puts a question back where it is written. changed(isBusy): when it begins or ends to write.
   */
  constructor(log, { request, edit, changed }) {
    this.log = log;
    this.request = request;
    this.edit = edit;
    this.changed = changed;
    this.exchanges = [];
    this.aborting = null;
  }

  get isBusy() {
    return this.aborting !== null;
  }

  get last() {
    return this.exchanges.at(-1);
  }

  /** Ask, in place of the last question if `replaces`. */
  send(question, { replaces = false } = {}) {
    if (this.isBusy) return;
    if (replaces) this.exchanges.pop()?.root.remove();
    const exchange = { question, answer: null, root: element("section", "exchange") };
    const actions = element("div", "actions", button("Edit", () => this.edit(question)));
    const words = element("div", "question", element("p", "", question), actions);
    words.setAttribute("aria-label", "You");
    words.setAttribute("role", "group");
    exchange.root.append(words);
    this.exchanges.push(exchange);
    this.log.append(exchange.root);
    this.#answer();
  }

  /** Another answer to the last question. */
  regenerate() {
    if (this.isBusy || !this.last) return;
    this.last.answer?.root.remove();
    this.last.answer = null;
    this.#answer();
  }

  /** The connection is closed, by which the server knows that nobody waits any more. */
  stop() {
    this.aborting?.abort();
  }

  clear() {
    this.stop();
    for (const exchange of this.exchanges) exchange.root.remove();
    this.exchanges = [];
  }

  get #messages() {
    return this.exchanges
      .filter(({ answer }, index) => index === this.exchanges.length - 1 || !answer.isEmpty)
      .flatMap(({ question, answer }) => [
        { role: "user", content: question },
        ...(answer ? [{ role: "assistant", content: answer.text }] : []),
      ]);
  }

  async #answer() {
    const messages = this.#messages;
    const answer = new AnswerView(() => this.regenerate());
    const aborting = (this.aborting = new AbortController());
    this.last.answer = answer;
    this.last.root.append(answer.root);
    this.#busy(true);
    const follow = this.#follower();
    follow(true);
    const end = { failure: "", stopped: false };
    try {
      const { server, body } = this.request(messages);
      const lost = () => answer.say("The connection broke off; fetching the rest.");
      for await (const chunk of server.chat(body, aborting.signal, lost)) answer.add(chunk, follow);
    } catch (error) {
      end.stopped = aborting.signal.aborted;
      if (!end.stopped) end.failure = error.words ?? error.message;
    }
    answer.finish(end);
    this.aborting = null;
    this.#busy(false); // the buttons below the answer come back
    follow();
  }

  #busy(isBusy) {
    this.log.toggleAttribute("data-busy", isBusy);
    this.changed(isBusy);
  }

  /** Keeps the end in view for those who were there, and leaves alone those who read further up. */
  #follower() {
    let wasAt = this.log.scrollTop;
    let follows = true;
    return (isNew = false) => {
      if (this.log.scrollTop < wasAt - 4) follows = false;
      if (this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 4) follows = true;
      if (follows || isNew) this.log.scrollTop = this.log.scrollHeight;
      wasAt = this.log.scrollTop;
    };
  }
}
