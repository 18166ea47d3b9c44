"use strict";
// What the pages of `rlft report` and `rlft rank` share.

const by = (id) => document.getElementById(id);
const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
function otherTheme() {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
}
