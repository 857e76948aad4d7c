"use strict";
const every = 2000;
const box = document.getElementById("live");
const told = document.getElementById("told");
box.parentElement.hidden = false;
let answered = new Date();
async function renew() {
  if (box.checked && !document.hidden) {
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(5 * every) });
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      document.querySelector("main").replaceWith(fresh);
      answered = new Date();
      told.textContent = "";
    } catch {
      told.textContent = "no answer since " + answered.toLocaleTimeString();
    }
  }
  setTimeout(renew, every);
}
setTimeout(renew, every);
