// Draws Vega-Lite specifications in the page's colours, without compiling any of them to code.
const font = "system-ui, -apple-system, 'Segoe UI', sans-serif";
const ink = { labelColor: "var(--ink)", titleColor: "var(--soft)", labelFont: font, titleFont: font };
const config = {
  background: "transparent",
  font,
  view: { stroke: null },
  axis: { ...ink, labelFontSize: 12, titleFontSize: 12, gridColor: "var(--line)", domainColor: "var(--soft)", tickColor: "var(--soft)",
    titleFontWeight: "normal" },
  legend: { ...ink, labelFontSize: 12 },
  text: { fontSize: 12 },
};

/** Draw a specification in an element, in place of what it held. */
export function draw(place, spec) {
  return vegaEmbed(place, spec, { mode: "vega-lite", renderer: "svg", actions: false,
    ast: true, defaultStyle: false, tooltip: { disableDefaultStyle: true }, config });
}
