// The steps of a job for its charts: down-sampled by the manager, then only what is new.
import { get } from "./api.js";

const POINTS = 800;

export class Series {
  #job; #generation = null; #base = 0; #logged = new Map();

  /** One entry per bucket: {first, last, at (ms), generation, count, values}, with [min, mean, max] of each named series. */
  points = [];
  isDownSampled = false;

  constructor(job) { this.#job = encodeURIComponent(job); }

  /** The names of the series that have any value: the manager's own, then what the script has logged. */
  get names() {
    return [...Object.keys(this.points.at(-1)?.values ?? {}).filter((name) => this.pointsOf(name).length), ...this.#logged.keys()];
  }

  /** The entries that have a value under this name. */
  pointsOf(name) {
    return this.#logged.get(name) ?? this.points.filter((point) => point.values[name] && point.values[name][1] !== null);
  }

  /** Whether the script has logged what has this name. Each entry is one value then. */
  isLogged(name) { return this.#logged.has(name); }

  /** All entries, those of the script's values last. */
  get all() { return [...this.points, ...[...this.#logged.values()].flat()]; }

  async update(generations, signal) {
    const newest = generations.at(-1)?.number ?? null;
    const whole = newest !== this.#generation || this.points.length > 2 * Math.max(this.#base, 100);
    // A new generation may do steps again: what is known of them is over.
    const from = whole || !this.points.length ? 1 : this.points.at(-1).last + 1;
    const found = await get(`jobs/${this.#job}/metrics/buckets?points=${POINTS}&from_step=${from}`, signal);
    const names = Object.keys(found).filter((name) => Array.isArray(found[name]?.mean)); // any that the manager gives
    const points = found.first_step.map((first, index) => ({
      first, last: found.last_step[index], at: 1000 * found.at_unix_s[index], generation: found.generation[index], count: found.count[index],
      values: Object.fromEntries(names.map((name) => [name, [found[name].min[index], found[name].mean[index], found[name].max[index]]])),
    }));
    spread(points);
    if (from === 1) {
      [this.points, this.#base, this.#generation, this.isDownSampled] = [points, points.length, newest, found.bucket_steps > 1];
    } else {
      this.points.push(...points.filter((point) => point.first > (this.points.at(-1)?.last ?? 0)));
    }
    await this.#updateLogged(from === 1, signal);
  }

  async #updateLogged(isWhole, signal) {
    const known = [...this.#logged.values()].map((points) => points.at(-1).last);
    const after = isWhole || !known.length ? "" : `&after_step=${Math.min(...known)}`;
    const found = await get(`jobs/${this.#job}/metrics/logged?points=${POINTS}${after}`, signal);
    if (isWhole) this.#logged.clear();
    for (const one of found) {
      const name = this.points.at(-1)?.values[one.name] ? `${one.name} (script)` : one.name;
      const before = this.#logged.get(name) ?? [];
      const points = one.step.map((step, index) => ({
        first: step, last: step, at: 1000 * one.at_unix_s[index], generation: one.generation[index], count: 1,
        values: { [name]: Array(3).fill(one.value[index]) },
      }));
      const all = [...before, ...points.filter((point) => point.first > (before.at(-1)?.last ?? -1))];
      if (all.length) this.#logged.set(name, all);
    }
  }
}

/** The manager notes when a report came, and one may have several steps: each ended as long before the next as that took. */
function spread(points) {
  const came = points.map((point) => point.at);
  for (let index = points.length - 2; index >= 0; index -= 1) {
    const next = points[index + 1];
    if (came[index] === came[index + 1]) points[index].at = next.at - 1000 * next.count * (next.values.step_s?.[1] ?? 0);
  }
  points.forEach((point, index) => { if (index) point.at = Math.max(point.at, points[index - 1].at); });
}

/** The exponential moving average of a column, corrected for its beginning. `weight`: of what was before, 0 to 1. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    [sum, total] = [weight * sum + (1 - weight) * value, weight * total + (1 - weight)];
    return sum / total;
  });
}
