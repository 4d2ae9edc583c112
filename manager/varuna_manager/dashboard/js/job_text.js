// Jobs as YAML, and their JSON Schema as the manager gives it: what a setting means, and which values are the defaults.

let schema = null;

/** The manager's JSON Schema of jobs, with those that it refers to. */
export function loadSchema() {
  schema ??= fetch("openapi.json").then((answer) => answer.json()).then(({ components }) => components.schemas).catch((error) => { schema = null; throw error; });
  return schema;
}

const resolve = (schemas, place) => {
  const reference = place?.$ref ?? place?.allOf?.[0]?.$ref;
  return reference ? schemas[reference.split("/").at(-1)] : place;
};

/** The description of a setting, by its keys; null: none is known. */
export function findSetting(schemas, path) {
  if (!schemas) return null;
  let place = schemas.JobSpec;
  let words = null;
  for (const key of path) {
    const found = place?.properties?.[key];
    if (!found) return null;
    words = found.description ?? resolve(schemas, found)?.description ?? null;
    place = resolve(schemas, found);
  }
  return words;
}

/** The keys of the line in which `position` is, by indentation; null: it has none. */
export function pathAt(text, position) {
  const lines = text.slice(0, position).split("\n");
  lines[lines.length - 1] += text.slice(position).split("\n")[0];
  const path = [];
  let indent = Infinity;
  for (const line of lines.reverse()) {
    const found = /^(\s*)([\w-]+)\s*:/.exec(line);
    if (!found) { if (!path.length) return null; else continue; }
    if (found[1].length >= indent) continue;
    indent = found[1].length;
    path.unshift(found[2]);
    if (indent === 0) return path;
  }
  return null;
}

/** A job's spec as YAML, without what is the default. */
export function writeJob(spec, schemas) {
  const order = Object.keys(schemas?.JobSpec?.properties ?? {});
  const keys = Object.keys(spec).sort((one, other) => order.indexOf(one) - order.indexOf(other));
  return writeLines(Object.fromEntries(keys.map((key) => [key, spec[key]])), schemas?.JobSpec, schemas, "");
}

function writeLines(values, place, schemas, indent) {
  let text = "";
  for (const [key, value] of Object.entries(values)) {
    const setting = place?.properties?.[key];
    if (value === null || (setting && "default" in setting && same(value, setting.default))) continue;
    const name = /^[A-Za-z_][\w.-]*$/.test(key) ? key : JSON.stringify(key);
    if (value && typeof value === "object" && !Array.isArray(value)) {
      const inner = writeLines(value, resolve(schemas ?? {}, setting), schemas, `${indent}  `);
      if (inner) text += `${indent}${name}:\n${inner}`;
    } else text += `${indent}${name}: ${scalar(value)}\n`;
  }
  return text;
}

const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
// A text that YAML could read as something else is quoted; JSON's quotes are YAML's.
const isPlain = (text) => /^[A-Za-z/.][\w ./=@+-]*$/.test(text) && !/\s$/.test(text) && !/^(true|false|yes|no|on|off|null|y|n|\.nan|\.inf)$/i.test(text) && Number.isNaN(Number(text));
const scalar = (value) => (typeof value === "string" && isPlain(value) ? value : JSON.stringify(value));
