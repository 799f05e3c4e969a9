// The data of a page: a block of compressed JSON, unpacked when the page is opened, and matrices of whole numbers within it.
"use strict";

const Data = (() => {
  const common = JSON.parse(document.getElementById("report-data").textContent);
  const known = new Map();

  function bytes(base64) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
    const text = atob(base64), found = new Uint8Array(text.length);
    for (let i = 0; i < found.length; i++) found[i] = text.charCodeAt(i);
    return found;
  }

  const inflated = (base64) => new Response(new Blob([bytes(base64)]).stream().pipeThrough(new DecompressionStream("deflate")));

  // What a page is drawn from; an empty object if it is drawn from nothing.
  function of(page) {
    const block = document.querySelector(`script[data-block="${CSS.escape(page)}"]`);
    if (!known.has(page)) known.set(page, block ? inflated(block.textContent).json() : Promise.resolve({}));
    return known.get(page);
  }

  async function unpacked(base64) {
    return new Uint8Array(await inflated(base64).arrayBuffer());
  }

  // Low bytes, then high bytes, of the steps from each number to the next.
  async function numbers(base64) {
    const raw = await unpacked(base64), count = raw.length / 2, found = new Int16Array(count);
    for (let i = 0, last = 0; i < count; i++) found[i] = last = (last + raw[i] + 256 * raw[count + i]) << 16 >> 16;
    return found;
  }

  return { common, of, unpacked, numbers };
})();
