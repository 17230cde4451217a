// The API's description: every operation and schema of /openapi.json, as the gateway itself serves it.

import { getJson } from "./api.js";
import { byId, make, setAlert, setText } from "./elements.js";
import { describeFields, describeType } from "./schema.js";

const METHODS = ["get", "post", "put", "patch", "delete"];

function showDocument(document_) {
  const { title, version, description } = document_.info;
  setText("intro", `${title} ${version}. ${description}`);
  const operations = Object.entries(document_.paths).flatMap(([path, methods]) =>
    METHODS.filter((method) => method in methods).map((method) =>
      describeOperation(path, method, methods[method], methods.parameters ?? [], document_.security ?? []),
    ),
  );
  byId("operation-list").replaceChildren(...operations);
  const schemas = Object.entries(document_.components.schemas).map(([name, schema]) =>
    entry(`schema-${name}`, [make("h3", {}, name)], schema.description ?? "", describeFields(schema)),
  );
  byId("schema-list").replaceChildren(...schemas);
}

function describeOperation(path, method, operation, shared, security) {
  const isOpen = !(operation.security ?? security).length;
  const title = make("h3", {}, make("span", { class: "method" }, method.toUpperCase()), " ", make("code", {}, path));
  return entry(`operation-${operation.operationId}`, [title], operation.summary ?? "", [
    make("p", { class: "note" }, isOpen ? "Needs no key." : "Needs a key: Authorization: Bearer sk-penstock-..."),
    ...describeParameters([...shared, ...(operation.parameters ?? [])]),
    ...describeBody(operation.requestBody),
    ...describeResponses(operation.responses),
  ]);
}

function entry(id, title, summary, content) {
  const note = summary ? [make("span", { class: "note" }, summary)] : [];
  return make("details", { class: "entry", id }, make("summary", {}, ...title, ...note), make("div", {}, ...content));
}

function describeParameters(parameters) {
  if (!parameters.length) return [];
  const items = parameters.map((each) =>
    make("li", {}, make("code", {}, each.name), ` in the ${each.in}, `, ...describeType(each.schema), `: ${each.description ?? ""}`),
  );
  return [make("h4", {}, "Parameters"), make("ul", {}, ...items)];
}

function describeBody(body) {
  if (!body) return [];
  const forms = Object.entries(body.content).flatMap(([type, { schema }]) => [
    make("p", {}, make("code", {}, type), ": ", ...(schema.properties ? ["a form"] : describeType(schema))),
    ...(schema.properties ? describeFields(schema) : []),
  ]);
  return [make("h4", {}, "Body"), ...forms];
}

function describeResponses(responses) {
  const items = Object.entries(responses).map(([status, response]) => {
    const content = Object.entries(response.content ?? {}).flatMap(([type, { schema }]) => [
      make("br"),
      make("code", {}, type),
      ": ",
      ...(schema.description ? [schema.description, ". "] : []),
      ...describeType(schema.contentSchema ?? schema),
    ]);
    return make("li", {}, make("strong", {}, status), ` ${response.description ?? ""}`, ...content);
  });
  return [make("h4", {}, "Responses"), make("ul", {}, ...items)];
}

// Hides the entries that have not got all words in them.
function filter() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const element of document.querySelectorAll(".entry")) {
    const text = element.textContent.toLowerCase();
    element.hidden = !words.every((word) => text.includes(word));
    shown += !element.hidden;
  }
  setText("found", words.length ? `${shown} found` : "");
}

// Opens the entry that the address names, and goes there.
function openTarget() {
  const target = byId(decodeURIComponent(location.hash.slice(1)));
  if (!target?.classList.contains("entry")) return;
  target.hidden = false;
  target.open = true;
  target.scrollIntoView();
}

byId("filter").addEventListener("input", filter);
window.addEventListener("hashchange", openTarget);
try {
  showDocument(await getJson("/openapi.json"));
  openTarget();
} catch (error) {
  setAlert("error", error.message);
}
