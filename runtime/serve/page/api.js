// Calls of the server that this page came from.
"use strict";

/** What went wrong, as a sentence to show. `status` is HTTP's, if there was an answer. */
class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** fetch, with the key if there is one. Throws Problem, or AbortError when stopped. */
async function call(path, key, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && /headers/i.test(error.message)) {
      throw new Problem("The API key holds characters that no key has. Enter it again.", 401);
    }
    throw new Problem("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response, key);
  return response;
}

async function refusal(response, key) {
  if (response.status === 401) {
    const message = key
      ? "The server does not accept this API key. Enter another one."
      : "This server asks for an API key. Enter yours.";
    return new Problem(message, 401);
  }
  let message = `The server answered with status ${response.status}.`;
  try {
    message = sentence((await response.json()).error.message);
  } catch {
    // not ours, such as a proxy's page
  }
  const wait = Number(response.headers.get("Retry-After"));
  if (wait > 0) message += ` Try again in ${wait} s.`;
  return new Problem(message, response.status);
}

/** A message of the server as a sentence. */
function sentence(message) {
  const text = String(message);
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** The objects of a stream of server-sent events, up to its [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      read = { done: true };
    }
    if (read.done) throw new Problem("The connection broke before the answer was complete.");
    const parts = (rest + read.value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Problem(sentence(event.error.message));
      yield event;
    }
  }
}
