// Draws Vega-Lite specifications in the page's colours, without compiling any of them to code.
// `config`, that of every picture, is defined before this text (assets.py).

const NARROW = 480; // pixels below which a legend has one column

/** Draw a specification in an element, in place of what it held. */
export function draw(place, spec) {
  const element = typeof place === "string" ? document.querySelector(place) : place;
  const columns = element.clientWidth < NARROW ? 1 : config.legend.columns;
  const fitted = { ...config, legend: { ...config.legend, columns } };
  return vegaEmbed(element, spec, { mode: "vega-lite", renderer: "svg", actions: false,
    ast: true, defaultStyle: false, tooltip: { disableDefaultStyle: true }, config: fitted });
}

/** Show a button that copies the text of the element it names, where the browser lets it. */
export function offerCopy(button) {
  const label = button.textContent;
  button.hidden = false;
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copy).textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = label; }, 2000);
  });
}
