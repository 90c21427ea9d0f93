// What the page does: values under the pointer, and copying of commands. It reads everything from
// the page itself: a plot's range stands in its data-range, its points in its polylines.
"use strict";

const SIDE = 1000;

function shown(value) {
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size < 1e-12 ? "0" : String(Number(value.toPrecision(4)));
}

function pointsOf(polyline, [x0, x1, y0, y1]) {
  const places = polyline.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number));
  return places.map(([x, y]) => ({
    place: x,
    x: x0 + (x / SIDE) * (x1 - x0),
    y: y1 - (y / SIDE) * (y1 - y0),
  }));
}

function nearest(points, place) {
  return points.reduce((best, one) =>
    Math.abs(one.place - place) < Math.abs(best.place - place) ? one : best);
}

function follow(plot) {
  const range = plot.dataset.range.split(" ").map(Number);
  const tip = plot.parentElement.querySelector(".tip");
  const lines = [...plot.querySelectorAll("polyline[data-label]")].map((line) => ({
    label: line.dataset.label,
    points: pointsOf(line, range),
  }));
  const guide = document.createElementNS("http://www.w3.org/2000/svg", "line");
  guide.setAttribute("class", "guide");
  guide.setAttribute("y1", "0");
  guide.setAttribute("y2", String(SIDE));

  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const place = (SIDE * (event.clientX - box.left)) / box.width;
    const found = lines.map(({ label, points }) => ({ label, ...nearest(points, place) }));
    const main = found[0];
    const near = found.filter((one) => one === main || one.place === main.place);
    const texts = near.map((one) => `${one.label} ${shown(one.y)}`);
    tip.textContent = `${shown(main.x)} steps: ${texts.join(", ")}`;
    guide.setAttribute("x1", String(main.place));
    guide.setAttribute("x2", String(main.place));
    plot.append(guide);
    tip.hidden = false;
    const isRight = main.place > SIDE / 2;
    tip.style.left = isRight ? "auto" : `calc(${main.place / 10}% + 0.5rem)`;
    tip.style.right = isRight ? `calc(${100 - main.place / 10}% + 0.5rem)` : "auto";
  });

  plot.addEventListener("pointerleave", () => {
    tip.hidden = true;
    guide.remove();
  });
}

async function copy(button) {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    // a page that was opened from a disk may not be allowed to use the clipboard directly
    getSelection().selectAllChildren(code);
    if (!document.execCommand("copy")) {
      button.textContent = "Press Ctrl-C";
      return;
    }
    getSelection().removeAllRanges();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

document.querySelectorAll("svg.plot").forEach(follow);
document.querySelectorAll("button.copy").forEach((button) => {
  button.addEventListener("click", () => copy(button));
});
