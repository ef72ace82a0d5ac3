// SPDX-License-Identifier: Apache-2.0
// Theme, local times, live list, zoom of the waterfall. The pages work without it.
const root = document.documentElement;
const kept = (key, value) => { try { return value === undefined ? localStorage.getItem(key) : localStorage.setItem(key, value); } catch { return null; } };
if (kept("theme")) root.dataset.theme = kept("theme");
document.getElementById("theme")?.addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  kept("theme", root.dataset.theme);
});

function times(within) {
  for (const each of within.querySelectorAll("time")) {
    const at = new Date(each.dateTime);
    each.textContent = at.toLocaleTimeString();
    each.title = at.toString();
  }
}
times(document);

const live = document.getElementById("live");
if (live) {
  live.checked = kept("live") === "1";
  live.addEventListener("change", () => kept("live", live.checked ? "1" : "0"));
  setInterval(async () => {
    const old = document.getElementById("fresh");
    if (!live.checked || document.hidden || !old) return;
    try {
      const answer = await fetch(location.href);
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("fresh");
      const open = [...old.querySelectorAll("details")].map((each) => each.open);
      [...fresh.querySelectorAll("details")].forEach((each, at) => { each.open = open[at] ?? false; });
      times(fresh);
      old.replaceWith(fresh);
    } catch { /* the server is away; the next turn asks again */ }
  }, 3000);
}

const words = (us) => us < 1000 ? `${us.toFixed(0)} µs` : us < 1e5 ? `${(us / 1000).toFixed(2)} ms` : us < 1e6 ? `${(us / 1000).toFixed(1)} ms` : `${(us / 1e6).toFixed(2)} s`;
for (const fall of document.querySelectorAll(".fall")) {
  const copies = [...fall.querySelectorAll(".copy")];
  const toggle = fall.querySelector(".copies");
  const show = (shown) => {
    toggle.setAttribute("aria-pressed", String(shown));
    toggle.textContent = shown ? "Hide the legs' stages in the router's sum" : "Show the legs' stages in the router's sum";
    for (const each of copies) each.classList.toggle("hide", !shown);
  };
  if (copies.length) {
    toggle.hidden = false;
    toggle.addEventListener("click", () => show(toggle.getAttribute("aria-pressed") !== "true"));
    show(false);
  }
  const button = fall.querySelector(".zoom");
  button?.addEventListener("click", () => {
    const all = button.getAttribute("aria-pressed") !== "true";
    const box = Number(all ? fall.dataset.all : fall.dataset.us);
    button.setAttribute("aria-pressed", String(all));
    button.textContent = all ? "Show until the first token" : "Show until the last byte";
    for (const rect of fall.querySelectorAll(".track rect")) {
      const from = Math.min(100, Number(rect.dataset.from) / box * 100);
      const to = Math.min(100, (Number(rect.dataset.from) + Number(rect.dataset.us)) / box * 100);
      rect.setAttribute("x", `${from}%`);
      rect.setAttribute("width", `${Math.max(to - from, 0.15)}%`);
    }
    for (const text of fall.querySelectorAll(".axis text")) text.textContent = words(box * Number(text.dataset.step) / 4);
  });
}
