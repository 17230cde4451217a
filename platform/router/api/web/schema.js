// JSON schemas (2020-12, as /openapi.json has them) as elements: a type in words, a table of fields.

import { make } from "./elements.js";

const REF = "#/components/schemas/";
const BOUNDS = {
  minimum: "at least",
  exclusiveMinimum: "more than",
  maximum: "at most",
  exclusiveMaximum: "less than",
  multipleOf: "a multiple of",
  minLength: "characters, at least",
  maxLength: "characters, at most",
  minItems: "items, at least",
  maxItems: "items, at most",
  pattern: "matches",
};
export const IGNORED = "Accepted and ignored";

// The type in words: texts and links.
export function describeType(schema) {
  if (typeof schema !== "object") return [schema === false ? "nothing" : "anything"];
  if (schema.$ref) {
    const name = schema.$ref.replace(REF, "");
    return [make("a", { href: `#schema-${name}` }, name)];
  }
  const alternatives = schema.anyOf ?? schema.oneOf;
  if (alternatives) return join(alternatives.map(describeType), " or ");
  if (schema.enum) return join(schema.enum.map((value) => [code(value)]), " or ");
  if ("const" in schema) return [code(schema.const)];
  if (schema.prefixItems) return ["array: ", ...join(schema.prefixItems.map(describeType), ", ")];
  if (schema.type === "array") return ["array of ", ...describeType(schema.items)];
  if (schema.type === "object" && typeof schema.additionalProperties === "object") {
    return ["object of ", ...describeType(schema.additionalProperties)];
  }
  if (Array.isArray(schema.type)) return [schema.type.join(" or ")];
  return [schema.type ?? "anything"];
}

// The fields of an object: a table, and those that are ignored or refused folded away. Another schema: its type.
export function describeFields(schema) {
  const properties = Object.entries(schema?.properties ?? {});
  if (!properties.length) return [make("p", {}, ...describeType(schema))];
  const required = new Set(schema.required ?? []);
  const groups = { used: [], ignored: [], refused: [] };
  for (const [name, field] of properties) {
    const group = field.deprecated ? "refused" : field.description === IGNORED ? "ignored" : "used";
    groups[group].push([name, field]);
  }
  groups.used.sort(([left], [right]) => required.has(right) - required.has(left));
  return [
    table(groups.used, required),
    ...folded("Accepted and ignored", groups.ignored, required),
    ...folded("Refused, but for the values that change nothing", groups.refused, required),
  ];
}

function folded(title, fields, required) {
  if (!fields.length) return [];
  return [make("details", {}, make("summary", {}, `${title} (${fields.length})`), table(fields, required))];
}

function table(fields, required) {
  const head = ["Field", "Type", "Notes"].map((text) => make("th", { scope: "col" }, text));
  const rows = fields.map(([name, field]) =>
    make(
      "tr",
      {},
      make("td", {}, make("code", {}, name), ...(required.has(name) ? [make("div", { class: "note" }, "required")] : [])),
      make("td", {}, ...describeType(field)),
      make("td", { class: "notes" }, notes(field)),
    ),
  );
  const body = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Fields" }, body);
}

function notes(field) {
  const parts = field.description ? [field.description] : [];
  for (const part of [field, ...(field.anyOf ?? [])]) {
    for (const [name, words] of Object.entries(BOUNDS)) {
      if (name in part) parts.push(`${words} ${part[name]}`);
    }
  }
  if ("default" in field && field.default !== null) parts.push(`default ${JSON.stringify(field.default)}`);
  return parts.join("; ");
}

function code(value) {
  return make("code", {}, JSON.stringify(value));
}

function join(lists, between) {
  return lists.flatMap((list, index) => (index ? [between, ...list] : list));
}
