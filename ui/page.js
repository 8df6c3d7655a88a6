// The chat shows an encoded form of each message (appliance/ui/text.py); what is copied is the text itself.
(() => {
  const decode = (shown) =>
    shown
      .replace(/\n?<div class="answer-note[^]*?<\/div>/g, "")
      .replace(/<details class="reasoning"( open)?><summary>Reasoning<\/summary>\n\n/g, "<think>")
      .replace(/<details class="reasoning implied"( open)?><summary>Reasoning<\/summary>\n\n/g, "")
      .replace(/\n\n<\/details>\n\n/g, "</think>")
      .replace(/\\\(\{\}(.*?)\\\)/g, "$$$1$$")
      .replace(/&#0060;/g, "<");

  // What is edited is the text itself too; it is encoded again when it is sent.
  new MutationObserver((changes) => {
    for (const change of changes)
      for (const node of change.addedNodes) {
        const area = node instanceof Element && (node.matches(".edit-textarea") ? node : node.querySelector(".edit-textarea"));
        if (!area || area.value === decode(area.value)) continue;
        area.value = decode(area.value);
        area.dispatchEvent(new Event("input", { bubbles: true }));
      }
  }).observe(document, { childList: true, subtree: true });

  // Gradio draws these two as bare icons.
  const names = { ".submit-button": "Send", ".stop-button": "Stop" };
  new MutationObserver(() => {
    for (const [selector, name] of Object.entries(names))
      for (const button of document.querySelectorAll(`#message ${selector}:not([aria-label])`)) button.ariaLabel = name;
  }).observe(document, { childList: true, subtree: true });

  if (navigator.clipboard) {
    const write = navigator.clipboard.writeText.bind(navigator.clipboard);
    navigator.clipboard.writeText = (text) => write(decode(text));
  }
  // Without a secure context Gradio copies through a text area.
  document.addEventListener("copy", (event) => {
    const area = document.activeElement;
    if (area instanceof HTMLTextAreaElement && area.style.left === "-999999px") {
      event.clipboardData.setData("text/plain", decode(area.value));
      event.preventDefault();
    }
  });
})();
