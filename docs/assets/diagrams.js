// Draws every ```mermaid block of a page as SVG, in the colours of the current scheme.
// mermaid lies beside this file and is loaded only by pages that have a diagram.
(() => {
  "use strict";
  const here = document.currentScript.src;
  const blocks = [...document.querySelectorAll("pre.diagram")];
  if (!blocks.length) return;

  const figures = blocks.map((pre) => {
    const figure = document.createElement("div");
    figure.className = "diagram";
    figure.dataset.state = "waiting";
    const source = pre.textContent;
    pre.replaceWith(figure);
    return { figure, source };
  });

  const LIGHT = {
    background: "#ffffff", primaryColor: "#e3eef4", primaryTextColor: "#1d2a30",
    primaryBorderColor: "#6f8d99", lineColor: "#5b6f78", secondaryColor: "#f2f2f2",
    tertiaryColor: "#f7f7f5", clusterBkg: "#f7f8f8", clusterBorder: "#c6d0d4",
    edgeLabelBackground: "#ffffff", noteBkgColor: "#fff7e0", noteTextColor: "#1d2a30",
    noteBorderColor: "#d8c68a", actorBkg: "#e3eef4", actorBorder: "#6f8d99",
    actorTextColor: "#1d2a30", signalColor: "#5b6f78", signalTextColor: "#1d2a30",
    labelBoxBkgColor: "#f2f2f2", loopTextColor: "#1d2a30", labelTextColor: "#1d2a30",
    activationBkgColor: "#cfe0e8", transitionLabelColor: "#1d2a30",
  };
  const DARK = {
    background: "#1e2129", primaryColor: "#2b3a44", primaryTextColor: "#e4eaed",
    primaryBorderColor: "#6d8895", lineColor: "#9db0b8", secondaryColor: "#303540",
    tertiaryColor: "#262a33", clusterBkg: "#242832", clusterBorder: "#454d59",
    edgeLabelBackground: "#1e2129", noteBkgColor: "#3b3626", noteTextColor: "#ece5cf",
    noteBorderColor: "#7d734c", actorBkg: "#2b3a44", actorBorder: "#6d8895",
    actorTextColor: "#e4eaed", signalColor: "#9db0b8", signalTextColor: "#e4eaed",
    labelBoxBkgColor: "#303540", loopTextColor: "#e4eaed", labelTextColor: "#e4eaed",
    activationBkgColor: "#3d5260", transitionLabelColor: "#e4eaed",
  };

  let round = 0;
  async function draw() {
    round += 1;
    const mine = round;
    const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
    mermaid.initialize({
      startOnLoad: false,
      securityLevel: "strict",
      theme: "base",
      darkMode: dark,
      fontFamily: "system-ui, sans-serif",
      themeVariables: { ...(dark ? DARK : LIGHT), fontSize: "13px" },
      flowchart: {
        curve: "basis", padding: 8, nodeSpacing: 22, rankSpacing: 30,
        subGraphTitleMargin: { top: 2, bottom: 12 },
      },
      sequence: { mirrorActors: false, messageMargin: 26, boxMargin: 6, actorMargin: 40, width: 130 },
    });
    for (const [index, { figure, source }] of figures.entries()) {
      if (mine !== round) return; // the scheme has changed meanwhile
      try {
        const { svg } = await mermaid.render(`diagram-${mine}-${index}`, source);
        figure.innerHTML = svg;
        // Text below three quarters of its size cannot be read: rather scroll.
        const drawn = figure.firstElementChild;
        drawn.style.minWidth = `${0.75 * drawn.viewBox.baseVal.width}px`;
        figure.dataset.state = "drawn";
      } catch (error) {
        figure.dataset.state = "failed";
        figure.textContent = `${error}\n\n${source}`;
      }
    }
  }

  const script = document.createElement("script");
  script.src = new URL("mermaid.tiny.js", here).href;
  script.onload = () => {
    draw();
    new MutationObserver(draw).observe(document.body, {
      attributes: true,
      attributeFilter: ["data-md-color-scheme"],
    });
  };
  document.head.append(script);
})();
