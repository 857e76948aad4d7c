"use strict";
const every = 2000;
const box = document.getElementById("live");
const message = document.getElementById("status");
box.parentElement.hidden = false;
let answered = new Date();
async function refresh() {
  if (box.checked && !document.hidden) {
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(5 * every) });
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      document.querySelector("main").replaceWith(fresh);
      answered = new Date();
      message.textContent = "";
    } catch {
      message.textContent = "no answer since " + answered.toLocaleTimeString();
    }
  }
  setTimeout(refresh, every);
}
setTimeout(refresh, every);
