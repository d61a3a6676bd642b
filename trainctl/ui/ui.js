// Redraws what has changed on a page of trainctl ui, orders and filters its rows, shows the values
// at the pointer, and copies commands.
"use strict";

const filter = document.querySelector("input");
const note = document.querySelector("#note");
const compare = document.querySelector("#compare");

// Rows of a page by its address: ?q=failed+anna&by=-cost; its links keep them.
function arrange(page) {
  const asked = new URLSearchParams(location.search);
  const words = (asked.get(filter?.name) ?? "").toLowerCase().split(" ");
  for (const row of page.querySelectorAll(".jobs tbody tr, .lines tbody tr")) {
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  }
  const by = asked.get("by") ?? "";
  const heads = [...page.querySelectorAll(".jobs thead a")];
  const column = heads.findIndex((head) => head.textContent === by.replace("-", ""));
  if (column >= 0) {
    const value = (row) => {
      const { began } = row.querySelector("a").dataset;
      return by.endsWith("age") ? -began : row.children[column].textContent.replace(/[$,]/g, "");
    };
    const sign = by.startsWith("-") ? -1 : 1;
    const compared = (a, b) => a - b || String(a).localeCompare(b, undefined, { numeric: true });
    const body = page.querySelector(".jobs tbody");
    body.append(...[...body.children].sort((a, b) => sign * compared(value(a), value(b))));
  }
  for (const link of page.querySelectorAll("a[href]")) {
    const to = new URL(link.getAttribute("href"), location.href);
    for (const key of ["q", "by"]) {
      if (asked.has(key)) to.searchParams.set(key, asked.get(key));
    }
    if (heads.includes(link)) {
      to.searchParams.set("by", by === link.textContent ? `-${by}` : link.textContent);
    }
    link.href = to;
  }
}

// Changes only what differs, so that nothing jumps; what holds a selection stays as it is.
function update(old, now) {
  if (old.isEqualNode(now) || old.nodeName === "OUTPUT") return;
  const chosen = getSelection();
  if (old.matches?.("section, dl") && !chosen.isCollapsed && chosen.containsNode(old, true)) return;
  if (old.nodeName !== now.nodeName) return old.replaceWith(now);
  if (!old.attributes) return (old.nodeValue = now.nodeValue);
  for (const { name } of [...old.attributes]) {
    if (!now.hasAttribute(name) && name !== "style") old.removeAttribute(name);
  }
  for (const { name, value } of now.attributes) old.setAttribute(name, value);
  const before = [...old.childNodes];
  const after = [...now.childNodes];
  after.forEach((each, at) => (at in before ? update(before[at], each) : old.append(each)));
  before.slice(after.length).forEach((each) => each.remove());
}

async function draw() {
  try {
    const answer = await fetch(location);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    arrange(page);
    update(document.querySelector("#live"), page.querySelector("#live"));
    note.textContent = "";
  } catch {
    note.textContent = "trainctl ui does not answer: this is old";
  }
  offer();
  wait();
}

// A link to the runs of a few rows on one chart.
function offer() {
  if (!compare) return;
  const links = document.querySelectorAll(".jobs tr:not([hidden]) [data-run]");
  const runs = [...new Set([...links].map((link) => link.dataset.run).filter(Boolean))];
  compare.hidden = runs.length < 2 || runs.length > 7;
  compare.href = `compare?runs=${runs.map(encodeURIComponent)}`;
}

function wait() {
  if (!document.querySelector("[data-over]")) setTimeout(draw, 3000);
}

filter?.addEventListener("input", () => {
  const address = new URL(location);
  address.searchParams.set(filter.name, filter.value);
  history.replaceState(null, "", address);
  arrange(document);
  offer();
});
document.addEventListener("pointermove", ({ target, clientX }) => {
  const plot = target.closest(".plot");
  for (const each of document.querySelectorAll(".plot")) {
    if (each !== plot) each.querySelector("output").textContent = "";
  }
  if (!plot) return;
  const { left, width } = plot.querySelector("svg").getBoundingClientRect();
  const far = ([column]) => Math.abs(column - ((clientX - left) / width) * 149);
  const nearest = [...plot.querySelectorAll("[data-values]")].map(({ dataset }) => {
    const [column, step, value] = JSON.parse(dataset.values).reduce((a, b) => (far(b) < far(a) ? b : a));
    return { column, step, text: `${dataset.name} ${value}` };
  });
  const best = nearest.reduce((a, b) => (far([b.column]) < far([a.column]) ? b : a));
  const shown = nearest.filter(({ column }) => column === best.column).map(({ text }) => text);
  plot.querySelector("output").textContent = `step ${best.step}: ${shown.join(", ")}`;
});
document.addEventListener("click", async ({ target }) => {
  if (!target.matches("button")) return;
  await navigator.clipboard.writeText(target.textContent);
  note.textContent = "copied";
});
if (filter) filter.value = new URLSearchParams(location.search).get(filter.name) ?? "";
arrange(document);
offer();
wait();
