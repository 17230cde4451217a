// The overview: what runs, and a playground that streams chats with the reader's own key.
//
// The key is kept in the field that it was typed into, and in the tab's session storage only where the reader asks for
// that. Nothing is polled: requests with a key count among its tenant's requests per minute.

import { getJson, streamChat } from "./api.js";
import { byId, make, setAlert, setText } from "./elements.js";

const STORED_KEY = "penstock-key";

let turns = []; // messages of the conversation, as the API takes them
let stopping = null; // AbortController of the answer under way

async function showPublicState() {
  setText("base-url", `${location.origin}/v1`);
  try {
    setText("version", (await getJson("/version")).version);
    const ready = await fetch("/readyz", { cache: "no-store" });
    setText("state", ready.ok ? "ready" : "no replica is connected");
  } catch {
    setText("state", "not reached");
  }
}

async function useKey() {
  const key = readKey();
  setAlert("key-error", "");
  storeKey(key);
  try {
    showStatus(await getJson("/v1/status", key));
  } catch (error) {
    showStatus({ models: [] });
    setAlert("key-error", error.message);
  }
}

function showStatus(status) {
  if (status.version) setText("version", status.version);
  if ("ready" in status) setText("state", status.ready ? "ready" : "no replica is connected");
  const rows = status.models.map((model) =>
    make(
      "tr",
      {},
      make("td", {}, make("code", {}, model.id)),
      make("td", {}, String(model.replicas)),
      make("td", {}, model.max_model_len.toLocaleString("en")),
    ),
  );
  byId("model-rows").replaceChildren(...rows);
  byId("models").hidden = !rows.length;
  byId("model-names").replaceChildren(...status.models.map((model) => make("option", { value: model.id })));
  if (!byId("model").value && rows.length) byId("model").value = status.models[0].id;
}

function readKey() {
  return byId("key").value.trim();
}

function storeKey(key) {
  if (byId("keep").checked) sessionStorage.setItem(STORED_KEY, key);
  else sessionStorage.removeItem(STORED_KEY);
}

function readRequest() {
  const number = (id) => (byId(id).value === "" ? {} : { [id.replace("-", "_")]: Number(byId(id).value) });
  const system = byId("system").value;
  return {
    model: byId("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    ...number("temperature"),
    ...number("max-tokens"),
    ...number("seed"),
  };
}

function addTurn(role, text) {
  const body = make("span", { class: "text" }, text);
  byId("conversation").append(make("div", { class: `turn ${role}` }, make("span", { class: "who" }, role), body));
  return body;
}

// Adds to what the model thinks before its answer, in a part of its own that the reader may close.
function addThinking(answer, text) {
  const turn = answer.parentElement;
  if (!turn.querySelector(".thinking")) {
    const part = make("details", { class: "thinking", open: "" }, make("summary", {}, "thinking"), make("span"));
    answer.before(part);
  }
  turn.querySelector(".thinking span").append(text);
}

async function send() {
  if (stopping) return;
  const conversation = turns;
  const key = readKey();
  if (!key) {
    setAlert("error", "An API key is needed: type it in above.");
    byId("key").focus();
    return;
  }
  conversation.push({ role: "user", content: byId("message").value });
  const mine = addTurn("user", byId("message").value).parentElement;
  const answer = addTurn("assistant", "");
  setAlert("error", "");
  begin();
  const figures = new Figures();
  try {
    await streamChat(key, readRequest(), stopping.signal, (event, requestId) => {
      const delta = figures.take(event, requestId);
      if (delta.reasoning_content) addThinking(answer, delta.reasoning_content);
      answer.append(delta.content ?? "");
      figures.show();
    });
    setText("progress", "The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") {
      setText("progress", "Stopped; usage is told at an answer's end only.");
      figures.show("stopped");
    } else {
      setText("progress", "");
      setAlert("error", error.message);
    }
  }
  end(conversation, answer, mine);
}

function begin() {
  stopping = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  setText("progress", "Waiting for the answer ...");
}

function end(conversation, answer, mine) {
  stopping = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
  if (answer.textContent || answer.parentElement.querySelector(".thinking")) {
    conversation.push({ role: "assistant", content: answer.textContent });
    byId("message").value = "";
  } else {
    conversation.pop(); // the message stays in its field, to be sent again
    answer.parentElement.remove();
    mine.remove();
  }
  byId("message").focus();
}

// What a stream tells of itself, times on this page's clock.
class Figures {
  constructor() {
    this.sentMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.usage = null;
    this.finish = null;
    this.requestId = "";
  }

  // The delta of an event.
  take(event, requestId) {
    this.requestId = requestId;
    this.usage = event.usage ?? this.usage;
    const [choice] = event.choices;
    this.finish = choice?.finish_reason ?? this.finish;
    const delta = choice?.delta ?? {};
    if (delta.content || delta.reasoning_content) {
      this.lastMs = performance.now();
      this.firstMs ??= this.lastMs;
    }
    return delta;
  }

  show(finish = this.finish) {
    const spanS = (this.lastMs - this.firstMs) / 1000;
    const tokens = this.usage?.completion_tokens;
    setText("ttft", this.firstMs === null ? "–" : `${Math.round(this.firstMs - this.sentMs)} ms`);
    setText("rate", tokens > 1 && spanS > 0 ? ((tokens - 1) / spanS).toFixed(1) : "–");
    setText("prompt-tokens", this.usage?.prompt_tokens ?? "–");
    setText("cached-tokens", this.usage?.prompt_tokens_details?.cached_tokens ?? "–");
    setText("completion-tokens", tokens ?? "–");
    setText("finish", finish ?? "–");
    setText("request-id", this.requestId || "–");
  }
}

function listen() {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey();
  });
  byId("keep").addEventListener("change", () => storeKey(readKey()));
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => stopping?.abort());
  byId("clear").addEventListener("click", () => {
    stopping?.abort();
    turns = [];
    byId("conversation").replaceChildren();
    setAlert("error", "");
    setText("progress", "");
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat-form").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stopping?.abort();
  });
}

listen();
showPublicState();
const stored = sessionStorage.getItem(STORED_KEY);
if (stored) {
  byId("key").value = stored;
  byId("keep").checked = true;
  useKey();
}
