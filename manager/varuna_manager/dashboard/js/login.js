// Asks for a token.
import { h } from "./dom.js";

export function loginForm(reason, onToken) {
  const input = h("input", { id: "token", type: "password", autocomplete: "off", required: true, placeholder: "vt1.…", "aria-describedby": "login-reason" });
  return h("form", {
    class: "card login", "aria-labelledby": "login-title",
    on: { submit: (event) => { event.preventDefault(); onToken(input.value.trim()); } },
  },
  h("h1", { id: "login-title" }, "Sign in"),
  h("label", { for: "token" }, "Token"), input,
  h("p", { id: "login-reason", class: "wrong", role: "alert" }, reason),
  h("button", { type: "submit", class: "main" }, "Sign in"),
  h("p", { class: "note" }, "An admin makes one with ", h("code", {}, "varuna token create NAME --role viewer"),
    ". It is kept in this tab only."));
}
