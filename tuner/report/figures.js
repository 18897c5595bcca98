// Draws Vega-Lite specifications in the page's colours, without compiling any of them to code.
// `config`, that of every picture, is defined before this text (assets.py).

/** Draw a specification in an element, in place of what it held. */
export function draw(place, spec) {
  return vegaEmbed(place, spec, { mode: "vega-lite", renderer: "svg", actions: false,
    ast: true, defaultStyle: false, tooltip: { disableDefaultStyle: true }, config });
}
