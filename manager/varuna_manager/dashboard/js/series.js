// The steps of a job for its charts: down-sampled by the manager, then only what is new.
import { get } from "./api.js";

const POINTS = 800;

export class Series {
  #job; #generation = null; #base = 0;

  /** One entry per bucket: {first, last, at (ms), generation, count, loss, rate} with [min, mean, max]. */
  points = [];
  isDownSampled = false;

  constructor(job) { this.#job = encodeURIComponent(job); }

  async update(generations, signal) {
    const newest = generations.at(-1)?.number ?? null;
    const whole = newest !== this.#generation || this.points.length > 2 * Math.max(this.#base, 100);
    // A new generation may do steps again: what is known of them is over.
    const from = whole || !this.points.length ? 1 : this.points.at(-1).last + 1;
    const found = await get(`jobs/${this.#job}/metrics/buckets?points=${POINTS}&from_step=${from}`, signal);
    const points = found.first_step.map((first, index) => ({
      first, last: found.last_step[index], at: 1000 * found.at_unix_s[index], generation: found.generation[index], count: found.count[index],
      loss: spread(found.loss, index), rate: spread(found.examples_per_s, index), stepS: found.step_s.mean[index],
    }));
    if (from === 1) {
      [this.points, this.#base, this.#generation, this.isDownSampled] = [points, points.length, newest, found.bucket_steps > 1];
    } else {
      this.points.push(...points.filter((point) => point.first > (this.points.at(-1)?.last ?? 0)));
    }
  }
}

const spread = (columns, index) => [columns.min[index], columns.mean[index], columns.max[index]];
