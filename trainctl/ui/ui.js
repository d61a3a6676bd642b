// Redraws what changes on a page of trainctl ui, filters its jobs, and copies commands.
"use strict";

const filter = document.querySelector("input");
const note = document.querySelector("#note");

function choose() {
  const words = filter?.value.toLowerCase().split(" ") ?? [];
  for (const row of document.querySelectorAll(".jobs tbody tr")) {
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  }
}

async function draw() {
  try {
    const answer = await fetch(location);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.querySelector("#live").replaceWith(page.querySelector("#live"));
    note.textContent = "";
  } catch {
    note.textContent = "trainctl ui does not answer: this is old";
  }
  choose();
  wait();
}

function wait() {
  if (!document.querySelector("[data-over]")) setTimeout(draw, 3000);
}

filter?.addEventListener("input", choose);
document.addEventListener("click", async ({ target }) => {
  if (!target.matches("button")) return;
  await navigator.clipboard.writeText(target.textContent);
  note.textContent = "copied";
});
choose();
wait();
