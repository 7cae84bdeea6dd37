"use strict";
// The page is whole without this: it opens and closes, filters, and enlarges the timeline.
(() => {
  const tree = document.getElementById("tree");
  const all = () => [...tree.querySelectorAll("details")];
  const setAll = (open) => all().forEach((one) => { one.open = open; });
  document.getElementById("open").addEventListener("click", () => setAll(true));
  document.getElementById("close").addEventListener("click", () => setAll(false));

  // A branch is shown if its name, or that of something in it, has the words that are asked for.
  const nameOf = (one) => one.querySelector(".name")?.textContent.toLowerCase() ?? "";
  const show = (element, words, path) => {
    const isBranch = element.tagName === "DETAILS";
    const own = `${path} ${nameOf(element)}`;
    const matches = words.every((word) => own.includes(word));
    let inside = false;
    if (isBranch) {
      for (const child of element.children) {
        if (child.tagName !== "SUMMARY") {
          inside = show(child, matches ? [] : words, own) || inside;
        }
      }
      if (words.length && inside && !matches) element.open = true;
    }
    element.hidden = !(matches || inside);
    return matches || inside;
  };
  document.getElementById("filter").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = false;
    for (const child of tree.children) {
      if (!child.classList.contains("head")) found = show(child, words, "") || found;
    }
    document.getElementById("nothing").hidden = found;
  });

  const zoom = document.getElementById("zoom");
  const drawing = document.querySelector("svg.timeline");
  zoom.addEventListener("input", () => {
    const scroll = drawing.parentElement;
    const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / drawing.clientWidth;
    drawing.setAttribute("width", `${100 * 2 ** zoom.value}%`);
    drawing.classList.toggle("near", zoom.value >= 2.5);
    scroll.scrollLeft = middle * drawing.clientWidth - scroll.clientWidth / 2;
  });

  // On paper nothing opens.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all().filter((one) => !one.open);
    setAll(true);
  });
  addEventListener("afterprint", () => closed.forEach((one) => { one.open = false; }));
})();
