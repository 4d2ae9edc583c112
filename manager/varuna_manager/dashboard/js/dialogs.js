// Dialogs with a form.
import { h, put } from "./dom.js";

/** A dialog with a form; `act` is awaited, and what it throws is shown. Resolves with its result, or null. */
export function ask(title, content, verb, act, { danger = false, wide = false } = {}) {
  const problem = h("p", { class: "wrong", role: "alert" });
  const go = h("button", { type: "submit", class: danger ? "danger" : "main" }, verb);
  const back = h("button", { type: "button", on: { click: () => dialog.close() } }, danger ? "Keep it" : "Back");
  let result = null;
  const form = h("form", { on: { submit: async (event) => {
    event.preventDefault();
    go.disabled = true;
    put(problem);
    try {
      result = await act(form);
      dialog.close();
    } catch (error) {
      const fields = (error.errors ?? []).map(({ field, text }) => h("span", {}, h("br"), field ? `${field}: ` : "", text));
      put(problem, error.message, fields);
    } finally {
      go.disabled = false;
    }
  } } }, h("h2", { id: "dialog-title" }, title), content, problem, h("div", { class: "buttons" }, back, go));
  const dialog = h("dialog", { class: wide ? "wide" : null, "aria-labelledby": "dialog-title" }, form);
  document.body.append(dialog);
  dialog.showModal();
  const close = () => dialog.close();
  addEventListener("hashchange", close); // it belongs to the page that is left
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => { removeEventListener("hashchange", close); dialog.remove(); resolve(result); }, { once: true });
  });
}
