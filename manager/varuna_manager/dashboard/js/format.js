// Numbers, times and sizes as people read them. A null is a dash.
const DASH = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const missing = (value) => value === null || value === undefined || Number.isNaN(value);

export const count = (value) => (missing(value) ? DASH : whole.format(value));

/** "1 GPU", "2 GPUs", "– GPUs". */
export const countOf = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Three or so significant digits. */
export function number(value, digits = 3) {
  if (missing(value)) return DASH;
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e9)) return value.toExponential(2);
  if (Math.abs(value) >= 1000) return whole.format(value);
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, 1) });
}

export const loss = (value) => (missing(value) ? DASH : number(value, 5));
export const percent = (share, digits = 0) => (missing(share) ? DASH : `${(100 * share).toFixed(digits)} %`);
export const signedPercent = (share) => (missing(share) ? DASH : `${share > 0 ? "+" : ""}${(100 * share).toFixed(1)} %`);
export const shape = (p, d) => (p && d ? `${p}×${d}` : DASH);

// Which digits and units a value gets follows from what it is rounded to: else 59.97 would be "60.0 s", and 7190 "1 h 60 min".
export function money(value) {
  if (missing(value)) return DASH;
  if (value < 0.9995) return value.toFixed(3);
  return value < 999.995 ? value.toFixed(2) : whole.format(value);
}

/** Three digits, or those before the point if they are more: toPrecision writes 1010 as "1.01e+3". */
const threeDigits = (value) => (value < 999.5 ? value.toPrecision(3) : value.toFixed(0));

export function seconds(value) {
  if (missing(value)) return DASH;
  if (value < 0.0009995) return `${(1e6 * value).toFixed(0)} µs`;
  if (value < 0.9995) return `${threeDigits(1000 * value)} ms`;
  if (value < 59.95) return `${threeDigits(value)} s`;
  const [inSeconds, inMinutes, inHours] = [1, 60, 3600].map((unit) => Math.round(value / unit));
  if (inSeconds < 3600) return `${Math.floor(inSeconds / 60)} min ${inSeconds % 60} s`;
  if (inMinutes < 24 * 60) return `${Math.floor(inMinutes / 60)} h ${inMinutes % 60} min`;
  return `${Math.floor(inHours / 24)} d ${inHours % 24} h`;
}

export function bytes(value) {
  if (missing(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (Math.round(value) >= 1024 && power < units.length - 1) { value /= 1024; power += 1; }
  return `${power === 0 ? Math.round(value) : threeDigits(value)} ${units[power]}`;
}

export function clock(at) {
  if (missing(at)) return DASH;
  const time = new Date(at);
  const today = time.toDateString() === new Date().toDateString();
  const text = time.toLocaleTimeString("en-GB");
  return today ? text : `${time.toLocaleDateString("en-CA")} ${text}`;
}

/** A moment in full, with its date and zone. */
const inFull = new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long" });
export const fullTime = (at) => inFull.format(new Date(at));

export const secondsSince = (at) => (missing(at) ? null : Math.max(0, (Date.now() - new Date(at).getTime()) / 1000));

/** "12 s ago"; coarse, so that tables do not change each second. */
export function age(at) {
  const passed = secondsSince(at);
  if (passed === null) return DASH;
  if (passed < 5) return "just now";
  if (passed < 60) return `${Math.floor(passed / 5) * 5} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h ago`;
  return `${Math.floor(passed / 86400)} d ago`;
}
