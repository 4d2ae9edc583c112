// The generations of a job, page by page: the newest page each time, older ones once, for they are over.
import { getPage } from "./api.js";

const PAGE = 50;
const MOST = 1000;

export class Generations {
  #job = null; #byNumber = new Map(); #older = null;

  /** Those that are known, oldest first. */
  list = [];

  /** Ask for the newest page, and for what lies between it and those that are known. */
  async refresh(job, signal) {
    const known = job === this.#job ? this.list.at(-1)?.number : undefined;
    let page = await getPage(`jobs/${job}/generations?brief=true&order=desc&limit=${PAGE}`, signal);
    const found = [...page.items];
    while (known !== undefined && page.next && found.at(-1).number > known) {
      page = await getPage(page.next, signal);
      found.push(...page.items);
    }
    if (known === undefined) [this.#job, this.#byNumber, this.#older] = [job, new Map(), page.next];
    this.#add(found);
  }

  /** Ask for one more page of older ones. False: there is none, or as many are known as a chart can show. */
  async addOlder(signal) {
    if (!this.#older || this.list.length >= MOST) return false;
    const [job, page] = [this.#job, await getPage(this.#older, signal)];
    if (job === this.#job) {
      this.#older = page.next;
      this.#add(page.items);
    }
    return true;
  }

  #add(found) {
    found.forEach((one) => this.#byNumber.set(one.number, one));
    this.list = [...this.#byNumber.values()].sort((one, other) => one.number - other.number);
  }
}
