// Calls of the gateway that this page came from, errors as it words them, and streamed chats as events.

// What the API answered instead of a result.
export class ApiError extends Error {}

// The JSON at a path. Throws ApiError.
export async function getJson(path, key = null) {
  const response = await call(path, key, {});
  if (!response.ok) throw await readError(response);
  return response.json();
}

// A streamed chat: `onEvent` gets each event of the stream, parsed. Returns the request id. Throws ApiError, and
// AbortError when the signal stops it.
export async function streamChat(key, body, signal, onEvent) {
  const response = await call("/v1/chat/completions", key, {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await readError(response);
  const requestId = response.headers.get("x-penstock-request-id") ?? "";
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return requestId;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(describeError(event.error, "in the stream", requestId, null));
    onEvent(event, requestId);
  }
  throw new ApiError(`The stream ended before the answer did; request ${requestId}.`);
}

async function call(path, key, options) {
  const headers = { "content-type": "application/json" };
  if (key !== null) {
    if (!/^[\x21-\x7e]+$/.test(key)) throw new ApiError("A key has letters, digits and dashes only.");
    headers.authorization = `Bearer ${key}`;
  }
  try {
    return await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway could not be reached.");
  }
}

async function readError(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // no JSON: a proxy's page, whose status has to do
  }
  const { headers, status } = response;
  return new ApiError(
    describeError(error, String(status), headers.get("x-penstock-request-id"), headers.get("retry-after")),
  );
}

function describeError(error, where, requestId, retryAfter) {
  const kind = error.code ?? error.type;
  const parts = [`${where}${kind ? ` ${kind}` : ""}: ${error.message ?? "no explanation was given."}`];
  if (retryAfter) parts.push(`Try again after ${retryAfter} s.`);
  if (requestId) parts.push(`Request ${requestId}.`);
  return parts.join(" ");
}

// The data of each server-sent event (WHATWG HTML, 9.2), as far as the API uses them: one `data:` line or more.
export async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split(/\r?\n\r?\n/);
      rest = events.pop();
      for (const event of events) {
        const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // an aborted stream has nothing left to cancel
  }
}
