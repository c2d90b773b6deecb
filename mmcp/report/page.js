// Draws the pictures of a page when they come to be shown, in the colours of the page, light or dark.
"use strict";

const isDark = matchMedia("(prefers-color-scheme: dark)");
const NARROW = 600; // pixels below which an axis has no room for a title beside its numbers

function readJson(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

function pageColours() {
  const css = getComputedStyle(document.documentElement);
  return { ink: css.getPropertyValue("--ink").trim(), line: css.getPropertyValue("--line").trim(),
           paper: css.getPropertyValue("--paper").trim() };
}

// Give a layout the page's colours; what a picture itself colours stays.
function coloured(layout) {
  const { ink, line } = pageColours();
  const result = { ...layout, font: { ...layout.font, color: ink } };
  for (const key of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
    result[key] = { ...layout[key], gridcolor: line, zerolinecolor: line };
  }
  return result;
}

function draw(picture) {
  if (picture.dataset.ribbon) {
    return drawRibbon(picture);
  }
  const { data, layout } = readJson(picture.dataset.figure);
  return Plotly.newPlot(picture, data, coloured(layout), { displayModeBar: false, responsive: true });
}

function isShown(picture) {
  return picture.checkVisibility ? picture.checkVisibility() : picture.offsetParent !== null;
}

function drawShown() {
  for (const picture of document.querySelectorAll(".picture:not(.js-plotly-plot)")) {
    if (isShown(picture)) {
      draw(picture);
    }
  }
}

function drawAgain() {
  for (const picture of document.querySelectorAll(".picture.js-plotly-plot")) {
    draw(picture);
  }
}

isDark.addEventListener("change", drawAgain);
document.addEventListener("toggle", drawShown, true);
drawShown();
