/** Talks to a server with OpenAI's API: keys, errors in words, and streams that outlive their connection. */

const RESUME_PATIENCE_MS = 30_000; // as the server keeps a stream whose gateway died
const FIRST_PATIENCE_MS = 4_000; // where nothing has come yet, there may be no server at all
const RETRY_MS = 300;

/** An answer that is not 200, or the error event of a stream. */
export class ApiError extends Error {
  constructor(status, error, retryMs = 0) {
    super(error.message || `The server answered ${status}.`);
    this.status = status;
    this.code = error.code || "";
    this.param = error.param || "";
    this.retryMs = retryMs;
  }

  get words() {
    const status = this.status ? ` (${this.status})` : "";
    const retry = this.retryMs ? ` Try again in ${Math.ceil(this.retryMs / 1000)} s.` : "";
    return `${this.message}${status}${retry}`;
  }
}

/** No answer at all, or one that broke off and cannot be taken up again. */
export class Unreachable extends Error {
  get words() {
    return this.message;
  }
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error || {};
  } catch {
    // No JSON: the status has to do.
  }
  if (typeof error === "string") error = { message: error };
  const milliseconds = Number(response.headers.get("retry-after-ms"));
  return new ApiError(response.status, error, milliseconds || Number(response.headers.get("retry-after")) * 1000 || 0);
}

/** Yields `{id, data}` of each event. Throws `Unreachable` if reading fails, and what an abort throws. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let id = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const ended of lines) {
        const line = ended.endsWith("\r") ? ended.slice(0, -1) : ended;
        if (line.startsWith("id:")) id = line.slice(3).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line === "" && data.length) {
          yield { id, data: data.join("\n") };
          data = [];
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The connection broke off.");
  } finally {
    reader.cancel().catch(() => {}); // of a connection that is gone there is nothing left to cancel
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

// `crypto.randomUUID` is there on https and localhost alone.
function newRequestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `ui-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

export class Server {
  /**
   * url: the server's root, with a slash at its end. askKey(words): the key that a person gives, null for none.
   * Keys are kept for each server by itself, so that none is told to another one.
   */
  constructor(url, askKey) {
    this.url = url;
    this.askKey = askKey;
    this.knowsExplain = true;
    this.asking = null;
  }

  get #keyName() {
    return `novainfer key of ${this.url}`;
  }

  get key() {
    return sessionStorage.getItem(this.#keyName) || "";
  }

  forgetKey() {
    sessionStorage.removeItem(this.#keyName);
  }

  /** The answer, whatever its status; asks for a key and tries again on 401, unless it is `quiet`. */
  async fetch(path, { quiet = false, ...init } = {}) {
    for (;;) {
      const key = this.key;
      const headers = { ...init.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
      let response;
      try {
        response = await fetch(new URL(path, this.url), { cache: "no-store", credentials: "omit", ...init, headers });
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Unreachable(this.#noAnswer());
      }
      if (response.status !== 401 || quiet) return response;
      if (key === this.key && !(await this.#newKey(key))) throw await errorOf(response);
    }
  }

  #noAnswer() {
    const words = `No answer from ${this.url}.`;
    if (new URL(this.url).origin === location.origin) return words;
    return `${words} If a server is there, it has to allow this page: --cors-origins ${location.origin}`;
  }

  /** One question at a time, whoever needs the answer. */
  async #newKey(refused) {
    const words = refused ? "The server refused this API key." : "This server wants an API key.";
    this.asking ??= this.askKey(words).finally(() => (this.asking = null));
    const key = await this.asking;
    if (key) sessionStorage.setItem(this.#keyName, key);
    return Boolean(key);
  }

  /** The names of its models. */
  async models() {
    const response = await this.fetch("v1/models");
    if (!response.ok) throw await errorOf(response);
    return (await response.json()).data.map((model) => model.id);
  }

  /**
   * Yields the chunks of a streamed chat. A stream whose gateway died is taken up again behind the last event that
   * came; lost() is told so, each time. Throws `ApiError`, `Unreachable`, and what an abort throws.
   */
  async *chat(body, signal, lost) {
    let key = newRequestId();
    let after = "";
    let response = null;
    try {
      response = await this.#begin(body, key, signal);
    } catch (error) {
      if (!(error instanceof Unreachable)) throw error;
      // It may have begun all the same: the answer's head comes with its first token.
      response = await this.#resume(key, after, signal, error, FIRST_PATIENCE_MS);
    }
    for (;;) {
      let broken = new Unreachable("The connection broke off.");
      try {
        for await (const { id, data } of events(response.body)) {
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new ApiError(0, chunk.error);
          key = chunk.id || key;
          after = id || after;
          yield chunk;
        }
      } catch (error) {
        if (!(error instanceof Unreachable)) throw error;
        broken = error;
      }
      lost();
      response = await this.#resume(key, after, signal, broken, RESUME_PATIENCE_MS);
    }
  }

  async #begin(body, requestId, signal) {
    const headers = { "content-type": "application/json", "x-request-id": requestId };
    for (;;) {
      const asked = this.knowsExplain ? { ...body, explain: true } : body;
      const response = await this.fetch("v1/chat/completions", {
        method: "POST",
        headers,
        body: JSON.stringify(asked),
        signal,
      });
      if (response.ok) return response;
      const error = await errorOf(response);
      if (!(this.knowsExplain && error.status === 400 && error.param === "explain")) throw error;
      this.knowsExplain = false;
    }
  }

  async #resume(key, after, signal, broken, patience) {
    const until = performance.now() + patience;
    const path = `v1/streams/${encodeURIComponent(key)}${after && `?after=${encodeURIComponent(after)}`}`;
    for (;;) {
      let wait = RETRY_MS;
      let response = null;
      try {
        response = await this.fetch(path, { signal });
      } catch (error) {
        if (!(error instanceof Unreachable)) throw error; // its successor may not be there yet
      }
      if (response?.ok) return response;
      if (response !== null) {
        const error = await errorOf(response);
        // It had not begun, was dropped, or this server takes up no streams.
        if (error.status === 404) throw new Unreachable(`${broken.message} There is nothing left of this answer to fetch.`);
        if (error.status !== 503 && error.code !== "stream_in_use") throw error;
        wait = Math.max(error.retryMs, RETRY_MS);
      }
      if (performance.now() + wait > until) throw broken;
      await pause(wait, signal);
    }
  }
}
