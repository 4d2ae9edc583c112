// Notifications of the browser about jobs that end and events that are bad, while the tab is not looked at.
import { h, put } from "./dom.js";
import { severity } from "./severity.js";

const KEY = "varuna-notify";
const ENDS = new Set(["job_succeeded", "job_failed", "job_cancelled"]);
const AGE_MS = 60_000; // what the stream brings later than this is the past

const isOn = () => "Notification" in window && Notification.permission === "granted" && localStorage.getItem(KEY) === "on";

/** The button that switches them on and off; it asks the browser for its permission. */
export function noticeButton() {
  const button = h("button", { type: "button", class: "plain", id: "notices", hidden: !("Notification" in window), on: { click: async () => {
    if (isOn()) localStorage.setItem(KEY, "off");
    else if (await Notification.requestPermission() === "granted") localStorage.setItem(KEY, "on");
    draw();
  } } });
  function draw() {
    const refused = "Notification" in window && Notification.permission === "denied";
    button.disabled = refused;
    button.setAttribute("aria-pressed", String(isOn()));
    button.title = refused ? "This browser refuses notifications from this page: allow them in its settings"
      : "Notify me when a job ends, or something is bad, while this tab is in the background";
    put(button, refused ? "Notifications refused" : isOn() ? "Notifications on" : "Notify me");
  }
  draw();
  return button;
}

export function notify(event) {
  if (!isOn() || !document.hidden || Date.now() - Date.parse(event.at) > AGE_MS) return;
  if (!ENDS.has(event.kind) && severity(event) !== "bad") return;
  const made = new Notification(`${event.job_name ?? event.vm_id ?? "Varuna"}: ${event.kind.replaceAll("_", " ")}`, { body: event.message, tag: `varuna-${event.id}` });
  made.addEventListener("click", () => {
    window.focus();
    if (event.job_id) location.hash = `#/jobs/${event.job_id}`;
    made.close();
  });
}
