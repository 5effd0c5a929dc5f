/** Model text as elements. It only ever becomes the data of text nodes, so nothing in it is markup. */

/** An element with a class, texts and other elements in it. */
export function element(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** A button that does something when pressed. */
export function button(words, action) {
  const made = element("button", "", words);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const MARKS = /^ {0,3}(`*|~*)$/; // what may still become one

/**
 * Text that grows: fenced code in `pre`, all else in paragraphs. Only its last block is ever touched again, so a long
 * answer costs no more for a token than a short one.
 */
export class TextView {
  constructor() {
    this.root = element("div", "text");
    this.text = ""; // all of it, as it came
    this.rest = ""; // its last line, which may go on
    this.block = null; // the text node that is written to
    this.fence = ""; // what closes the code that is open
  }

  append(text) {
    this.text += text;
    const lines = (this.rest + text).split("\n");
    this.#take();
    this.rest = lines.pop();
    for (const line of lines) this.#line(line);
    if (!MARKS.test(this.rest) && !FENCE.test(this.rest)) this.#lend(this.rest);
  }

  /** Nothing more comes: what might have become a fence is shown as it is. */
  finish() {
    const last = this.rest;
    this.#take();
    this.rest = "";
    if (last) this.#line(last);
  }

  #line(line) {
    if (this.fence) {
      if (this.#closes(line)) {
        this.fence = "";
        this.block = null;
      } else {
        this.#write(`${line}\n`);
      }
      return;
    }
    const opening = FENCE.exec(line);
    if (opening) {
      this.fence = opening[1];
      this.#open("pre");
    } else if (line.trim() === "") {
      this.block = null;
    } else {
      this.#write(this.block && this.block.kept ? `\n${line}` : line);
    }
  }

  #closes(line) {
    const mark = line.trim();
    return mark.length >= this.fence.length && [...mark].every((char) => char === this.fence[0]);
  }

  #open(name) {
    const node = document.createTextNode("");
    this.block = { node, kept: "" };
    this.root.append(element(name, "", name === "pre" ? element("code", "", node) : node));
  }

  #write(text) {
    if (!this.block) this.#open("p");
    this.block.kept += text;
    this.block.node.data = this.block.kept;
  }

  /** Show a line that is not over yet; it is taken back before what comes next. */
  #lend(line) {
    if (!this.block) this.#open("p");
    this.block.node.data = this.block.kept + (this.fence || !this.block.kept ? "" : "\n") + line;
  }

  #take() {
    if (this.block) this.block.node.data = this.block.kept;
  }
}
