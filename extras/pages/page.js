"use strict";
// Colours: Okabe-Ito, lightened on dark paper so that each has a contrast of 3 or more.
const COLOURS = {
  light: { blue: "#0072B2", orange: "#D98A00", green: "#009E73", pink: "#C0609A", sky: "#3A9AD0", red: "#D55E00", violet: "#6A4C93", grey: "#707070" },
  dark: { blue: "#4AA8E0", orange: "#E69F00", green: "#2BC49A", pink: "#E59AC6", sky: "#8CCBF2", red: "#F27B2E", violet: "#B79CE0", grey: "#B0B0B0" },
};
const dark = matchMedia("(prefers-color-scheme: dark)");
let figures = {};

function theme() {
  const style = getComputedStyle(document.documentElement);
  const own = (name) => style.getPropertyValue("--" + name).trim();
  const band = dark.matches ? "rgba(120,170,220,.16)" : "rgba(0,90,160,.09)";
  return { ...COLOURS[dark.matches ? "dark" : "light"], ink: own("ink"), muted: own("muted"), grid: own("grid"), card: own("card"), band };
}

function coloured(value, colours) {
  if (typeof value === "string") return value[0] === "@" ? colours[value.slice(1)] : value;
  if (Array.isArray(value)) return value.map((one) => coloured(one, colours));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, coloured(one, colours)]));
}

function axis(given, colours) {
  const title = { ...given.title, standoff: 8 };
  return { gridcolor: colours.grid, linecolor: colours.grid, zeroline: false, automargin: true, ...given, title };
}

function draw(id) {
  const element = document.getElementById(id), chart = figures[id], colours = theme();
  const choice = document.querySelector(`select[data-for=${id}]`);
  const figure = coloured(chart.figures[choice ? choice.value : Object.keys(chart.figures)[0]], colours);
  const narrow = element.clientWidth < 560;
  const layout = {
    ...figure.layout,
    xaxis: axis(figure.layout.xaxis, colours),
    yaxis: axis(figure.layout.yaxis, colours),
    font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 12 : 13, color: colours.ink },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 8, r: 12, t: 8, b: 8 },
    legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", traceorder: "normal" }, // plotly reverses that of stacked bars
    hoverlabel: { bgcolor: colours.card, bordercolor: colours.muted, font: { color: colours.ink }, align: "left" },
    hovermode: "closest",
    dragmode: false,
    barmode: figure.layout.barmode || "overlay",
    height: chart.height_px,
  };
  return Plotly.react(element, figure.data, layout, { displayModeBar: false, responsive: true });
}

async function unpacked(id) {
  const packed = await fetch("data:application/gzip;base64," + document.getElementById(id).textContent);
  return new Response(packed.body.pipeThrough(new DecompressionStream("gzip"))).text();
}

async function start() {
  const [data, code] = await Promise.all([unpacked("figures"), unpacked("library")]);
  figures = JSON.parse(data);
  const script = document.createElement("script");
  script.textContent = code;
  document.head.append(script);
  const ids = Object.keys(figures), drawn = new Set();
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || drawn.has(entry.target.id)) continue;
      drawn.add(entry.target.id);
      draw(entry.target.id);
    }
    performance.mark("drawn"); // what is in sight; the rest is drawn when a reader comes near
  }, { rootMargin: "60%" });
  ids.forEach((id) => near.observe(document.getElementById(id)));
  for (const choice of document.querySelectorAll("select[data-for]"))
    choice.addEventListener("change", () => draw(choice.dataset.for));
  dark.addEventListener("change", () => drawn.forEach(draw));
  addEventListener("beforeprint", () => ids.forEach(draw));
}

if (document.getElementById("library").textContent) start();
