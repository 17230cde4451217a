// Elements of a page. Every text stays text: nothing here reads HTML.

// An element with attributes and children (elements or texts).
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

export function setText(id, text) {
  byId(id).textContent = text;
}

// Shows the text in the element, or hides the element if there is none.
export function setAlert(id, text) {
  byId(id).textContent = text;
  byId(id).hidden = !text;
}
