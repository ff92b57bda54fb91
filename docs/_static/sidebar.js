// The list of pages is longer than a screen: bring the entry of this page into view, without moving the page itself.
(() => {
  const list = document.querySelector(".sidebar-scroll");
  const entry = list && list.querySelector(".sidebar-tree .current-page > .reference");
  if (!entry) return;
  const above = entry.getBoundingClientRect().top - list.getBoundingClientRect().top;
  if (above >= 0 && above + entry.offsetHeight <= list.clientHeight) return;
  list.scrollTo({ top: list.scrollTop + above - list.clientHeight / 2, behavior: "instant" });
})();
