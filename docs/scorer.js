// The order of what a search of these pages finds: concepts, then how-to pages and methods, then the rest; names of the
// package itself before names of its rooms, and both before members of classes. Sphinx reads all of this object.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    const folder = page.split("/")[0];
    const added = { concepts: 30, quickstart: 25, howto: 25, examples: 25, methods: 20, limits: 10, gallery: 10 };
    const names = anchor.replace(/^#/, "").split(".").length;
    if (kind === "object") return score + (names <= 2 ? 25 : names === 3 ? 5 : -20);
    return score + (added[folder] || 0);
  },
  // Sphinx's own values
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
