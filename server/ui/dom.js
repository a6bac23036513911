// Elements without markup in strings: every text goes through text nodes, so no label can become HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

// Make the children of `root` like `wanted`, and touch only what differs: focus, scroll and selection survive a refresh.
export function patch(root, ...wanted) {
  const nodes = wanted.flat(Infinity).filter((node) => node !== null && node !== undefined && node !== false);
  nodes.forEach((node, index) => {
    const fresh = typeof node === "string" ? document.createTextNode(node) : node;
    const old = root.childNodes[index];
    if (!old) root.append(fresh);
    else if (!sameKind(old, fresh)) old.replaceWith(fresh);
    else update(old, fresh);
  });
  while (root.childNodes.length > nodes.length) root.lastChild.remove();
}

function sameKind(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return false;
  return old.nodeType !== Node.ELEMENT_NODE || old.getAttribute("data-key") === fresh.getAttribute("data-key");
}

function update(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const name of old.getAttributeNames()) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const name of fresh.getAttributeNames()) {
    if (old.getAttribute(name) !== fresh.getAttribute(name)) old.setAttribute(name, fresh.getAttribute(name));
  }
  patch(old, [...fresh.childNodes]);
}
