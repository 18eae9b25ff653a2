// Where the data come from: blocks inside the page (report.html), or the server that sent it (the live page). Both have the same answers
// under the same paths, which burnish/report/page_data.py lists.

async function inflate(letters) {
  const text = atob(letters), bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const parsed = (bytes) => JSON.parse(new TextDecoder().decode(bytes));

class FrozenSource {
  constructor() {
    this.isLive = false;
    this.blocksPerSearch = 1;
    this.elements = new Map();
    this.isRead = new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve));
    this.find();
  }

  find() {
    for (const element of document.querySelectorAll("script[data-path]")) this.elements.set(element.dataset.path, element);
  }

  // Blocks of samples stand behind the script, and are there when the whole page has been read.
  async bytes(path) {
    if (!this.elements.has(path)) {
      await this.isRead;
      this.find();
    }
    return inflate(this.elements.get(path).textContent);
  }

  async json(path) {
    return parsed(await this.bytes(path));
  }
}

// The server did not send the data: there was no answer (0), the run is gone (404), a table changed (409), or what the text says.
class RefusedError extends Error {
  constructor(status, text) {
    super(text.trim() || "status " + status);
    this.status = status;
  }
}

class LiveSource {
  constructor() {
    this.isLive = true;
    this.blocksPerSearch = 64;
  }

  async bytes(path, options = {}) {
    const query = new URLSearchParams(options).toString(), place = path.split("/").map(encodeURIComponent).join("/");
    const response = await fetch("api/" + place + (query ? "?" + query : ""), { cache: "no-store" }).catch(() => {
      throw new RefusedError(0, "no answer: has burnish view ended?");
    });
    if (!response.ok) throw new RefusedError(response.status, await response.text());
    return new Uint8Array(await response.arrayBuffer());
  }

  async json(path, options) {
    return parsed(await this.bytes(path, options));
  }
}

function findSource() {
  return document.querySelector("script[data-path]") ? new FrozenSource() : new LiveSource();
}
