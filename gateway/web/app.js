/** Joins the page's elements with the conversation, the settings, the key and the strip. */

import { Server } from "./api.js";
import { Chat } from "./chat.js";
import { Settings } from "./settings.js";
import { State } from "./state.js";

const find = (id) => document.getElementById(id);
const settings = new Settings();
const state = new State(find);
let server = null;

// -- the conversation ------------------------------------------------------------------------------------------------

const message = find("message");
let isEditing = false;

function setEditing(text) {
  isEditing = text !== null;
  find("editing").hidden = !isEditing;
  message.value = text ?? "";
  message.focus();
}

const chat = new Chat(find("log"), {
  request(messages) {
    const body = settings.body(messages);
    server ??= newServer();
    return { server, body };
  },
  edit: setEditing,
  changed(isBusy) {
    find("stop").hidden = !isBusy;
    find("send").hidden = isBusy;
    find("empty").hidden = chat.exchanges.length > 0;
    if (!isBusy && document.activeElement === document.body) message.focus();
  },
});

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = message.value;
  if (!question.trim() || chat.isBusy) return;
  const replaces = isEditing;
  setEditing(null);
  chat.send(question, { replaces });
});

message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("composer").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || find("key").open) return;
  if (chat.isBusy) chat.stop();
  else if (isEditing) setEditing(null);
});

find("stop").addEventListener("click", () => chat.stop());
find("cancel-edit").addEventListener("click", () => setEditing(null));
find("clear").addEventListener("click", () => {
  chat.clear();
  find("empty").hidden = false;
  setEditing(null);
});

// -- the server ------------------------------------------------------------------------------------------------------

/** The key that is typed in; null if none is. */
function askKey(words) {
  const dialog = find("key");
  const value = find("key-value");
  find("key-words").textContent = words;
  value.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue ? value.value.trim() : null);
      value.value = "";
    }, { once: true });
  });
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  find("key").close("given");
});
find("key-cancel").addEventListener("click", () => find("key").close(""));

function newServer() {
  return new Server(settings.serverUrl, askKey);
}

function notify(words) {
  find("notice").textContent = words;
  find("notice").hidden = !words;
}

/** Look at the server that is set: its models, and how it is. */
async function connect() {
  const select = find("model");
  select.replaceChildren();
  state.watch(null);
  server = null;
  let asked = null;
  try {
    asked = server = newServer();
    const names = await asked.models();
    if (asked !== server) return; // another one was set meanwhile
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (!names.includes(settings.values.model)) settings.set("model", names[0] ?? "");
    select.value = settings.values.model;
    notify("");
    state.watch(server);
  } catch (error) {
    if (asked === server) notify(error.words ?? error.message);
  }
}

// -- the settings ----------------------------------------------------------------------------------------------------

for (const name of ["temperature", "top_p", "max_tokens", "seed", "system", "more", "server"]) {
  const field = find(name);
  field.value = settings.values[name];
  field.addEventListener("input", () => settings.set(name, field.value));
}
find("model").addEventListener("change", (event) => settings.set("model", event.target.value));
find("server").placeholder = new URL(".", location.href).href;
find("server").addEventListener("change", connect);
find("cors").textContent = `--cors-origins ${location.origin}`;
find("forget-key").addEventListener("click", () => {
  server?.forgetKey();
  connect();
});
find("show-settings").addEventListener("click", (event) => {
  const isShown = find("settings").toggleAttribute("hidden") === false;
  event.currentTarget.setAttribute("aria-expanded", String(isShown));
});

connect();
