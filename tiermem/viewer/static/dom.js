// Elements. Text becomes text and never markup: names in a trace are whatever somebody wrote.

/**
 * An element with properties and children.
 * @param {string} tag
 * @param {Object<string, any>} properties attributes; "on..." are listeners, "class" is the class
 * @param {...(Node|string|number|null)} children
 */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child !== null) element.append(child instanceof Node ? child : visible(String(child)));
  }
  return element;
}

/** Text with the letters replaced that can't be seen or that turn the direction of what follows. */
export function visible(text) {
  return text.replace(/(?![\n\t])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/gu, "\ufffd");
}

/** Put ``children`` in the place of what ``element`` has. */
export function refill(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null));
}

/** A table; ``columns`` are [title, "text" | "number"], rows arrays of cells. */
export function table(caption, columns, rows) {
  const head = el(
    "tr",
    {},
    ...columns.map(([title, kind]) => el("th", { scope: "col", class: kind }, title)),
  );
  const body = rows.map((cells) =>
    el("tr", {}, ...cells.map((cell, index) => el("td", { class: columns[index][1] }, cell))),
  );
  return el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, ...body));
}

/** Make a canvas as sharp as the screen is; returns its context, in CSS pixels. */
export function sharpen(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
