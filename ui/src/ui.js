// What pages do beside being read: keys, sound, and parts that follow what goes on.
"use strict";

const all = (selector) => Array.from(document.querySelectorAll(selector));

// One sound at a time.
const sound = new Audio();
let button = null;

function stopped() {
  if (button) button.textContent = "▶";
  button = null;
}

function play(wanted) {
  const before = button;
  sound.pause();
  stopped();
  if (before === wanted) return;
  button = wanted;
  button.textContent = "■";
  sound.src = wanted.dataset.play;
  sound.play().catch(() => {
    if (button === wanted) {
      stopped();
      wanted.textContent = "✕";
      wanted.title = "The recording cannot be played: open the row to see why";
    }
  });
}
sound.addEventListener("ended", stopped);

document.addEventListener("click", (event) => {
  const wanted = event.target.closest("[data-play]");
  if (wanted) play(wanted);
});

// Rows are chosen with j and k.
let chosen = -1;

function choose(place) {
  const rows = all("tr[data-href]");
  if (!rows.length) return;
  rows.forEach((row) => row.classList.remove("chosen"));
  chosen = Math.max(0, Math.min(place, rows.length - 1));
  rows[chosen].classList.add("chosen");
  const link = rows[chosen].querySelector("a");
  if (link) link.focus({ preventScroll: true });
  rows[chosen].scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest("input, textarea, select");
  if (typing) {
    if (event.key === "Escape") typing.blur();
    return;
  }
  const row = document.querySelector("tr.chosen");
  if (event.key === "/") {
    const search = document.querySelector("[data-search]");
    if (!search) return;
    search.focus();
    search.select();
  } else if (event.key === "j" || event.key === "k") {
    choose(chosen + (event.key === "j" ? 1 : -1));
  } else if (event.key === "n" || event.key === "p") {
    const page = document.querySelector(event.key === "n" ? "a[rel=next]" : "a[rel=prev]");
    if (!page) return;
    page.click();
  } else if (event.key === "Enter" && row && !event.target.closest("a, button, summary")) {
    location.href = row.dataset.href;
  } else if (event.key === " " && !event.target.closest("button, summary, audio")) {
    const player = document.querySelector("main audio:not([hidden])");
    const wanted = row && row.querySelector("[data-play]");
    if (wanted) play(wanted);
    else if (player) player.paused ? player.play() : player.pause();
    else return;
  } else {
    return;
  }
  event.preventDefault();
});

// The part of a page that changes while a run goes on. A page that nobody sees asks for nothing: a browser has few connections.
const live = document.getElementById("live");
if (live && live.dataset.live) {
  let source = null;
  const close = () => {
    if (source) source.close();
    source = null;
  };
  const show = (event) => {
    const open = all("#live details").map((details) => details.open);
    const scrolled = all("#live .scroll").map((part) => part.scrollLeft);
    live.innerHTML = event.data;
    all("#live details").forEach((details, place) => (details.open = Boolean(open[place])));
    all("#live .scroll").forEach((part, place) => (part.scrollLeft = scrolled[place] || 0));
  };
  let ended = false;
  const follow = () => {
    close();
    if (document.hidden || ended) return;
    source = new EventSource(live.dataset.live);
    source.addEventListener("part", show);
    source.addEventListener("end", (event) => {
      ended = true;
      show(event);
      close();
    });
  };
  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", close);
  addEventListener("pageshow", follow);
}
